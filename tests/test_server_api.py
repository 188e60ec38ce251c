"""Whole answers over HTTP: what OpenAI's objects hold, and how every bad request is refused by name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.testing import answering, scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters
from server_support import ANSWERS, NAME, QUESTION, RIGHT, WRONG, Server, hold_rounds, until

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server():
    with Server(scripted_ensemble(ANSWERS)) as running:
        yield running


def refused(response, status=400):
    """The error object of a refused request."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------------- answers


def test_chat_has_every_field_of_openai_and_the_record(server):  # F23
    reply = server.chat().json()
    assert set(reply) == {
        "id", "object", "created", "model", "choices", "usage", "system_fingerprint", "safe_llm"
    }  # fmt: skip
    assert (reply["object"], reply["model"]) == ("chat.completion", NAME)
    message = {"role": "assistant", "content": RIGHT, "refusal": None}
    assert reply["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    usage = reply["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    (record,) = reply["safe_llm"]
    assert record["members"] == ["drafter", "verifier"]
    assert record["n_tokens"] == usage["completion_tokens"]


def test_record_counts_what_the_ensemble_changed():
    with Server(scripted_ensemble({QUESTION: WRONG}, {QUESTION: RIGHT}, weights=(1, 2))) as server:
        reply = server.chat().json()
    assert reply["safe_llm"][0]["n_replaced"] >= 1


def test_completion_continues_texts_of_a_list_in_order(server):
    reply = server.complete([QUESTION, "json"], max_tokens=64).json()
    assert reply["object"] == "text_completion"
    assert [choice["text"] for choice in reply["choices"]] == [RIGHT, ANSWERS["json"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert len(reply["safe_llm"]) == 2


def test_several_answers_are_one_batch_and_their_prompt_counts_once(server, monkeypatch):  # F18
    one = server.chat("long", max_tokens=200).json()
    calls = server.ensemble.members[0].backend.calls
    before = len(calls)
    permits = hold_rounds(monkeypatch, server.ensemble)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(server.chat, "long", n=3, max_tokens=200)
        until(lambda: sum(server.ensemble.occupancy) == 3)
        permits.release(1000)
        reply = asking.result().json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == [
        one["choices"][0]["message"]["content"]
    ] * 3
    assert reply["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert max(len(feeds) for feeds in calls[before:]) == 3


def test_sampled_answers_differ_and_the_seed_repeats_them(server):
    def texts(**fields):
        reply = server.chat("nobody knows", n=4, temperature=2.0, max_tokens=8, min_tokens=8, **fields).json()
        return [choice["message"]["content"] for choice in reply["choices"]]

    first = texts(seed=-7)
    assert first == texts(seed=-7)
    assert len(set(first)) == 4
    assert first != texts()


def test_default_seed_of_the_server_counts_on_too():
    ensemble = scripted_ensemble(ANSWERS)
    ensemble.sampling |= {"seed": 1, "temperature": 2.0, "min_tokens": 8, "max_tokens": 8}
    with Server(ensemble) as server:
        choices = server.chat("nobody knows", n=2).json()["choices"]
    assert choices[0]["message"]["content"] != choices[1]["message"]["content"]


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.0}, {"temperature": 1, "top_p": 0}])
def test_zeros_are_greedy(server, parameters):  # F08
    assert server.chat(**parameters).json()["choices"][0]["message"]["content"] == RIGHT


def test_tiny_temperature_is_no_nan(server):  # F07
    for temperature in (1e-4, 1e-12):
        reply = server.chat(temperature=temperature, top_p=0.0001).json()
        assert reply["choices"][0]["message"]["content"] == RIGHT


def test_nulls_are_as_if_absent(server):  # F03
    fields = ["max_tokens", "stop", "temperature", "n", "tools", "response_format", "stream", "stream_options", "foo"]
    message = {"role": "user", "content": QUESTION, "name": None, "audio": None, "function_call": None}
    body = {"model": NAME, "messages": [message], **dict.fromkeys(fields)}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == RIGHT


def test_stop_string_ends_the_answer_and_its_logprobs(server):
    choice = server.complete(stop=[" 42"], logprobs=2).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The answer is", "stop")
    assert "".join(choice["logprobs"]["tokens"]) == "The answer is"
    assert choice["logprobs"]["text_offset"] == [0, 3, 10]
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"])


def test_chat_logprobs_are_the_tokens_of_the_text(server):
    text = ANSWERS["Say it in Japanese."]
    choice = server.chat("Say it in Japanese.", logprobs=True, top_logprobs=3).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"] == text
    assert {len(token["top_logprobs"]) for token in content} == {3}


def test_unasked_token_has_openais_number_for_an_unknown_logprob():
    # the verifier's word takes several drafter tokens; the drafter, unsure, was asked for the first one only
    drafter = scripted_member("d", characters([]), lambda v: answering(v, {"?": "xy"}, peak=0.4))
    verifier = scripted_member("v", characters(["cat"]), {"?": "cat"})
    ensemble = Ensemble([drafter, verifier], EnsembleConfig(method="gac", lookahead=5))
    with Server(ensemble) as server:
        choice = server.complete("?", logprobs=0, max_tokens=3).json()["choices"][0]
    assert choice["text"] == "cat"
    assert choice["logprobs"]["token_logprobs"][1:] == [-9999.0, -9999.0]


def test_length_says_which_limit_it_was(server):  # F22
    reply = server.chat("long", max_completion_tokens=5).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["safe_llm"][0]["finish_detail"] == "max_tokens"
    members = [scripted_member("m", byte_level(), ANSWERS, max_context=40)]
    with Server(Ensemble(members)) as small:
        reply = small.chat("long").json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["safe_llm"][0]["finish_detail"] == "context"


def test_thoughts_are_apart_from_the_answer(server):
    message = server.chat("think").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, hm", "It is 42.")


def test_answer_is_valid_unicode_whatever_bytes_the_members_write():  # F11
    def bytes_of(vocabulary):
        bad = next(i for i in range(vocabulary.width) if vocabulary.surface(i) == b"\xf0")

        def next_logits(ids):
            return [0.0 if i == bad else -20.0 for i in range(vocabulary.width)]

        return next_logits

    with Server(Ensemble([scripted_member("m", byte_level(), bytes_of)])) as server:
        content = server.chat(max_tokens=3).json()["choices"][0]["message"]["content"]
    assert content == "\ufffd" * 3


# ---------------------------------------------------------------------- tools and schemas


def test_tool_calls_and_their_results_go_round():
    seen = []

    def reply(transcript):
        seen.append(transcript)
        return "It is 2." if "Result of add:\n2" in transcript else CALL

    with Server(scripted_ensemble(reply)) as server:
        first = server.chat(tools=[TOOL], tool_choice="required", max_tokens=100).json()["choices"][0]
        (call,) = first["message"]["tool_calls"]
        assert (first["finish_reason"], first["message"]["content"]) == ("tool_calls", None)
        assert set(call) == {"id", "type", "function"}
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        # the answer goes back as it came, nulls and our own fields included
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": QUESTION},
            {**first["message"], "reasoning_content": "", "annotations": [], "audio": None},
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ]
        body = {"model": NAME, "messages": messages, "tools": [TOOL], "tool_choice": "auto"}
        last = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert (last["message"]["content"], last["finish_reason"]) == ("It is 2.", "stop")
    assert "Be brief." in seen[-1]


def test_call_that_is_cut_off_is_text_and_no_call():
    with Server(scripted_ensemble(lambda _: CALL)) as server:
        choice = server.chat(tools=[TOOL], max_tokens=12).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("<tool_call>")


def test_tool_choice_none_leaves_calls_text():
    with Server(scripted_ensemble(lambda _: CALL)) as server:
        choice = server.chat(tools=[TOOL], tool_choice="none", max_tokens=64).json()["choices"][0]
    assert choice["message"]["content"] == CALL


def test_named_tool_must_be_called(server):
    choice = {"type": "function", "function": {"name": "add"}}
    message = server.chat(tools=[TOOL], tool_choice=choice, max_tokens=100).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_response_format_is_enforced(server, kind):
    schema = {"type": "object", "properties": {"a": {"type": ["integer", "null"], "default": None}}, "required": ["a"]}
    form = {"type": kind} | ({"json_schema": {"name": "x", "schema": schema}} if kind == "json_schema" else {})
    content = server.chat("json", response_format=form).json()["choices"][0]["message"]["content"]
    assert json.loads(content) == {"a": 1}


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 999999}, "temperature", "invalid_value"),  # F06
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", None),
        ({"top_p": -1}, "top_p", "invalid_value"),
        ({"top_k": 0.01}, "top_k", "unknown_parameter"),  # F05
        ({"repeat_penalty": 0}, "repeat_penalty", "unknown_parameter"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unknown_parameter"),  # G01, G02
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "unknown_parameter"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 10**6}, "n", "invalid_value"),  # G10
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),  # F02
        ({"max_tokens": 10**9}, "max_tokens", "invalid_value"),  # G10
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stop": ["x"] * 65}, "stop", "invalid_value"),  # F19
        ({"stop": "x" * 100_000}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage", "unknown_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [TOOL, TOOL]}, None, "invalid_value"),
        ({"tool_choice": "required"}, None, "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"response_format": NO_SCHEMA}, None, "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "invalid_prompt"),  # F01
        ({"messages": [{"role": "god", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": "x"}] * 100_000}, "messages", "invalid_value"),  # G10
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "invalid_prompt",
        ),
        ({"model": 5}, "model", "invalid_type"),
    ],
)  # fmt: skip
def test_bad_field_is_refused_by_name_and_the_server_lives_on(server, fields, param, code):
    error = refused(server.chat(**fields))
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert code in (None, error["code"])
    assert server.chat(max_tokens=4).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([], "prompt"), ([""], "prompt"), ([1, 2], "prompt[0]"), ({}, "prompt"), ([["x"]], "prompt[0]")],
)
def test_bad_prompt_is_refused(server, prompt, param):  # F01
    assert refused(server.complete(prompt))["param"] == param


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}])
def test_unsupported_fields_of_completions_are_refused_unless_they_ask_for_nothing(server, fields):
    assert refused(server.complete(**fields))["code"] == "unsupported_parameter"
    assert server.complete(echo=False, suffix="", best_of=1, frequency_penalty=0, logit_bias={}).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b'{"temperature": NaN}', "NaN"),  # F06
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"temperature": 1e999}', "finite"),
        (b'{"n": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"messages": ' + b"[" * 100_000, "nested"),
        (b'{"tools": ' + b"[" * 80 + b"]" * 80 + b"}", "nested"),
        (rb'{"\ud83d": 1}', "lone surrogate"),
    ],
)
def test_body_that_is_no_request_is_refused(server, body, says):
    assert says in refused(server.post("/v1/chat/completions", body))["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"model": "x\ud83d"}', "model"),
        (r'{"prompt": "x\ud83d"}', "prompt"),
        (r'{"stop": ["a", "x\ud83d"]}', "stop[1]"),
        (r'{"messages": [{"role": "user", "content": "x\ud83d"}]}', "messages[0].content"),
    ],
)
def test_lone_surrogate_is_refused_wherever_it_stands(server, body, param):  # F10
    error = refused(server.post("/v1/chat/completions", body.encode()))
    assert (error["param"], error["code"]) == (param, "invalid_text")


def test_prompt_longer_than_the_context_is_refused_with_numbers(server):  # F04, F16
    error = refused(server.chat("secret " * 5000))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "4096 tokens" in error["message"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "Qwen/Qwen2.5-7B-Instruct", "demo", ""])
def test_requests_name_served_models_only(server, name):  # G06
    error = refused(server.chat(model=name), status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    if name:
        refused(server.get(f"/v1/models/{name}"), status=404)


def test_models_are_listed_and_found_by_name(server):
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 4096)
    assert server.get(f"/v1/models/{NAME}").json() == card


def test_unknown_paths_and_methods_have_openais_error(server):
    refused(server.get("/v1/nothing"), status=404)
    response = server.get("/v1/chat/completions")
    refused(response, status=405)
    assert response.headers["allow"] == "POST"


def test_body_must_be_said_to_be_json(server):
    response = server.post("/v1/completions", {}, headers={"Content-Type": "text/plain"})
    assert refused(response, status=415)["code"] == "unsupported_media_type"

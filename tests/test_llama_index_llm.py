"""SafeLLM as a LlamaIndex model: construction, parameters, the four methods, messages, serialization."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    AudioBlock,
    CacheControl,
    CachePoint,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate

import safe_llm
from llama_index.llms.safe_llm import SafeLLM
from llama_index_support import (
    DRAFTED,
    LONG,
    NUMBERS,
    QUESTION,
    VERIFIED,
    everyway,
    llm,
    replying,
    safe,
    templated,
    text_of,
    user,
)
from safe_llm.config import EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, ContextOverflowError, PromptError, UnknownNameError
from safe_llm.testing import scripted_ensemble

# ---------------------------------------------------------------------- construction


def test_it_is_a_custom_and_a_function_calling_model():
    model = llm()
    assert isinstance(model, CustomLLM)
    assert isinstance(model, FunctionCallingLLM)
    assert model.class_name() == "Safe_llm"


def test_importing_and_constructing_need_no_torch():
    code = (
        "import sys; from llama_index.llms.safe_llm import SafeLLM; llm = SafeLLM(preset='demo', max_tokens=9)\n"
        "repr(llm), llm.to_dict(), llm.to_payload(), llm.model_name\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_namespace_folders_are_no_packages():
    import llama_index

    folder = Path(sys.modules["llama_index.llms.safe_llm"].__file__).parent
    assert not (folder.parent / "__init__.py").exists()
    assert not (folder.parent.parent / "__init__.py").exists()
    assert len(list(llama_index.__path__)) > 1


def test_the_engine_knows_nothing_of_llama_index():
    files = list(Path(safe_llm.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert not [f for f in files if re.search(r"^\s*(from|import) llama_index", f.read_text(), flags=re.MULTILINE)]


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'temperature'"):
        SafeLLM(preset="demo", temprature=0.5)


@pytest.mark.parametrize("method", ["complete", "chat", "stream_complete", "stream_chat"])
def test_an_unknown_call_parameter_names_the_nearest(method):
    prompt = QUESTION if "complete" in method else user(QUESTION)
    with pytest.raises(UnknownNameError, match="did you mean 'top_p'"):
        getattr(llm(), method)(prompt, topp=0.5)


@pytest.mark.parametrize("method", ["acomplete", "achat", "astream_complete", "astream_chat"])
async def test_an_unknown_call_parameter_names_the_nearest_async(method):
    prompt = QUESTION if "complete" in method else user(QUESTION)
    with pytest.raises(UnknownNameError, match="did you mean 'top_p'"):
        await getattr(llm(), method)(prompt, topp=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of ensemble, preset and drafter"),
        ({"preset": "demo", "drafter": "x"}, "exactly one"),
        ({"preset": "dmeo"}, "did you mean 'demo'"),
        ({"preset": "demo", "temperature": "hot"}, "temperature must be"),
        ({"preset": "demo", "max_tokens": 0}, "max_tokens must be"),
        ({"preset": "demo", "timeout": 0}, "timeout must be more than 0"),
        ({"preset": "demo", "ensemble_config": {"lookahed": 3}}, "did you mean 'lookahead'"),
    ],
)
def test_bad_construction(values, message):
    with pytest.raises(ConfigError, match=message):
        SafeLLM(**values)


def test_objects_of_one_description_share_the_ensemble(monkeypatch):
    monkeypatch.setattr("safe_llm.ensemble.Ensemble.from_spec", lambda spec, progress: scripted_ensemble({"a": "b"}))
    spec = EnsembleSpec(drafter=MemberConfig(model="shared-one"))
    one, other = SafeLLM(preset=spec), SafeLLM(drafter="shared-one")
    assert not one._handle().is_loaded
    assert one.load() is other.load()


# ---------------------------------------------------------------------- conformance


@pytest.mark.parametrize("members", [safe, lambda: templated(lambda c: VERIFIED)], ids=["transcript", "templates"])
async def test_all_ways_give_the_same_answer(members):
    model = SafeLLM(ensemble=members(), is_chat_model=True)
    responses = await everyway(model, QUESTION)
    assert {way: text_of(r) for way, r in responses.items()} == dict.fromkeys(responses, VERIFIED)
    raws = {way: r.raw for way, r in responses.items()}
    for raw in raws.values():
        assert raw["usage"] == raws["chat"]["usage"]
        assert raw["safe_points"] == raws["chat"]["safe_points"]


async def test_the_last_response_alone_carries_the_record():
    expected = safe().generate([{"role": "user", "content": QUESTION}])
    for responses in (
        list(llm().stream_complete(QUESTION)),
        list(llm().stream_chat(user(QUESTION))),
        [r async for r in await llm().astream_chat(user(QUESTION))],
    ):
        *before, last = responses
        assert before
        assert all(response.raw is None and response.logprobs is None for response in before)
        assert last.delta == ""
        assert last.raw["usage"] == {
            "prompt_tokens": expected.usage.prompt_tokens,
            "completion_tokens": expected.usage.completion_tokens,
            "total_tokens": expected.usage.total_tokens,
        }
        assert last.raw["finish_reason"] == "stop"
        assert last.raw["safe"]["members"] == ["drafter", "verifier"]
        assert last.raw["safe"]["n_points"] == len(last.raw["safe_points"]) == len(expected.points) > 0
        assert any(point["replaced"] for point in last.raw["safe_points"])
        json.dumps(last.raw)


def test_text_is_cumulative_and_delta_is_new():
    text = ""
    for response in llm().stream_complete(QUESTION):
        text += response.delta
        assert response.text == text
    assert text == VERIFIED
    text = ""
    for response in llm().stream_chat(user(QUESTION)):
        text += response.delta
        assert response.message.content == text
    assert text == VERIFIED
    assert llm().complete(QUESTION).delta is None


@pytest.mark.parametrize("stop", [[" oak"], ["oak, tw", "zzz"], ["the lefty", ", two steps"], "new"])
async def test_a_stop_string_cuts_exactly_and_ends_decoding(stop):
    first = min(VERIFIED.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in VERIFIED)
    for responses in (
        await everyway(llm(), QUESTION, stop=stop),
        await everyway(llm(stop=stop), QUESTION),
    ):
        for response in responses.values():
            assert text_of(response) == VERIFIED[:first]
            assert response.raw["safe"]["finish_detail"] == "stop_string"
            assert response.raw["usage"]["completion_tokens"] < 41  # the whole answer's


def test_decoding_ends_at_a_stop_string():
    long = llm(max_tokens=1000)
    cut = long.complete(LONG, stop=["12"])
    assert cut.text == NUMBERS[: NUMBERS.index("12")]
    assert cut.raw["safe"]["n_forwards"]["drafter"] < 80 < long.complete(LONG).raw["safe"]["n_forwards"]["drafter"]


def test_a_call_wins_over_the_constructor_under_both_names():
    model = llm(max_new_tokens=5)
    assert model.max_tokens == 5
    assert model.complete(LONG).raw["usage"]["completion_tokens"] == 5
    assert model.complete(LONG, max_tokens=7).raw["usage"]["completion_tokens"] == 7
    assert model.complete(LONG, max_new_tokens=8).raw["usage"]["completion_tokens"] == 8
    model.max_tokens = 6  # LlamaIndex's models can be changed
    assert model.complete(LONG).raw["usage"]["completion_tokens"] == 6
    assert model.complete(LONG).raw["finish_reason"] == "length"


def test_sampling_is_reproducible():
    model = llm(temperature=1.5, max_tokens=20, ensemble=scripted_ensemble({QUESTION: NUMBERS}))
    answers = {model.complete(QUESTION, seed=seed).text for seed in (1, 1, 2, 3)}
    assert 1 < len(answers) < 4
    assert model.complete(QUESTION, seed=3).raw["safe"]["seed"] == 3


def test_logprobs_are_one_list_per_token():
    response = llm().chat(user(QUESTION), logprobs=2)
    tokens = response.logprobs
    assert b"".join(bytes(alternatives[0].bytes) for alternatives in tokens).decode() == VERIFIED
    assert {len(alternatives) for alternatives in tokens} == {2, 3}  # with and without the chosen one among them
    assert all(alternatives[0].logprob <= 0 or math.isnan(alternatives[0].logprob) for alternatives in tokens)
    streamed = list(llm().stream_complete(QUESTION, logprobs=2))[-1]
    assert repr(streamed.logprobs) == repr(tokens)  # NaN is not equal to itself
    assert llm().chat(user(QUESTION)).logprobs is None


# ---------------------------------------------------------------------- prompts


def seen(model_options=None, ensemble=scripted_ensemble):
    """A model, and the prompts that its members read (the drafter's, decoded)."""
    prompts = []

    def reply(conversation):
        if conversation.endswith("Assistant:\n"):
            prompts.append(conversation)
        return "ok"

    return SafeLLM(ensemble=ensemble(reply), **{"is_chat_model": True, **(model_options or {})}), prompts


def test_messages_go_through_each_members_own_template():
    model, prompts = seen({"is_chat_model": None}, templated)
    model.chat(user("hi"))
    assert {p.split("]")[0] for p in prompts} == {"[D user", "[V user"}
    assert model.metadata.is_chat_model
    prompts.clear()
    model.complete("hello")  # one message of the user
    assert "[D user] hello\nAssistant:\n" in prompts


def test_formatted_prompts_reach_the_members_to_the_letter():
    model, prompts = seen({"system_prompt": "Be kind."}, templated)
    model.complete("[my] own\nAssistant:\n", formatted=True)
    assert set(prompts) <= {"[my] own\nAssistant:\n"}
    assert prompts


def test_a_text_model_continues_the_prompt():
    model = SafeLLM(ensemble=scripted_ensemble({"One, two,": " three."}))
    assert not model.metadata.is_chat_model
    assert model.complete("One, two,").text == " three."


@pytest.mark.parametrize("way", ["chat", "complete", "predict", "stream"])
async def test_the_system_prompt_is_applied_once(way):
    model, prompts = seen({"system_prompt": "Be kind."})
    if way == "chat":
        model.chat(user("hi"))
    elif way == "complete":
        model.complete("hi")
    elif way == "predict":
        await model.apredict(PromptTemplate("{x}"), x="hi")
        model.predict(PromptTemplate("{x}"), x="hi")
    else:
        list(model.stream(PromptTemplate("{x}"), x="hi"))
    assert set(prompts) == {"System:\nBe kind.\n\nUser:\nhi\n\nAssistant:\n"}


def test_the_system_prompt_of_a_text_model_comes_first():
    model, prompts = seen({"system_prompt": "Be kind.", "is_chat_model": False})
    model.complete("Hi\nAssistant:\n")
    model.predict(PromptTemplate("{x}"), x="Hi\nAssistant:\n")
    assert set(prompts) == {"Be kind.\n\nHi\nAssistant:\n"}


def test_the_users_own_formatting_is_honoured():
    model, prompts = seen(
        {
            "messages_to_prompt": lambda messages: f"<{messages[-1].content}>\nAssistant:\n",
            "completion_to_prompt": lambda prompt: f"({prompt})\nAssistant:\n",
        }
    )
    model.chat(user("hi"))
    model.complete("hi")
    assert set(prompts) == {"<hi>\nAssistant:\n", "(hi)\nAssistant:\n"}


def test_a_conversation_is_read_whole_and_not_changed():
    model, prompts = seen()
    history = [
        ChatMessage(role="developer", content="Rules."),
        ChatMessage(role="user", blocks=[TextBlock(text="Hey"), TextBlock(text="you")]),
        ChatMessage(
            role="assistant",
            blocks=[
                ThinkingBlock(content="secret thoughts"),
                TextBlock(text="Looking."),
                ToolCallBlock(tool_call_id="c1", tool_name="find", tool_kwargs={"x": 1}),
                ToolCallBlock(tool_call_id="c2", tool_name="find", tool_kwargs='{"x": 2}'),
            ],
        ),
        ChatMessage(role="tool", content="gold", additional_kwargs={"tool_call_id": "c1"}),
        ChatMessage(role="user", blocks=[CachePoint(cache_control=CacheControl(type="x")), TextBlock(text="So?")]),
    ]
    before = copy.deepcopy(history)
    model.chat(history)
    assert history == before
    assert max(prompts, key=len) == (
        "System:\nRules.\n\nUser:\nHey\nyou\n\n"
        'Assistant:\nLooking.\n<tool_call>\n{"name": "find", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "find", "arguments": {"x": 2}}\n</tool_call>\n\n'
        "User:\nResult of find:\ngold\n\nUser:\nSo?\n\nAssistant:\n"
    )


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (ImageBlock(url="http://x/y.png"), "image"),
        (AudioBlock(url="http://x/y.mp3"), "audio"),
        (DocumentBlock(url="http://x/y.pdf"), "document"),
    ],
)
def test_blocks_that_nobody_can_read_are_named(block, kind):
    with pytest.raises(PromptError, match=f"a user message has a block of type '{kind}'"):
        llm().chat([ChatMessage(role="user", blocks=[TextBlock(text="What is this?"), block])])


def test_unusable_prompts():
    broken = ToolCallBlock(tool_name="find", tool_kwargs="{")
    with pytest.raises(PromptError, match="call of 'find' are not valid JSON"):
        llm().chat([ChatMessage(role="assistant", blocks=[broken])])
    for model in (llm(), llm(system_prompt="Be kind."), llm(is_chat_model=False)):
        with pytest.raises(PromptError, match="the conversation is empty"):
            model.chat([])
        with pytest.raises(PromptError, match="the prompt is empty"):
            model.complete("")
    with pytest.raises(PromptError, match="every message of the conversation is empty"):
        llm().chat(user(""))
    with pytest.raises(ContextOverflowError, match="context window is 4096"):
        llm().complete("word " * 9000)
    assert llm().complete(QUESTION).text == VERIFIED  # and goes on


def test_a_system_message_alone_is_answered():
    assert llm().chat([ChatMessage(role="system", content=QUESTION)]).message.content == VERIFIED


async def test_thoughts_are_a_block_of_their_own():
    model = replying(lambda c: "<think>\nleft or right?\n</think>\n\nTo the left.")
    responses = await everyway(model, "Where?")
    assert {text_of(r) for r in responses.values()} == {"To the left."}
    thinking, text = responses["chat"].message.blocks
    assert thinking == ThinkingBlock(content="left or right?")
    assert text == TextBlock(text="To the left.")
    assert responses["acomplete"].additional_kwargs == {"thinking": "left or right?"}
    deltas = [r.additional_kwargs.get("thinking_delta", "") for r in model.stream_chat(user("Where?"))]
    assert "".join(deltas) == "left or right?"


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
                },
            }
        },
        {"regex": r"\{\"n\": [0-9]+\}"},
    ],
)
async def test_a_form_is_enforced_in_every_way(form):
    model = replying(lambda c: '{"n": 3} is what I think')
    for response in (await everyway(model, "How many?", **form)).values():
        assert json.loads(text_of(response)) == {"n": 3}


def test_other_response_formats():
    model = replying(lambda c: "Any text.")
    assert model.complete("?", response_format={"type": "text"}).text == "Any text."
    assert model.complete("?", response_format={"type": "json_object"}, max_tokens=9).text.startswith("{")
    with pytest.raises(ConfigError, match="response_format is not of a known form"):
        model.complete("?", response_format={"type": "yaml"})


# ---------------------------------------------------------------------- metadata


def test_metadata_is_the_ensembles():
    model = SafeLLM(ensemble=templated(lambda c: "ok"), max_tokens=77)
    assert model.metadata.model_dump() == {
        "context_window": 1000,  # the verifier's, which is the smaller one
        "num_output": 77,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "model_name": "drafter+verifier",
        "system_role": "system",
    }
    assert SafeLLM(ensemble=safe(), is_function_calling_model=False).metadata.is_function_calling_model is False
    assert SafeLLM(preset="demo")._num_output == 256


def test_tokenize_counts_in_the_tokens_of_the_context_window(monkeypatch):
    model = SafeLLM(ensemble=templated(lambda c: "ok"))
    drafter, verifier = model.load().members
    text = "Under the old oak"
    assert model.tokenize(text) == verifier.vocabulary.encode_prompt(text) != drafter.vocabulary.encode_prompt(text)
    monkeypatch.setattr(Settings, "_tokenizer", None)
    Settings.tokenizer = model.tokenize
    assert len(Settings.tokenizer(text)) == len(model.tokenize(text))


def test_the_payload_of_events_does_not_load(monkeypatch):
    monkeypatch.setattr("safe_llm.ensemble.Ensemble.from_spec", None)
    payload = SafeLLM(preset="demo", temperature=0.5).to_payload()
    assert payload["class_name"] == "Safe_llm"
    assert payload["temperature"] == 0.5
    assert payload["model_name"] == "qwen2.5-coder-0.5b-instruct+smollm2-135m-instruct"
    assert llm().to_payload()["context_window"] == 4096


# ---------------------------------------------------------------------- serialization


def test_it_survives_serialization_without_its_weights(tmp_path):
    model = SafeLLM(
        drafter=tmp_path / "a",
        verifiers=[MemberConfig(model="b", max_context=100)],
        ensemble_config={"lookahead": 3},
        max_tokens=9,
        stop="x",
        system_prompt="Be kind.",
    )
    for again in (
        SafeLLM.from_dict(model.to_dict()),
        SafeLLM.from_json(model.to_json()),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        model.model_copy(),
    ):
        assert again._handle() == model._handle()
        assert (again.max_tokens, again.stop, again.system_prompt) == (9, ["x"], "Be kind.")
        assert not again._handle().is_loaded
    of_spec = SafeLLM(preset=EnsembleSpec(drafter=MemberConfig(model="c")))
    assert SafeLLM.from_json(of_spec.to_json())._handle() == of_spec._handle()


def test_a_loaded_ensemble_is_shared_by_copies_and_not_serialized():
    model = llm()
    for again in (copy.copy(model), copy.deepcopy(model), model.model_copy(update={"max_tokens": 3})):
        assert again.load() is safe()
    with pytest.raises(TypeError, match="cannot be pickled; make it with preset="):
        pickle.dumps(model)
    assert "ensemble" not in model.to_dict()
    with pytest.raises(ConfigError, match="exactly one of"):
        SafeLLM.from_dict(model.to_dict())
    assert SafeLLM.from_dict(model.to_dict(), ensemble=safe()).complete(QUESTION).text == VERIFIED
    assert "Ensemble" not in repr(model)


def test_another_ensemble_can_be_set():
    model = llm()
    model.ensemble = scripted_ensemble({QUESTION: DRAFTED})
    assert model.complete(QUESTION).text == DRAFTED

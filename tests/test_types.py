"""Values at the edge: what is refused, with which words, and what is taken as what."""

from __future__ import annotations

import dataclasses
import types

import pytest

from safe_llm.errors import ConfigError, PromptError, UnknownNameError
from safe_llm.types import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    FinishDetail,
    FinishReason,
    GenerationRequest,
    Message,
    SamplingParams,
    Tool,
    ToolCall,
    Usage,
)

SURROGATE = "x\ud83d"
GREEDY = SamplingParams()


def calling(call: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# ---------------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("temperature", value)
            for value in (-0.1, -1, float("nan"), float("inf"), float("-inf"), "0", True, [], 10**400)
        ],
        *[("top_p", value) for value in (0, 0.0, -1, 1.0001, 2, float("nan"), float("inf"), "1", False)],
        *[("max_tokens", value) for value in (0, -1, 1.0, 2.5, "5", True, float("nan"), [])],
        *[("min_tokens", value) for value in (-1, 0.5, "1", True)],
        *[("seed", value) for value in (-1, 1.5, "7", True)],
        *[("logprobs", value) for value in (-1, 21, 1.0, "1", True)],
    ],
)
def test_value_out_of_range_is_refused_by_name(name, value):
    # F02, F05, F06
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams.of({name: value})
    assert isinstance(caught.value, ValueError)
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 0.0), ("temperature", 1), ("temperature", 1e-12), ("temperature", 999999),
        ("top_p", 1), ("top_p", 0.0001), ("max_tokens", 1), ("seed", 0), ("seed", 2**64), ("logprobs", 0),
        ("logprobs", 20),
    ],
)  # fmt: skip
def test_value_in_range_is_accepted(name, value):
    # F07, F08: 0 is greedy, whole numbers are numbers
    assert getattr(SamplingParams.of({name: value}), name) == value


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_none_means_the_default(name):
    # F03
    assert SamplingParams.of({name: None}) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("stops", "stop"),
        ("logprob", "logprobs"),
    ],
)
def test_unknown_parameter_suggests_the_nearest(given, meant):
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'") as caught:
        SamplingParams.of({given: 1})
    assert caught.value.name == given


def test_unknown_parameter_without_a_near_one_lists_all():
    with pytest.raises(UnknownNameError, match="known: logprobs, max_tokens, min_tokens"):
        SamplingParams.of({"zzz": None})


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ConfigError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


@pytest.mark.parametrize(("stop", "meant"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), ((), ()), ([], ()), (None, ())])
def test_stop_may_be_one_string_or_several(stop, meant):
    # F19, H04: a str is one stop string, not one per character
    assert SamplingParams(stop=stop).stop == meant


@pytest.mark.parametrize("stop", [5, 1.0, {"a": 1}, {"a"}, b"ab", ["a", 5], ["a", None], [b"a"]])
def test_stop_that_is_not_text_is_refused(stop):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams.of({"stop": stop})


def test_stop_list_has_limits():
    # F19
    SamplingParams(stop=["x" * MAX_STOP_CHARS] * MAX_STOP_STRINGS)
    with pytest.raises(ConfigError, match=f"{MAX_STOP_STRINGS + 1} stop strings, at most {MAX_STOP_STRINGS}"):
        SamplingParams(stop=["x"] * (MAX_STOP_STRINGS + 1))
    with pytest.raises(ConfigError, match="100000 characters"):
        SamplingParams(stop=["x" * 100_000])
    with pytest.raises(ConfigError, match="0 characters"):
        SamplingParams(stop=[""])


def test_lone_surrogate_in_a_stop_string_is_refused():
    # F10
    with pytest.raises(PromptError, match="lone surrogate at character 1"):
        SamplingParams(stop=[SURROGATE])


# ---------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "prompt", ["", [], (), [{"role": "user", "content": ""}], [{"role": "system"}, {"role": "user", "content": None}]]
)
def test_empty_prompt_is_refused(prompt):
    # F01, E14
    words = "^the prompt" if prompt == "" else "^every message" if prompt else "^the conversation"
    with pytest.raises(PromptError, match=words):
        GenerationRequest.of(prompt, GREEDY)


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", {"role": "user", "content": "x"}, {"a"}, iter("x")])
def test_prompt_of_another_type_is_refused(prompt):
    with pytest.raises(PromptError, match="str or a sequence of messages"):
        GenerationRequest.of(prompt, GREEDY)


def test_prompt_of_white_space_is_taken():
    assert GenerationRequest.of(" ", GREEDY).prompt == " "


@pytest.mark.parametrize(
    "prompt",
    [
        SURROGATE,
        [{"role": "user", "content": SURROGATE}],
        [{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}],
        [{"role": "user", "content": "x", "name": SURROGATE}],
        [{"role": "tool", "content": "x", "tool_call_id": SURROGATE}],
        [calling({"name": SURROGATE, "arguments": {}})],
        [calling({"name": "f", "arguments": {}, "id": SURROGATE})],
        [calling({"name": "f", "arguments": {"a": ["b", SURROGATE]}})],
        [calling({"name": "f", "arguments": {SURROGATE: 1}})],
        [calling({"name": "f", "arguments": r'{"a": "\ud83d"}'})],
    ],
)
def test_lone_surrogate_is_refused_wherever_it_is(prompt):
    # F10
    with pytest.raises(PromptError, match="lone surrogate") as caught:
        GenerationRequest.of(prompt, GREEDY)
    assert "x" not in str(caught.value).split("lone")[0].replace("text", "")


def test_paired_surrogates_are_no_text_either_but_emoji_are():
    GenerationRequest.of("🙂", GREEDY)
    with pytest.raises(PromptError, match="character 0"):
        GenerationRequest.of("\ud83d\ude42", GREEDY)


@pytest.mark.parametrize("role", ["User", "human", "", None, 5, ["user"]])
def test_unknown_role_is_refused(role):
    with pytest.raises(PromptError, match="roles are system, user, assistant, tool"):
        Message.of({"role": role, "content": "x"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"content": "x"}, "needs a 'role'"),
        ("x", "a Message or a mapping, got str"),
        (5, "a Message or a mapping, got int"),
        ({"role": "user", "content": 5}, "content of a user message must be str, got int"),
        ({"role": "user", "content": 0}, "content of a user message must be str, got int"),
        ({"role": "user", "content": {}}, "content of a user message must be str, got dict"),
        ({"role": "user", "content": b"x"}, "content of a user message must be str, got bytes"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "text part of a message must be str, got NoneType"),
        ({"role": "user", "content": [5]}, "text part of a message must be str, got int"),
        ({"role": "user", "content": "x", "name": 5}, "name of a user message must be str"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "tool_calls must be a list, got str"),
        ({"role": "assistant", "content": "", "tool_calls": {"name": "f"}}, "tool_calls must be a list, got dict"),
        ({"role": "assistant", "content": "", "tool_calls": [5]}, "a ToolCall or a mapping, got int"),
        (calling({"arguments": {}}), "needs a 'name'"),
        (calling({"name": 5}), "name of a tool call must be str"),
        (calling({"name": "f", "arguments": "{"}), "not valid JSON"),
        (calling({"name": "f", "arguments": "[1]"}), "must be a mapping, got list"),
        (calling({"name": "f", "arguments": {"a": object()}}), "not a JSON value: object"),
        (calling({"name": "f", "arguments": {5: 1}}), "a key that is not a str"),
        (calling({"name": "f", "arguments": {"a": float("nan")}}), "not a JSON value: nan"),
    ],
)
def test_malformed_message_is_refused_with_plain_words(value, words):
    with pytest.raises(PromptError, match=words):
        Message.of(value)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ({"role": "user", "contents": "x"}, "content"),
        ({"role": "user", "content": "x", "tool_call": []}, "tool_calls"),
        (calling({"name": "f", "argument": {}}), "arguments"),
    ],
)
def test_unknown_message_field_suggests_the_nearest(value, meant):
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        Message.of(value)


def test_message_content_may_be_text_parts_or_missing():
    # E13
    parts = [{"type": "text", "text": "Hey"}, {"type": "text", "text": "you"}, "!"]
    assert Message.of({"role": "user", "content": parts}).content == "Heyyou!"
    assert Message.of({"role": "user", "content": []}).content == ""
    assert Message.of({"role": "assistant", "content": None}).content == ""
    assert Message.of({"role": "assistant", "tool_calls": None}).content == ""


def test_message_is_taken_as_it_is():
    message = Message(role="user", content="x")
    assert Message.of(message) is message
    assert GenerationRequest.of([message, {"role": "assistant", "content": "y"}], GREEDY).prompt[0] is message


def test_tool_call_may_have_the_openai_form():
    openai = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    expected = ToolCall(name="f", arguments={"a": [1, "é"]}, id="1")
    assert ToolCall.of(openai) == expected
    message = Message.of({"role": "assistant", "content": None, "tool_calls": [openai, expected]})
    assert message.tool_calls == (expected, expected)
    assert ToolCall.of({"name": "f", "id": None}) == ToolCall(name="f", arguments={})


def test_tool_call_keeps_plain_copies_of_its_arguments():
    inner = ["x"]
    call = ToolCall(name="f", arguments=types.MappingProxyType({"a": inner, "b": (1, {"c": None})}))
    inner.append("y")
    assert call.arguments == {"a": ["x"], "b": [1, {"c": None}]}


def test_assistant_turn_of_calls_alone_is_a_conversation():
    call = ToolCall(name="f", arguments={})
    GenerationRequest.of([Message(role="assistant", content="", tool_calls=(call,))], GREEDY)


# ---------------------------------------------------------------------- tools

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "value",
    [
        {"name": "f", "description": "d", "parameters": PARAMETERS},
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}},
        {"name": "f", "description": "d", "parameters": {"properties": PARAMETERS["properties"]}},
        Tool(name="f", description="d", parameters=types.MappingProxyType(PARAMETERS)),
    ],
)
def test_tool_may_have_several_forms(value):
    tool = Tool.of(value)
    assert tool == Tool(name="f", description="d", parameters=PARAMETERS)
    function = {"name": "f", "description": "d", "parameters": PARAMETERS}
    assert tool.as_dict() == {"type": "function", "function": function}
    assert Tool.of(tool) is tool
    assert Tool.of(tool.as_dict()) == tool


def test_tool_needs_a_name_only():
    empty = {"type": "object", "properties": {}}
    assert Tool(name="f") == Tool(name="f", description="", parameters=empty)
    assert Tool.of({"name": "f"}) == Tool(name="f")
    assert Tool.of({"function": {"name": "f", "description": None, "parameters": None, "strict": None}}) == Tool(
        name="f"
    )
    assert Tool(name="f", parameters={}).parameters == {"type": "object"}


@pytest.mark.parametrize("name", ["f", "get_weather", "ns.f:2-b", "F" * 64])
def test_tool_name_of_usual_characters_is_taken(name):
    assert Tool(name=name).name == name


@pytest.mark.parametrize("name", ["", "f g", "é", "f\n", 'f"', "f(x)", "F" * 65, 5, SURROGATE])
def test_tool_name_of_other_characters_is_refused(name):
    with pytest.raises(PromptError, match=r"a tool cannot be named .* \(take 1 to 64 letters, digits or _\.:-\)"):
        Tool.of({"name": name})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("f", "a tool must be a Tool or a mapping, got str"),
        (lambda: None, "a tool must be a Tool or a mapping, got function"),
        ({"description": "d"}, "a tool needs a 'name'"),
        ({"name": None}, "a tool needs a 'name'"),
        ({"type": "function", "function": {}}, "a tool needs a 'name'"),
        ({"name": "f", "description": 5}, "description of tool 'f' must be str, got int"),
        ({"name": "f", "description": SURROGATE}, "description of tool 'f' has a lone surrogate"),
        ({"name": "f", "parameters": [1]}, "parameters of tool 'f' must be a mapping, got list"),
        ({"name": "f", "parameters": {"type": "array"}}, "parameters of tool 'f' have the type 'array'"),
        ({"name": "f", "parameters": {"type": ["object"]}}, r"parameters of tool 'f' have the type \['object'\]"),
        ({"name": "f", "parameters": {"default": float("inf")}}, "the parameters of tool 'f' is not a JSON value: inf"),
        ({"name": "f", "parameters": {"default": float("nan")}}, "the parameters of tool 'f' is not a JSON value: nan"),
        ({"name": "f", "parameters": {"default": {1, 2}}}, "the parameters of tool 'f' is not a JSON value: set"),
        ({"name": "f", "parameters": {5: 1}}, "the parameters of tool 'f' has a key that is not a str"),
        ({"name": "f", "parameters": {"title": SURROGATE}}, "the parameters of tool 'f' has a lone surrogate"),
    ],
)
def test_tool_that_is_not_usable_is_refused_with_plain_words(value, words):
    with pytest.raises(PromptError, match=words):
        Tool.of(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": "f", "parameter": {}}, "unknown tool field 'parameter' .did you mean 'parameters'"),
        ({"type": "function", "function": {"name": "f", "desciption": ""}}, "did you mean 'description'"),
        ({"name": "f", "strict": True}, "unknown tool field 'strict'"),
        ({"type": "web_search"}, "unknown tool field 'type'"),
    ],
)
def test_unknown_tool_field_is_refused(value, words):
    with pytest.raises(UnknownNameError, match=words):
        Tool.of(value)


def test_tool_keeps_plain_copies_of_its_parameters():
    inner = ["a"]
    tool = Tool(name="f", parameters={"required": inner, "enum": (1, 2)})
    inner.append("b")
    assert tool.parameters == {"type": "object", "required": ["a"], "enum": [1, 2]}


# ---------------------------------------------------------------------- ends and usage


def test_finish_details_have_the_reasons_of_the_openai_api():
    # B13, F22
    reasons = {detail.value: detail.reason.value for detail in FinishDetail}
    assert reasons == {"end": "stop", "stop_string": "stop", "max_tokens": "length", "context": "length"}
    assert FinishDetail.END.reason is FinishReason.STOP


def test_usage_adds_up():
    assert Usage(prompt_tokens=3, completion_tokens=4).total_tokens == 7

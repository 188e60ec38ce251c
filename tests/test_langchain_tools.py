"""Tools of `ChatSafeLLM`: bound in every form, enforced, read from the answer, and used by agents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_classic.agents import AgentExecutor, create_react_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import StructuredTool, render_text_description, tool
from pydantic import BaseModel

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from langchain_support import CHAT_PATHS, Recorder, ask, is_freed, treasure
from safe_llm import errors
from safe_llm.testing import scripted_ensemble

each_path = pytest.mark.parametrize("path", [path for path in CHAT_PATHS if "v3" not in path])


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"Nothing at the {place}."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, LOOK = call("add", a=3, b=4), call("look", place="oak")


def saying(text: str, **fields: Any) -> ChatSafeLLM:
    """A model whose members would like to answer just this."""
    return ChatSafeLLM(ensemble=scripted_ensemble(lambda transcript: text), **fields)


def calls_of(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    ids = [one["id"] for one in message.tool_calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return [(one["name"], one["args"]) for one in message.tool_calls]


# ---------------------------------------------------------------------- calls


@each_path
async def test_call_is_read_on_all_paths(path):
    answer = await ask(saying(f"I add.\n{ADD}").bind_tools([add, look]), path)
    assert answer.text == "I add."
    assert calls_of(answer.message) == [("add", {"a": 3, "b": 4})]
    assert answer.message.invalid_tool_calls == []
    assert answer.finish == ("tool_calls", "end")


async def test_call_is_read_on_the_v3_paths():
    model, bound = saying(f"I add.\n{ADD}"), ChatSafeLLM(ensemble=treasure()).bind_tools([add, look]).kwargs
    for path in ("stream_v3", "astream_v3"):
        answer = await ask(model, path, **bound)
        assert answer.text == "I add."
        assert calls_of(answer.message) == [("add", {"a": 3, "b": 4})]
        assert answer.finish == ("tool_calls", "end")


@each_path
async def test_parallel_calls_keep_their_order(path):
    answer = await ask(saying(f"{ADD}\n{LOOK}\n{ADD}").bind_tools([add, look]), path)
    assert calls_of(answer.message) == [
        ("add", {"a": 3, "b": 4}),
        ("look", {"place": "oak"}),
        ("add", {"a": 3, "b": 4}),
    ]
    single = saying(f"{ADD}\n{LOOK}").bind_tools([add, look], parallel_tool_calls=False)
    assert calls_of((await ask(single, path)).message) == [("add", {"a": 3, "b": 4})]


def test_calls_are_streamed_one_chunk_each():
    chunks = list(saying(f"I add.\n{ADD}\n{LOOK}").bind_tools([add, look]).stream("?"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [(piece["name"], piece["index"]) for piece in pieces] == [("add", 0), ("look", 1)]
    assert json.loads(pieces[0]["args"]) == {"a": 3, "b": 4}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("any", ["add", "look"]),
        ("required", ["add", "look"]),
        (True, ["add", "look"]),
        ("look", ["look"]),
        ({"type": "function", "function": {"name": "look"}}, ["look"]),
        ({"type": "tool", "name": "look"}, ["look"]),
    ],
)
@pytest.mark.parametrize("path", ["invoke", "astream"])
async def test_forced_call_comes_even_of_a_model_that_would_rather_chat(path, choice, names):
    model = saying("No, I would rather talk.", max_tokens=120).bind_tools([add, look], tool_choice=choice)
    message = (await ask(model, path)).message
    assert message.text == ""
    assert (message.tool_calls + message.invalid_tool_calls)[0]["name"] in names


@pytest.mark.parametrize("choice", ["auto", None, False, "none"])
def test_free_model_may_chat(choice):
    assert saying("No tools.").bind_tools([add], tool_choice=choice).invoke("?").text == "No tools."


def test_tools_that_may_not_be_used_are_not_shown():
    transcripts = []
    model = ChatSafeLLM(ensemble=scripted_ensemble(lambda transcript: transcripts.append(transcript) or ADD))
    answer = model.bind_tools([add], tool_choice="none").invoke("?")
    assert answer.text == ADD  # what looks like a call is text, as without tools
    assert answer.tool_calls == []
    assert not any("Add two numbers" in transcript for transcript in transcripts)
    model.bind_tools([add]).invoke("?")
    assert any("Add two numbers" in transcript for transcript in transcripts)


def test_arguments_are_enforced():
    class Size(BaseModel):
        """Say a size."""

        size: int

    answer = saying(call("Size", size="huge"), max_tokens=60).bind_tools([Size], tool_choice="Size").invoke("?")
    begun = (answer.tool_calls + answer.invalid_tool_calls)[0]
    assert begun["name"] == "Size"
    assert "huge" not in str(begun["args"])


# ---------------------------------------------------------------------- calls that are none


@pytest.mark.parametrize("cut", [{"max_tokens": 40}, {"stop": ['"b"']}, {"stop": ["}\n</tool"]}, {"stop": ["name"]}])
@each_path
async def test_cut_call_is_invalid_on_all_paths_and_can_be_sent_back(path, cut):
    answer = await ask(saying(f"I add.\n{ADD}").bind_tools([add]), path, **cut)
    message = answer.message
    assert answer.text == "I add."
    assert message.tool_calls == []
    (broken,) = message.invalid_tool_calls
    assert broken["type"] == "invalid_tool_call"
    assert broken["id"]
    assert answer.finish[0] == ("length" if "max_tokens" in cut else "stop")
    transcripts = []
    model = ChatSafeLLM(ensemble=scripted_ensemble(lambda t: transcripts.append(t) or "Yes."))
    sent = AIMessage(**message.model_dump(include={"content", "invalid_tool_calls"}))
    assert model.invoke([HumanMessage("?"), sent, HumanMessage("Again!")]).text == "Yes."
    assert max(transcripts, key=len).count("<tool_call>") == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 3,,}}\n</tool_call>', "add"),
        ('<tool_call>\n{"name": "add", "arguments": [3]}\n</tool_call>', "add"),
        ('<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>', None),
        ("<tool_call>\nadd(3, 4)\n</tool_call>", None),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 3', "add"),
        ("<tool_call>", None),
    ],
)
@pytest.mark.parametrize("path", ["invoke", "stream", "ainvoke", "astream"])
async def test_malformed_call_is_invalid_and_never_an_exception(path, text, name, monkeypatch):
    monkeypatch.setattr("safe_llm.requests.AnswerForm.compiled", lambda self: None)  # nothing is enforced
    answer = await ask(saying(text).bind_tools([add]), path)
    assert answer.message.tool_calls == []
    (broken,) = answer.message.invalid_tool_calls
    assert broken["name"] == name
    assert answer.finish == ("stop", "end")


@each_path
async def test_answer_that_is_cut_in_its_second_call_says_so(path):
    answer = await ask(saying(f"{ADD}\n{LOOK}", max_tokens=80).bind_tools([add, look]), path)
    assert calls_of(answer.message) == [("add", {"a": 3, "b": 4})]
    assert len(answer.message.invalid_tool_calls) == 1
    assert answer.finish == ("length", "max_tokens")


def test_merged_chunk_with_a_cut_call_goes_on_the_conversation():
    merged: Any = None
    for chunk in saying(ADD, max_tokens=40).bind_tools([add]).stream("?"):
        merged = chunk if merged is None else merged + chunk
    assert isinstance(merged, AIMessageChunk)
    assert merged.invalid_tool_calls
    assert saying("Yes.").invoke([HumanMessage("?"), merged, HumanMessage("Again!")]).text == "Yes."


# ---------------------------------------------------------------------- tools


def plain(a: int) -> int:
    """Plain function."""
    return a


class Schema(BaseModel):
    """A pydantic class."""

    a: int


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (add, "add"),
        (plain, "plain"),
        (Schema, "Schema"),
        (
            {"title": "js", "description": "JSON Schema", "type": "object", "properties": {"a": {"type": "integer"}}},
            "js",
        ),
        ({"type": "function", "function": {"name": "oai", "description": "", "parameters": {}}}, "oai"),
        ({"type": "function", "function": {"name": "bare"}}, "bare"),
        ({"name": "ant", "description": "d", "input_schema": {"type": "object", "properties": {}}}, "ant"),
        ({"name": "flat", "description": "d", "parameters": {"type": "object", "properties": {}}}, "flat"),
        (StructuredTool.from_function(plain, name="made"), "made"),
    ],
)
def test_tools_of_every_form_are_bound(given, name):
    model = saying("?", max_tokens=100).bind_tools([given], tool_choice="any")
    message = model.invoke("?")
    assert (message.tool_calls + message.invalid_tool_calls)[0]["name"] == name


def test_tool_given_twice_is_one_and_two_of_one_name_are_refused():
    model = ChatSafeLLM(ensemble=treasure())
    assert len(model.bind_tools([Schema, Schema.model_json_schema(), add, add]).kwargs["tools"]) == 2
    other = {"name": "add", "description": "Something else.", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(errors.ConfigError, match="two tools are called 'add'"):
        model.bind_tools([add, other])


class _Opaque:
    pass


def undescribable(thing: _Opaque) -> None:
    """Take what has no JSON form."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (undescribable, r"tool 'undescribable' cannot be described in JSON Schema.*hint|JSON types"),
        (42, "tool 'int' cannot be described"),
        ("add", "tool 'str' cannot be described"),
        ({"description": "no name"}, "tool 'dict' cannot be described"),
        ({"type": "function", "function": {"name": "two words", "parameters": {}}}, "cannot be named 'two words'"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, "type 'array'"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 7}}}, None),
    ],
)
def test_tool_that_cannot_be_described_is_refused_when_it_is_bound(given, message):
    with pytest.raises((errors.ConfigError, errors.PromptError), match=message):
        ChatSafeLLM(ensemble=treasure()).bind_tools([given])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("ad", r"unknown tool_choice 'ad' \(did you mean 'add'\?\)"),
        ({"type": "function"}, "names no tool"),
        ({"function": {"name": "loo"}}, "unknown tool_choice 'loo'"),
        (7, "must be a str, a bool or a mapping"),
    ],
)
def test_choice_that_is_none_is_refused_when_it_is_bound(choice, message):
    with pytest.raises(errors.ConfigError, match=message):
        ChatSafeLLM(ensemble=treasure()).bind_tools([add], tool_choice=choice)


def test_strict_changes_nothing_and_other_keywords_are_bound():
    model = saying(ADD).bind_tools([add], strict=True, max_tokens=7)
    assert model.invoke("?").usage_metadata["output_tokens"] == 7
    with pytest.raises(errors.UnknownNameError, match="did you mean 'tool_choice'"):
        saying(ADD).bind_tools([add], tool_choise="any").invoke("?")


# ---------------------------------------------------------------------- agents


def assistant(transcript: str) -> str:
    """Add with the tool, and say the result."""
    if "Result of add:\n7" in transcript:
        return "It is 7."
    return f"I add.\n{ADD}"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_agent_uses_its_tools(asynchronous):
    ensemble, recorder = scripted_ensemble(assistant), Recorder()
    agent = create_agent(ChatSafeLLM(ensemble=ensemble), [add, look], system_prompt="Be exact.")
    given = {"messages": [HumanMessage("What is 3 + 4?")]}
    config = {"callbacks": [recorder]}
    messages = (await agent.ainvoke(given, config) if asynchronous else agent.invoke(given, config))["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[2].content == "7"
    assert messages[3].text == "It is 7."
    assert [message.text for message in given["messages"]] == ["What is 3 + 4?"]
    assert recorder.events == ["start", "end", "start", "end"]
    assert is_freed(ensemble)


async def test_agent_streams_messages():
    agent = create_agent(ChatSafeLLM(ensemble=scripted_ensemble(assistant)), [add])
    chunks = [
        chunk
        async for chunk, _ in agent.astream({"messages": [HumanMessage("3 + 4?")]}, stream_mode="messages")
        if isinstance(chunk, AIMessageChunk)
    ]
    assert len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == "I add.It is 7."


class Sum(BaseModel):
    """The sum."""

    total: int


def structured(transcript: str) -> str:
    if "Result of add:\n7" not in transcript:
        return ADD
    return call("Sum", total=7) if '{"name": "Sum"' in transcript else '{"total": 7}'


@pytest.mark.parametrize("form", [ProviderStrategy(Sum), ToolStrategy(Sum), Sum], ids=["provider", "tool", "class"])
async def test_agent_answers_in_a_form(form):
    ensemble = scripted_ensemble(structured)
    agent = create_agent(ChatSafeLLM(ensemble=ensemble), [add], response_format=form)
    result = await agent.ainvoke({"messages": [HumanMessage("3 + 4?")]})
    assert result["structured_response"] == Sum(total=7)
    assert any(isinstance(message, ToolMessage) and message.content == "7" for message in result["messages"])
    alone = create_agent(
        ChatSafeLLM(ensemble=scripted_ensemble(lambda t: structured(t + "Result of add:\n7"))), [], response_format=form
    )
    assert alone.invoke({"messages": [HumanMessage("3 + 4?")]})["structured_response"] == Sum(total=7)


REACT = PromptTemplate.from_template(
    "Tools:\n{tools}\nNames: {tool_names}\nThought, Action, Action Input, Observation, Final Answer.\n"
    "Question: {input}\n{agent_scratchpad}"
)
STEP = "I should look.\nAction: look\nAction Input: oak\nObservation: I made this up.\nFinal Answer: wrong"


def test_text_agent_stops_before_the_observation():  # E06
    shown = REACT.format(tools=render_text_description([look]), tool_names="look", input="Where?", agent_scratchpad="")
    first = STEP.partition("\nObservation")[0]
    second = f"{shown}{first}\nObservation: Nothing at the oak.\nThought: "
    ensemble = scripted_ensemble({shown: STEP, second: "I know.\nFinal Answer: Nowhere."})
    agent = create_react_agent(SafeLLM(ensemble=ensemble), [look], REACT)
    executor = AgentExecutor(agent=agent, tools=[look], return_intermediate_steps=True)
    result = executor.invoke({"input": "Where?"})
    assert result["output"] == "Nowhere."
    (step,) = result["intermediate_steps"]
    assert step[0].log == first
    assert step[1] == "Nothing at the oak."

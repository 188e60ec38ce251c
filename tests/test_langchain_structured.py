"""`ChatSafeLLM.with_structured_output`: every kind of schema, by every method, enforced while decoding."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypedDict

from langchain_safe_llm import ChatSafeLLM
from langchain_support import ask, is_freed, treasure
from safe_llm import Ensemble, errors
from safe_llm.testing import scripted_ensemble


class Find(BaseModel):
    """Where something is."""

    place: str = Field(description="The place.")
    steps: int


class FindDict(TypedDict):
    """Where something is."""

    place: Annotated[str, ..., "The place."]
    steps: Annotated[int, ..., "Steps from there."]


JSON_SCHEMA = Find.model_json_schema()
OPENAI_TOOL = {
    "type": "function",
    "function": {
        "name": "Find",
        "description": "Where something is.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "steps": {"type": "integer"}},
            "required": ["place", "steps"],
        },
    },
}
VALUE = {"place": "oak", "steps": 2}
SCHEMAS = {"pydantic": Find, "typeddict": FindDict, "json_schema": JSON_SCHEMA, "openai_tool": OPENAI_TOOL}
METHODS = ("function_calling", "json_schema", "json_mode")


def willing(transcript: str) -> str:
    """Answer in the form that is asked for."""
    for name in ("Find", "FindDict", "Loose"):
        if f'{{"name": "{name}"' in transcript:
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': VALUE})}\n</tool_call>"
    return json.dumps(VALUE)


def chatty(transcript: str) -> str:
    return "I would rather talk about it."


def model_of(reply: Any, **fields: Any) -> ChatSafeLLM:
    return ChatSafeLLM(ensemble=scripted_ensemble(reply), **fields)


def plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


each_schema = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
each_method = pytest.mark.parametrize("method", METHODS)


async def on_every_path(chain: Any) -> list[Any]:
    """What the chain gives when it is called, and what its stream ends with."""
    outputs = [chain.invoke("Where?"), await chain.ainvoke("Where?"), chain.batch(["Where?"])[0]]
    outputs.append(list(chain.stream("Where?"))[-1])
    outputs.append([chunk async for chunk in chain.astream("Where?")][-1])
    return outputs


# ---------------------------------------------------------------------- values


@each_schema
@each_method
async def test_value_has_the_schemas_own_type(schema, method):
    for output in await on_every_path(model_of(willing).with_structured_output(schema, method=method)):
        assert isinstance(output, Find if schema is Find else dict)
        assert plain(output) == VALUE


@each_schema
@each_method
async def test_raw_message_comes_with_the_value(schema, method):
    chain = model_of(willing).with_structured_output(schema, method=method, include_raw=True)
    for output in (chain.invoke("Where?"), await chain.ainvoke("Where?")):
        assert isinstance(output["raw"], AIMessage)
        assert output["raw"].usage_metadata["output_tokens"] > 0
        assert plain(output["parsed"]) == VALUE
        assert output["parsing_error"] is None
    merged: dict[str, Any] = {}
    for chunk in chain.stream("Where?"):
        merged |= chunk
    assert plain(merged["parsed"]) == VALUE


class Yes(BaseModel):
    """Yes or no."""

    sure: bool


class YesDict(TypedDict):
    """Yes or no."""

    sure: Annotated[bool, ..., "Whether it is so."]


@pytest.mark.parametrize("schema", [Yes, YesDict, Yes.model_json_schema()])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("weights", [None, (9.0, 1.0)])
async def test_form_is_enforced_on_a_model_that_would_rather_chat(schema, method, weights):
    ensemble = scripted_ensemble(chatty, weights=weights)
    chain = ChatSafeLLM(ensemble=ensemble).with_structured_output(schema, method=method)
    for output in await on_every_path(chain):
        assert plain(output) in ({"sure": True}, {"sure": False})
    assert is_freed(ensemble)


def test_any_json_object_is_enforced_without_a_schema():
    chain = model_of(lambda transcript: '{"a": [1, 2]}').with_structured_output(method="json_mode")
    assert chain.invoke("Where?") == {"a": [1, 2]}
    raw = model_of(chatty, max_tokens=5).with_structured_output(method="json_mode", include_raw=True).invoke("Where?")
    assert raw["raw"].text.startswith("{")


async def test_schema_is_shown_as_a_tool_or_to_nobody():
    for method in METHODS:
        transcripts: list[str] = []

        def reply(transcript: str, seen: list[str] = transcripts) -> str:
            seen.append(transcript)
            return willing(transcript)

        model_of(reply).with_structured_output(Find, method=method).invoke("Where?")
        shown = any("Where something is." in transcript for transcript in transcripts)
        assert shown == (method == "function_calling")


def test_json_streams_grow():
    chunks = list(model_of(willing).with_structured_output(JSON_SCHEMA, method="json_schema").stream("Where?"))
    assert len(chunks) > 2
    assert chunks[-1] == VALUE
    assert all(set(chunk) <= set(VALUE) for chunk in chunks)


class Places(BaseModel):
    """Several places."""

    best: Find | None
    others: list[Find]


FOUND = {"best": VALUE, "others": [VALUE, VALUE]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (Places, FOUND),
        (Places.model_json_schema(), FOUND),
        (RootModel[list[int]], [1, 2]),
        ({"title": "t", "type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"title": "t", "anyOf": [{"type": "integer"}, {"type": "boolean"}]}, 7),
        ({"title": "t", "$ref": "#/$defs/n", "$defs": {"n": {"enum": ["a", "b"]}}}, "b"),
        ({"title": "t", "type": "string", "enum": ["a", "b"]}, "b"),
    ],
)
def test_schema_of_an_answer_may_be_any(schema, value):
    model = model_of(lambda transcript: json.dumps(value), max_tokens=400)
    assert plain(model.with_structured_output(schema, method="json_schema").invoke("?")) == value


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"title": "t", "anyOf": [{"const": 1}, {"const": 2}]}, [1, 2]),
        ({"title": "t", "$ref": "#/$defs/n", "$defs": {"n": {"enum": ["a", "b"]}}}, ["a", "b"]),
        ({"title": "t", "type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}, [[1], [1, 1]]),
        (RootModel[Literal["a", "b"]], ["a", "b"]),
    ],
)
def test_schema_of_any_kind_is_enforced(schema, values):
    assert plain(model_of(chatty).with_structured_output(schema, method="json_schema").invoke("?")) in values


@pytest.mark.parametrize("schema", [{"title": "t", "type": "array"}, {"title": "t", "anyOf": [{"type": "integer"}]}])
def test_schema_without_properties_is_no_tool(schema):
    with pytest.raises(errors.ConfigError, match=r"'t' has no properties.*method='json_schema'"):
        model_of(willing).with_structured_output(schema)


def test_response_format_can_be_bound():
    chain = model_of(willing).bind(response_format={"type": "json_object"}) | StrOutputParser()
    assert json.loads(chain.invoke("Where?")) == VALUE


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        ({"type": "text"}, "I would rather talk about it."),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}, "5"),
    ],
)
def test_response_format_of_a_call(response_format, text):
    assert model_of(chatty).invoke("Where?", response_format=response_format).text == text


# ---------------------------------------------------------------------- what is no value


class Loose(BaseModel):
    """Where something is, if anybody knows."""

    place: str | None = None
    steps: int | None = None


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), Loose], ids=[*SCHEMAS, "optional fields"])
@each_method
@pytest.mark.parametrize("cut", ["max_tokens", "stop"])
async def test_value_that_is_cut_off_is_a_parsing_error(schema, method, cut):
    asked = {"max_tokens": 9 if method != "function_calling" else 40} if cut == "max_tokens" else {"stop": ["ste"]}
    model = model_of(willing, **asked)
    chain = model.with_structured_output(schema, method=method, include_raw=True)
    for output in (chain.invoke("Where?"), await chain.ainvoke("Where?")):
        assert output["raw"].response_metadata["finish_reason"] == ("length" if cut == "max_tokens" else "stop")
        assert isinstance(output["parsing_error"], OutputParserException)
        assert output["parsed"] is None
    with pytest.raises(OutputParserException, match="ended before its value was complete"):
        model.with_structured_output(schema, method=method).invoke("Where?")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"schema": Find, "method": "json"}, r"unknown method 'json'.*function_calling, json_schema and json_mode"),
        ({"schema": None}, "needs a schema"),
        ({"schema": None, "method": "json_schema"}, "needs a schema"),
        ({"schema": Find, "tools": []}, "unknown arguments: tools"),
        ({"schema": 42}, "cannot be described"),
        ({"schema": 42, "method": "json_schema"}, "cannot be described"),
        ({"schema": {"title": "t", "description": "d", "type": "objekt"}, "method": "json_schema"}, "JSON schema"),
        ({"schema": {"title": "t", "description": "d", "$ref": "#/nowhere"}, "method": "json_schema"}, "JSON schema"),
    ],
)
def test_what_cannot_be_enforced_is_refused_at_once(kwargs, message, monkeypatch):
    monkeypatch.setattr(Ensemble, "from_spec", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(errors.SafeLLMError, match=message):
        ChatSafeLLM(preset="demo").with_structured_output(**kwargs)


@pytest.mark.parametrize("path", ["invoke", "astream"])
@pytest.mark.parametrize(
    "wrong", ["json", {"type": "yaml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
async def test_response_format_of_an_unknown_form_is_refused(path, wrong):
    with pytest.raises(errors.ConfigError, match="response_format is not of a known form"):
        await ask(ChatSafeLLM(ensemble=treasure()), path, response_format=wrong)


def test_strict_changes_nothing():
    for strict in (None, True, False):
        for method in METHODS:
            assert model_of(willing).with_structured_output(Find, method=method, strict=strict).invoke("?").steps == 2

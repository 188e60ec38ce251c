"""LangChain messages and tools <-> the ensemble's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from safe_llm.errors import ConfigError, PromptError
from safe_llm.tool_calling import CALL_BEGIN, CALL_END, Answer, InvalidToolCall
from safe_llm.types import Message, ToolCall

__all__ = ["arguments_of", "as_ai_message", "as_json_schema", "as_messages", "as_tool", "as_tools"]

_NOT_FOR_PROMPTS = frozenset(("tool_use", "tool_call", "function_call", "reasoning", "thinking", "non_standard"))
"""Content blocks of an assistant's message that are either also in `tool_calls` or not to be read again."""


def as_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Return the conversation as the ensemble reads it.

    Raises:
        PromptError: A role or a content block that the members cannot read.
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        if isinstance(message, AIMessage):
            names |= {call["id"]: call["name"] for call in message.tool_calls if call["id"]}
        converted.append(_as_message(message, names))
    return converted


def _as_message(message: BaseMessage, names: Mapping[str, str]) -> Message:
    if isinstance(message, HumanMessage):
        return Message(role="user", content=_text(message), name=message.name)
    if isinstance(message, SystemMessage):
        return Message(role="system", content=_text(message), name=message.name)
    if isinstance(message, AIMessage):
        return _as_assistant(message)
    if isinstance(message, ToolMessage):
        name = message.name or names.get(message.tool_call_id)
        return Message(role="tool", content=_text(message), name=name, tool_call_id=message.tool_call_id)
    if isinstance(message, FunctionMessage):
        return Message(role="tool", content=_text(message), name=message.name)
    if isinstance(message, ChatMessage):
        return Message(role=message.role, content=_text(message), name=message.name)  # type: ignore[arg-type]
    raise PromptError(
        f"a message of type {type(message).__name__} cannot be part of a prompt",
        hint="use system, human, AI and tool messages",
    )


def _as_assistant(message: AIMessage) -> Message:
    calls = tuple(
        ToolCall(name=call["name"], arguments=call["args"], id=call["id"] or "") for call in message.tool_calls
    )
    # what the model wrote and nobody could read stays in the conversation, so that it can be put right
    broken = [
        f"{CALL_BEGIN}\n{(call['args'] or '').removeprefix(CALL_BEGIN).strip()}\n{CALL_END}"
        for call in message.invalid_tool_calls
    ]
    content = "\n".join(part for part in (_text(message), *broken) if part)
    return Message(role="assistant", content=content, name=message.name, tool_calls=calls)


def _text(message: BaseMessage) -> str:
    """Join the text blocks of a message's content."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
            continue
        kind = block.get("type", "text")
        if kind in ("text", "text-plain") and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif not (isinstance(message, AIMessage) and kind in _NOT_FOR_PROMPTS):
            raise PromptError(
                f"a {message.type} message has a content block of type {kind!r}, but members read text only",
                hint="leave it out, or describe it in words",
            )
    return "".join(texts)


# ---------------------------------------------------------------------- answers


def as_ai_message(answer: Answer, **fields: Any) -> AIMessage:
    """Return a parsed answer as a message; `fields` are its metadata."""
    return AIMessage(
        content=answer.content,
        additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
        tool_calls=[tool_call(name=c.name, args=dict(c.arguments), id=c.id) for c in answer.tool_calls],
        invalid_tool_calls=[
            invalid_tool_call(name=c.name, args=arguments_of(c), id=c.id, error=c.error)
            for c in answer.invalid_tool_calls
        ],
        **fields,
    )


def arguments_of(call: ToolCall | InvalidToolCall) -> str:
    """Return a call's arguments as text.

    LangChain completes a truncated object when it merges chunks, takes none for an empty one, and would let an agent
    run half a call. So those of an invalid call keep the tag before them, which nothing completes.
    """
    if isinstance(call, ToolCall):
        return json.dumps(dict(call.arguments), ensure_ascii=False)
    try:
        completed = parse_partial_json(call.arguments or "{}")
    except ValueError:
        return call.arguments
    return f"{CALL_BEGIN}\n{call.arguments}" if isinstance(completed, dict) else call.arguments


# ---------------------------------------------------------------------- tools

ToolLike = Mapping[str, Any] | type | Callable[..., Any] | BaseTool


def as_tool(tool: ToolLike) -> dict[str, Any]:
    """Return a tool in OpenAI's form.

    Raises:
        ConfigError: It cannot be described in JSON Schema.
    """
    if _is_json_schema(tool) and not _is_of_arguments(tool):
        raise ConfigError(
            f"the schema {tool['title']!r} has no properties, so it cannot be that of a tool's arguments",
            hint="give it properties, or use method='json_schema' where it is that of an answer",
        )
    try:
        return convert_to_openai_tool(tool)
    except Exception as error:  # pydantic and LangChain raise whatever the type provokes
        name = getattr(tool, "name", None) or getattr(tool, "__name__", None) or type(tool).__name__
        raise ConfigError(
            f"tool {name!r} cannot be described in JSON Schema: {type(error).__name__}",
            hint="give its arguments JSON types (str, int, float, bool, list, dict, a pydantic model)",
        ) from error


def as_json_schema(schema: Any) -> dict[str, Any]:
    """Return the JSON Schema of a pydantic class, a TypedDict, a tool's arguments, or one that is given as it is.

    LangChain's own function keeps of a schema only what a tool's arguments can have: no union, no array, no reference.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        described = schema.model_json_schema() if issubclass(schema, BaseModel) else cast("Any", schema).schema()
        return dict(described)
    return dict(schema) if _is_json_schema(schema) else convert_to_json_schema(schema)


def _is_json_schema(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and "title" in value and not value.keys() & {"function", "input_schema"}


def _is_of_arguments(schema: Mapping[str, Any]) -> bool:
    says_more = schema.keys() - {"title", "description", "type"} or schema.get("type", "object") != "object"
    return "properties" in schema or not says_more


def as_tools(tools: Sequence[ToolLike]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form. One that is given twice, as a class and as its schema for instance, is one."""
    described = {json.dumps(_untitled(tool), sort_keys=True): tool for tool in map(as_tool, tools)}
    return list(described.values())


def _untitled(value: Any) -> Any:
    """Return a JSON Schema without the titles that pydantic gives its parts."""
    if isinstance(value, Mapping):
        return {k: _untitled(v) for k, v in value.items() if not (k == "title" and isinstance(v, str))}
    return [_untitled(item) for item in value] if isinstance(value, list) else value

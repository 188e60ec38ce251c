"""LlamaIndex messages -> the ensemble's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from safe_llm.errors import PromptError
from safe_llm.types import Message, Role, ToolCall

__all__ = ["as_messages"]

_ROLES: Mapping[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def as_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the conversation as the ensemble reads it; `messages` stay as they are.

    Raises:
        PromptError: A content block that the members cannot read.
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        names |= {
            b.tool_call_id: b.tool_name for b in message.blocks if isinstance(b, ToolCallBlock) and b.tool_call_id
        }
        converted.append(_as_message(message, names))
    return converted


def _as_message(message: ChatMessage, names: Mapping[str, str]) -> Message:
    role = _ROLES[message.role]
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_as_call(block))
        elif not isinstance(block, (ThinkingBlock, CachePoint)):  # past thoughts are not read again
            raise _unreadable(message, block)
    call_id = message.additional_kwargs.get("tool_call_id") if role == "tool" else None
    return Message(
        role=role,
        content="\n".join(texts),  # as LlamaIndex's own `content` joins them
        name=names.get(call_id) if call_id else None,
        tool_calls=tuple(calls),
        tool_call_id=call_id,
    )


def _as_call(block: ToolCallBlock) -> ToolCall:
    arguments: Any = block.tool_kwargs
    if isinstance(arguments, str):  # as some providers' models leave it
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise PromptError(f"the arguments of a call of {block.tool_name!r} are not valid JSON") from None
    return ToolCall(name=block.tool_name, arguments=arguments, id=block.tool_call_id or "")


def _unreadable(message: ChatMessage, block: ContentBlock) -> PromptError:
    return PromptError(
        f"a {message.role.value} message has a block of type {block.block_type!r}, but members read text only",
        hint="leave it out, or describe it in words",
    )

"""Keywords of the constructor and of a call: their names, and what LlamaIndex's spellings mean to the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.tools.types import BaseTool

from safe_llm.errors import UnknownNameError
from safe_llm.requests import PARAMETERS, named

__all__ = ["as_tools", "call_params", "checked_names"]


def checked_names(values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return keywords by their own names.

    Raises:
        UnknownNameError: One that is not `known`; names the nearest.
    """
    values = named(values)
    for key in values:
        if key not in known:
            raise UnknownNameError("parameter", key, known)
    return values


def call_params(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's parameters of one call, whose own keywords win.

    Raises:
        ConfigError: One that is unknown, or not of a form that is known.
    """
    given = {**defaults, **checked_names(kwargs, PARAMETERS)}
    if given.get("tools") is not None:
        given["tools"] = as_tools(given["tools"])
    return {key: value for key, value in given.items() if value is not None}


def as_tools(tools: Sequence[BaseTool | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools in OpenAI's form."""
    return [
        tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool for tool in tools
    ]

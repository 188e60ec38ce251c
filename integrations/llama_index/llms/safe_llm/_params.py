"""Keywords of the constructor and of a call: their names, and what LlamaIndex's spellings mean to the engine."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from llama_index.core.tools.types import BaseTool

from llama_index.llms.safe_llm._errors import EnsembleTimeoutError
from safe_llm.errors import Cancelled, ConfigError, UnknownNameError
from safe_llm.events import Event
from safe_llm.requests import PARAMETERS

__all__ = ["DECODING", "as_tools", "call_params", "checked_names", "within"]

DECODING = ("max_tokens", "temperature", "top_p", "seed", "stop", "min_tokens", "logprobs")
"""Parameters that the constructor takes and a call may give anew."""

_ALIASES = {
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "allow_parallel_tool_calls": "parallel_tool_calls",
}
_CALL = PARAMETERS | {"response_format"}


def checked_names(values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return keywords by their own names.

    Raises:
        UnknownNameError: One that is not `known`; names the nearest.
    """
    named = {_ALIASES.get(key, key): value for key, value in values.items()}
    for key in named:
        if key not in known:
            raise UnknownNameError("parameter", key, known)
    return named


def call_params(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's parameters of one call, whose own keywords win.

    Raises:
        ConfigError: One that is unknown, or not of a form that is known.
    """
    given = {**defaults, **checked_names(kwargs, _CALL)}
    if (form := given.pop("response_format", None)) is not None:
        given |= _answer_form(form)
    if given.get("tools") is not None:
        given["tools"] = as_tools(given["tools"])
    if given.get("tool_choice") is not None:
        given["tool_choice"] = _tool_choice(given["tool_choice"])
    return {key: value for key, value in given.items() if value is not None}


def as_tools(tools: Sequence[BaseTool | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools in OpenAI's form."""
    return [
        tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool for tool in tools
    ]


def _tool_choice(choice: Any) -> Any:
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(
                "tool_choice is a mapping that names no tool",
                hint='write {"type": "function", "function": {"name": ...}}, or just the name',
            )
        return name
    return choice


def _answer_form(response_format: Any) -> dict[str, Any]:
    """Return what the engine calls an OpenAI `response_format`."""
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "text":
            return {}
        if kind == "json_object":
            return {"json_schema": {"type": "object"}}
        described = response_format.get("json_schema")
        if kind == "json_schema" and isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
            return {"json_schema": dict(described["schema"])}
    raise ConfigError(
        "response_format is not of a known form",
        hint='write {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "json_object"}',
    )


def within(seconds: float | None, events: Iterator[Event], cancel: threading.Event) -> Generator[Event, None, None]:
    """Pass events on; once `seconds` have passed since the first was asked for, set `cancel` and name the reason.

    Closing it closes `events`.
    """
    late = threading.Event()

    def expire() -> None:
        late.set()
        cancel.set()

    timer = threading.Timer(seconds or 0.0, expire)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        with closing(events):  # type: ignore[type-var]  # the engine's events are a generator
            yield from events
    except Cancelled as error:
        if late.is_set():
            raise EnsembleTimeoutError(f"no answer within {seconds} s", hint="raise `timeout`") from error
        raise
    finally:
        timer.cancel()

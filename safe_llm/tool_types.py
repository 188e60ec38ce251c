"""Frozen values of tool calling, the tools and their calls, with the checks of text and JSON that they share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from safe_llm.errors import PromptError, UnknownNameError

__all__ = ["Tool", "ToolCall", "check_text"]

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_text(text: object, what: str) -> None:
    """Raise PromptError unless `text` is a str that has a UTF-8 form (no lone surrogate)."""
    if not isinstance(text, str):
        raise PromptError(f"{what} must be str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} has a lone surrogate at character {error.start}",
            hint="it is not valid Unicode text; decode it with errors='replace' first",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool by the assistant.

    Attributes:
        name: The tool's name.
        arguments: The decoded JSON object.
        id: What its result refers to.

    Raises:
        PromptError: A name or an id that is not text, arguments that are not JSON, a lone surrogate.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def __post_init__(self) -> None:
        check_text(self.name, "the name of a tool call")
        check_text(self.id, "the id of a tool call")
        if not isinstance(self.arguments, Mapping):
            raise PromptError(f"arguments of a tool call must be a mapping, got {type(self.arguments).__name__}")
        object.__setattr__(self, "arguments", _plain_json(self.arguments, "an argument of a tool call"))

    @classmethod
    def of(cls, value: ToolCall | Mapping[str, Any]) -> ToolCall:
        """Return `value` as a ToolCall; a mapping may also have the OpenAI form, with a `function` in it."""
        if isinstance(value, ToolCall):
            return value
        values = _openai_fields(cls, value, "tool call", ignored={"type"})
        arguments = values.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise PromptError("arguments of a tool call are not valid JSON") from None
        return cls(**{**values, "arguments": arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the assistant may call.

    Attributes:
        name: 1 to 64 letters, digits or `_.:-`.
        description: What it does, for the model.
        parameters: JSON Schema of its arguments, which is an object; `"type": "object"` is added where it is missing.

    Raises:
        PromptError: Another name, a description that is not text, parameters that are no schema of an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _TOOL_NAME.fullmatch(self.name):
            raise PromptError(f"a tool cannot be named {self.name!r}", hint="take 1 to 64 letters, digits or _.:-")
        check_text(self.description, f"description of tool {self.name!r}")
        what = f"parameters of tool {self.name!r}"
        if not isinstance(self.parameters, Mapping):
            raise PromptError(f"{what} must be a mapping, got {type(self.parameters).__name__}")
        schema = {"type": "object", **_plain_json(self.parameters, f"a value in the {what}")}
        if schema["type"] != "object":
            raise PromptError(f"{what} have the type {schema['type']!r}", hint="give a JSON Schema of type 'object'")
        object.__setattr__(self, "parameters", schema)

    @classmethod
    def of(cls, value: Tool | Mapping[str, Any]) -> Tool:
        """Return `value` as a Tool; a mapping may also have the OpenAI form, with a `function` in it.

        Its `strict` is ignored: arguments are always enforced.
        """
        if isinstance(value, Tool):
            return value
        return cls(**_openai_fields(cls, value, "tool", ignored={"type", "strict"}))

    def as_dict(self) -> dict[str, Any]:
        """Return the OpenAI form, which chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def _openai_fields(cls: type, value: object, what: str, ignored: set[str]) -> dict[str, Any]:
    """Fields of a `cls` in a mapping, which may have them in a `function` beside `ignored`; None counts as missing."""
    if not isinstance(value, Mapping):
        raise PromptError(f"a {what} must be a {cls.__name__} or a mapping, got {type(value).__name__}")
    values = dict(value)
    if isinstance(values.get("function"), Mapping):
        values |= values.pop("function")
        values = {key: item for key, item in values.items() if key not in ignored}
    known = {field.name for field in fields(cls)}
    for key in values:
        if key not in known:
            raise UnknownNameError(f"{what} field", str(key), known)
    if values.get("name") is None:
        raise PromptError(f"a {what} needs a 'name'")
    return {key: item for key, item in values.items() if item is not None}


def _plain_json(value: object, what: str) -> Any:
    """Return a copy of dicts and lists only, all of whose leaves are JSON values."""
    if isinstance(value, str):
        check_text(value, what)
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise PromptError(f"{what} has a key that is not a str")
        return {_plain_json(key, what): _plain_json(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item, what) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise PromptError(f"{what} is not a JSON value: {value}", hint="JSON has finite numbers only")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise PromptError(f"{what} is not a JSON value: {type(value).__name__}")

"""From a caller's keywords to requests: decoding parameters, and what form the answer must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from safe_llm.errors import ConfigError, UnknownNameError
from safe_llm.grammar import checked_grammar, json_grammar, regex_grammar
from safe_llm.tool_calling import tool_grammar
from safe_llm.types import GenerationRequest, Prompt, SamplingParams, Tool

__all__ = ["DECODING", "PARAMETERS", "AnswerForm", "make_requests", "named", "schema_of", "tool_choice_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What form an answer must have. It is enforced: every member's tokens that would break it are masked.

    Attributes:
        json_schema: The answer is a JSON value that this JSON Schema describes.
        regex: The answer is matched by this regular expression as a whole.
        grammar: The answer follows this Lark grammar (llguidance's dialect).
        tools: Tools that the assistant may call; shown to the members. See `safe_llm.tool_calling` for the form of a
            call.
        tool_choice: `auto`, `required` (at least one call), `none`, or the name of the tool to call.
        parallel_tool_calls: Allow several calls in one answer.

    Raises:
        ConfigError: Two forms at once, a form that cannot be enforced, an unknown choice.
        PromptError: A tool that is not usable.
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    tools: Sequence[Tool | Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        tools: Any = self.tools
        if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
            raise ConfigError(f"tools must be a list, got {type(tools).__name__}")
        object.__setattr__(self, "tools", tuple(map(Tool.of, tools)))
        names = [tool.name for tool in self.tools]  # type: ignore[union-attr]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two tools are called {name!r}", hint="give one of them another name")
        self._check_forms()
        if not isinstance(self.tool_choice, str):
            raise ConfigError(f"tool_choice must be str, got {type(self.tool_choice).__name__}")
        if self.tool_choice not in ("auto", "none") and not names:
            raise ConfigError(f"tool_choice {self.tool_choice!r} without tools", hint="give tools")
        if self.tool_choice not in ("auto", "none", "required", *names):
            raise UnknownNameError("tool_choice", self.tool_choice, ["auto", "none", "required", *names])

    def _check_forms(self) -> None:
        for name, kind in (("json_schema", Mapping), ("regex", str), ("grammar", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                wanted = "a mapping" if kind is Mapping else "str"
                raise ConfigError(f"{name} must be {wanted}, got {type(value).__name__}")
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} cannot be enforced together", hint="give one of them")
        if self.tools and given not in ([], ["json_schema"]):
            raise ConfigError(f"tools and {given[0]} cannot be enforced together", hint="leave one out")

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the members are told about."""
        return () if self.tool_choice == "none" else tuple(map(Tool.of, self.tools))

    def compiled(self) -> str | None:
        """Return the grammar that enforces the form, or None where there is nothing to enforce.

        Raises:
            ConfigError: It cannot be enforced.
        """
        if self.shown_tools:
            grammar = tool_grammar(
                self.shown_tools, self.tool_choice, parallel=self.parallel_tool_calls, json_schema=self.json_schema
            )
            return checked_grammar(grammar, "the tools or the JSON schema" if self.json_schema else "the tools")
        if self.json_schema is not None:
            return checked_grammar(json_grammar(self.json_schema), "the JSON schema")
        if self.regex is not None:
            return checked_grammar(regex_grammar(self.regex), "the regular expression")
        return None if self.grammar is None else checked_grammar(self.grammar, "the grammar")


DECODING = tuple(field.name for field in fields(SamplingParams))
"""Keywords that say how an answer is decoded."""

_FORM = frozenset(field.name for field in fields(AnswerForm))

PARAMETERS = frozenset(DECODING) | _FORM | {"response_format"}
"""Keywords of a request."""

_ALIASES = {
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
    "allow_parallel_tool_calls": "parallel_tool_calls",
}


def named(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords by their own names, where users know them by others."""
    return {_ALIASES.get(key, key): value for key, value in params.items()}


def schema_of(response_format: Any) -> dict[str, Any] | None:
    """Return the JSON Schema that an OpenAI `response_format` asks for, None for plain text.

    Raises:
        ConfigError: It is not of a known form.
    """
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        described = response_format.get("json_schema")
        if kind == "json_schema" and isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
            return dict(described["schema"])
    raise ConfigError(
        "response_format is not of a known form",
        hint='write {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}} or {"type": "json_object"}',
    )


def tool_choice_of(choice: Any) -> str:
    """Return `AnswerForm.tool_choice` for any form of it that users write.

    Args:
        choice: `auto`, `none`, `any`, `required`, True, False, None, a tool's name, or OpenAI's mapping.

    Raises:
        ConfigError: It is of none of these forms.
    """
    if choice is None or choice is False:
        return "auto"
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
        if choice is None:
            raise ConfigError(
                "tool_choice is a mapping that names no tool",
                hint='write {"type": "function", "function": {"name": ...}}, or just the name',
            )
    if not isinstance(choice, str):
        raise ConfigError(f"tool_choice must be a str, a bool or a mapping, got {type(choice).__name__}")
    return choice


def make_requests(
    prompts: Sequence[Prompt], params: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[GenerationRequest]:
    """Build one request per prompt.

    Args:
        prompts: Texts or conversations.
        params: Fields of `SamplingParams` and `AnswerForm`, or OpenAI's `response_format`; None means the default.
        defaults: Fields of `SamplingParams`.

    Raises:
        ConfigError: A parameter is unknown (names the nearest) or not valid.
        PromptError: A prompt or a tool is not usable.
    """
    given = {key: value for key, value in named(params).items() if value is not None}
    for key in given:
        if key not in PARAMETERS:
            raise UnknownNameError("parameter", key, PARAMETERS)
    if "response_format" in given and (schema := schema_of(given["response_format"])) is not None:
        given["json_schema"] = schema
    if "tool_choice" in given:
        given["tool_choice"] = tool_choice_of(given["tool_choice"])
    form = AnswerForm(**{key: value for key, value in given.items() if key in _FORM})
    sampling = SamplingParams.of({**defaults, **{key: value for key, value in given.items() if key in DECODING}})
    grammar = form.compiled()
    if grammar is not None and sampling.min_tokens:
        raise ConfigError("min_tokens cannot be combined with tools, a schema or a grammar", hint="leave it out")
    return [GenerationRequest.of(prompt, sampling, tools=form.shown_tools, grammar=grammar) for prompt in prompts]

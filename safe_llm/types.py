"""Plain frozen values that cross every layer: messages, sampling parameters, usage, ends."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, get_args

from safe_llm.errors import ConfigError, PromptError, UnknownNameError
from safe_llm.tool_types import Tool, ToolCall, check_text

__all__ = [
    "FinishDetail",
    "FinishReason",
    "GenerationRequest",
    "Message",
    "Prompt",
    "Role",
    "SamplingParams",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Usage",
    "check_text",
]

Role = Literal["system", "user", "assistant", "tool"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024


class FinishReason(StrEnum):
    """Why a generation ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class FinishDetail(StrEnum):
    """What exactly ended it: `END` and `STOP_STRING` are `stop`, the others `length`."""

    END = "end"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"

    @property
    def reason(self) -> FinishReason:
        """The coarse reason that this detail belongs to."""
        return FinishReason.STOP if self in (FinishDetail.END, FinishDetail.STOP_STRING) else FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation.

    Raises:
        PromptError: Unknown role, content that is not text, or a lone surrogate.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise PromptError(f"unknown role {self.role!r}", hint=f"roles are {', '.join(get_args(Role))}")
        check_text(self.content, f"content of a {self.role} message")
        for text, what in ((self.name, "name"), (self.tool_call_id, "tool_call_id")):
            if text is not None:
                check_text(text, f"{what} of a {self.role} message")

    @classmethod
    def of(cls, value: Message | Mapping[str, Any]) -> Message:
        """Return `value` as a Message.

        A mapping must have a `role` and nothing unknown. Its `content` is text, None, or a list of text parts as of
        OpenAI (`{"type": "text", "text": ...}`), which are joined.
        """
        if isinstance(value, Message):
            return value
        if not isinstance(value, Mapping):
            raise PromptError(f"a message must be a Message or a mapping, got {type(value).__name__}")
        known = {field.name for field in fields(cls)}
        for key in value:
            if key not in known:
                raise UnknownNameError("message field", str(key), known)
        if "role" not in value:
            raise PromptError("a message needs a 'role'", hint="roles are system, user, assistant, tool")
        values = dict(value)
        values["content"] = _joined(values.get("content"))
        calls = values.get("tool_calls") or ()
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise PromptError(f"tool_calls must be a list, got {type(calls).__name__}")
        values["tool_calls"] = tuple(map(ToolCall.of, calls))
        return cls(**values)


def _joined(content: Any) -> Any:
    """Text of a message's content: None is empty, text parts are joined; anything else is left to be refused."""
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        return content
    texts: list[Any] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise PromptError(f"a message has a part of type {part['type']!r}", hint="members read text only")
        texts.append(part.get("text") if isinstance(part, Mapping) else part)
        check_text(texts[-1], "a text part of a message")
    return "".join(texts)


Prompt = str | Sequence[Message | Mapping[str, Any]]
"""A plain text prompt, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is decoded.

    Attributes:
        max_tokens: Most drafter tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Nucleus mass in (0, 1].
        seed: Makes sampling reproducible; None draws one.
        stop: Strings that end the answer; the answer is cut before the first match. A str counts as one. At most 64
            strings of at most 1024 characters.
        min_tokens: The end of the answer is not offered before this many tokens.
        logprobs: None, or how many of the drafter's best alternatives to report per token (0 to 20).

    Raises:
        ConfigError: A value out of its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if stop is None:
            stop = ()
        if not isinstance(stop, (str, list, tuple)):
            raise ConfigError(f"stop must be a str or a list of str, got {type(stop).__name__}")
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_float("temperature", self.temperature, "a finite number, at least 0", lambda x: x >= 0)
        _check_float("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 20)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(f"{len(self.stop)} stop strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            check_text(text, "a stop string")
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise ConfigError(f"a stop string has {len(text)} characters, expected 1 to {MAX_STOP_CHARS}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from keyword values; None means the default, an unknown key is an error that names the nearest."""
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise UnknownNameError("parameter", key, known)
        return cls(**{key: value for key, value in values.items() if value is not None})


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be a whole number {wanted}, got {value!r}")


def _check_float(name: str, value: object, wanted: str, valid: Any) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not abs(number) <= sys.float_info.max or not valid(number):  # true for NaN too
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with its decoding parameters.

    Attributes:
        prompt: Text, or a conversation.
        sampling: How the answer is decoded.
        tools: What the templates are told about.
        grammar: What the answer must follow, as `safe_llm.grammar` writes it, or None.
    """

    prompt: str | tuple[Message, ...]
    sampling: SamplingParams
    tools: tuple[Tool, ...] = ()
    grammar: str | None = None

    @classmethod
    def of(
        cls, prompt: Prompt, sampling: SamplingParams, *, tools: tuple[Tool, ...] = (), grammar: str | None = None
    ) -> GenerationRequest:
        """Validate `prompt` (text, or a non-empty conversation) and pair it with the rest.

        Raises:
            PromptError: Empty prompt or conversation, unusable text, a malformed message, tools with a plain text.
        """
        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
            if not prompt:
                raise PromptError("the prompt is empty", hint="give at least one character")
            if tools:
                raise PromptError("tools were given with a plain text", hint="give a conversation: a list of messages")
            return cls(prompt=prompt, sampling=sampling, grammar=grammar)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
            raise PromptError(f"a prompt must be str or a sequence of messages, got {type(prompt).__name__}")
        messages = tuple(Message.of(message) for message in prompt)  # type: ignore[arg-type]
        if not messages:
            raise PromptError("the conversation is empty", hint="give at least one message")
        if not any(message.content or message.tool_calls for message in messages):
            raise PromptError("every message of the conversation is empty", hint="give some text")
        return cls(prompt=messages, sampling=sampling, tools=tools, grammar=grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, counted in the drafter's tokens.

    Attributes:
        prompt_tokens: Length of the prompt as the drafter reads it, control tokens included.
        completion_tokens: Generated tokens that were committed, an END included, also those a stop string cut off.
        cached_tokens: Prompt tokens that were not computed, since another request had them in the cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One generated token with its log-probability under the drafter's full softmax at temperature 1.

    Attributes:
        token: The token's raw bytes; concatenated over an answer they are the answer's bytes. Empty for END.
        logprob: Natural logarithm of the probability, or None for the later pieces of an ensembled token that takes
            several drafter tokens (the drafter was never asked for them).
        top: The drafter's best tokens at this position with their log-probabilities, best first.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()

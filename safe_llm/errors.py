"""Every error this library raises on purpose.

    SafeLLMError
    ├── ConfigError            an ensemble or a parameter is not as it must be (also a ValueError)
    │   └── UnknownNameError   a preset, method, parameter or model nobody knows; names the nearest
    ├── ModelError             a member's weights cannot be had or used
    │   ├── ModelNotFoundError    nothing there under this name or path
    │   ├── ModelAccessError      there, but not for you (gated, private) or not reachable
    │   ├── ModelCorruptError     there, but damaged: wrong hash, truncated, not a model
    │   └── UnsupportedModelError there and whole, but not usable as a member
    ├── PromptError            the prompt is not usable (also a ValueError)
    │   └── ContextOverflowError  it does not fit a member's context window
    ├── TraceError             a trace cannot be read or written
    ├── EvaluationError        an evaluation's data or results cannot be used
    └── GenerationError        a request failed while it ran
        ├── MemberError           a member failed: raised inside its forward pass
        │   └── NonFiniteLogitsError  its logits were NaN or infinite
        ├── GenerationTimeoutError  it took longer than its `timeout` (also a TimeoutError)
        └── Cancelled             the caller cancelled it

No message contains prompt or generated text. `hint` says what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "Cancelled",
    "ConfigError",
    "ContextOverflowError",
    "EvaluationError",
    "GenerationError",
    "GenerationTimeoutError",
    "MemberError",
    "ModelAccessError",
    "ModelCorruptError",
    "ModelError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "PromptError",
    "SafeLLMError",
    "TraceError",
    "UnknownNameError",
    "UnsupportedModelError",
]


class SafeLLMError(Exception):
    """Base of every deliberate error.

    Attributes:
        hint: What the user can do about it, one sentence, or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(SafeLLMError, ValueError):
    """A parameter or a combination of parameters is not valid."""


class UnknownNameError(ConfigError):
    """A name that is not among the known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(options)}"
        super().__init__(f"unknown {kind} {name!r}", hint=hint)
        self.name = name


class ModelError(SafeLLMError):
    """A member's weights cannot be obtained or used."""


class ModelNotFoundError(ModelError):
    """No model under this name or path."""


class ModelAccessError(ModelError):
    """The model exists but may not or cannot be read: gated, private, or no connection."""


class ModelCorruptError(ModelError):
    """The model's files are damaged: a wrong hash, a truncated file, not a model at all."""


class UnsupportedModelError(ModelError):
    """The model is whole but cannot be a member, for instance because its state cannot be rolled back."""


class PromptError(SafeLLMError, ValueError):
    """The prompt is not usable: empty, not encodable, or refused by a template."""


class ContextOverflowError(PromptError):
    """The prompt does not fit the context window of a member.

    Attributes:
        member: Name of the member.
        prompt_tokens: Length of the prompt in that member's tokens.
        max_context: That member's limit, in tokens.
    """

    def __init__(self, member: str, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"prompt is {prompt_tokens} tokens for member {member!r}, whose context window is {max_context} tokens",
            hint="shorten the prompt, or leave that member out; at least one token must be left for the answer",
        )
        self.member = member
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context


class TraceError(SafeLLMError):
    """A trace file is not one, is damaged, or cannot be read or written."""


class EvaluationError(SafeLLMError):
    """An evaluation's data or results cannot be used: a damaged file, golds that do not score, other items."""


class GenerationError(SafeLLMError):
    """A request failed while it ran; the engine goes on and the next request works."""


class MemberError(GenerationError):
    """A member raised inside its forward pass.

    Attributes:
        member: Name of the member.
    """

    def __init__(self, member: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"member {member!r}: {message}", hint=hint)
        self.member = member


class NonFiniteLogitsError(MemberError):
    """A member produced NaN or infinite logits; they are never averaged into an answer."""

    def __init__(self, member: str, position: int) -> None:
        super().__init__(
            member,
            f"logits are NaN or infinite at position {position} of its context",
            hint="load it with dtype='float32', or leave it out",
        )


class GenerationTimeoutError(GenerationError, TimeoutError):
    """The answer took longer than its `timeout`; what was generated until then is lost."""


class Cancelled(GenerationError):  # noqa: N818 - the field's word, like asyncio.CancelledError's
    """The caller cancelled the request; what was generated until then is lost."""

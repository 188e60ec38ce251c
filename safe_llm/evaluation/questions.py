"""What is asked in an evaluation: one prompt with its decoding parameters, the same for every contender."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from safe_llm.errors import ConfigError
from safe_llm.types import Prompt

__all__ = ["Conversation", "Question", "require_extra", "sha256_of"]


class Conversation(str):
    """A conversation as lm-evaluation-harness passes it on: its messages as JSON, in a str.

    Members have different chat templates, so a prompt stays a list of messages until each member renders its own. The
    JSON is canonical (sorted keys, no white space, ASCII), so its hash is the one that traces have.
    """

    __slots__ = ()

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, str]]) -> Self:
        """Write down messages."""
        return cls(json.dumps(list(messages), sort_keys=True, separators=(",", ":")))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages."""
        return list(json.loads(self))

    def __add__(self, other: str) -> str:
        raise TypeError("a conversation cannot be continued as text; its templates have not been applied yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One item of a task, as it is put to every contender.

    Attributes:
        task: Name of the task.
        item: Id of the item.
        context: A `Conversation`, or plain text that is continued without a template.
        params: Fields of `SamplingParams`.
        late_stops: Stop strings that the engine does not take (too long, too many): the answer is cut at them later.
    """

    task: str
    item: str
    context: str
    params: Mapping[str, Any]
    late_stops: tuple[str, ...] = field(default=())

    @property
    def prompt(self) -> Prompt:
        """What `Ensemble.generate` takes."""
        return self.context.messages if isinstance(self.context, Conversation) else self.context

    @property
    def sha256(self) -> str:
        """Hash of the prompt before any template: hexadecimal."""
        return sha256_of(self.context)


def sha256_of(context: str) -> str:
    """Return the hexadecimal SHA-256 of a text or of a `Conversation`'s JSON."""
    return hashlib.sha256(context.encode()).hexdigest()


def require_extra() -> None:
    """Raise ConfigError unless what only evaluations need is installed."""
    missing = [name for name in ("lm_eval", "math_verify", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"evaluations need {', '.join(missing)}, not installed",
            hint='install it with: pip install "safe-llm-ensemble[eval]"',
        )

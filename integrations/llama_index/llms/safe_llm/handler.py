"""Totals over many calls of ensembles, wherever in a query, an agent or a workflow they happen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from pydantic import Field, PrivateAttr

from llama_index.llms.safe_llm.events import EnsembleGenerationEndEvent
from safe_llm.record import PHASES

__all__ = ["EnsembleEventHandler"]


class EnsembleEventHandler(BaseEventHandler):
    """Add up what the ensembles did in every call it hears of. Safe to use from many threads.

    Attributes:
        n_runs: Finished answers.
        n_prompt_tokens: Tokens of the prompts, in the drafters' tokens.
        n_tokens: Generated tokens.
        n_points: Ensemble points.
        n_replaced: Ensemble points that chose another token than the drafter.
        n_draft_tokens: Drafted tokens.
        n_accepted_tokens: Drafted tokens that were kept.
        latency_s: Seconds per phase, and "total". Answers that ran at the same time each count in full.
        ttft_s: Seconds to the first token of every answer that has one.
        points: Record of every ensemble point.

    Example:
        >>> with EnsembleEventHandler().listening() as totals:  # doctest: +SKIP
        ...     query_engine.query("...")
        >>> print(totals.summary())  # doctest: +SKIP
    """

    n_runs: int = 0
    n_prompt_tokens: int = 0
    n_tokens: int = 0
    n_points: int = 0
    n_replaced: int = 0
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0
    latency_s: dict[str, float] = Field(default_factory=lambda: dict.fromkeys((*PHASES, "total"), 0.0))
    ttft_s: list[float] = Field(default_factory=list)
    points: list[dict[str, Any]] = Field(default_factory=list, repr=False)

    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def class_name(cls) -> str:
        """Name of the handler."""
        return "EnsembleEventHandler"

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Listen to all that happens in the process while the `with` block lasts."""
        handlers = get_dispatcher().event_handlers
        handlers.append(self)
        try:
            yield self
        finally:
            handlers.remove(self)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:  # noqa: ARG002 - the base class's signature
        """Count an answer; other events are none of its business."""
        if not isinstance(event, EnsembleGenerationEndEvent):
            return
        with self._lock:
            self.n_runs += 1
            self.n_prompt_tokens += event.usage["prompt_tokens"]
            for name in ("n_tokens", "n_points", "n_replaced", "n_draft_tokens", "n_accepted_tokens"):
                setattr(self, name, getattr(self, name) + event.safe[name])
            for phase in self.latency_s:
                self.latency_s[phase] += event.safe["latency_s"][phase]
            if event.safe["latency_s"]["ttft"] is not None:
                self.ttft_s.append(event.safe["latency_s"]["ttft"])
            self.points += event.safe_points

    def summary(self) -> str:
        """Return the totals as a small table of plain text."""
        with self._lock:
            return "\n".join(f"{label:<10} {value:>10}  {note}".rstrip() for label, value, note in self._rows())

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        yield "answers", str(self.n_runs), ""
        yield "prompts", str(self.n_prompt_tokens), "tokens"
        yield "tokens", str(self.n_tokens), ""
        yield "points", str(self.n_points), f"{_ratio(self.n_points, self.n_tokens):.1%} of tokens"
        yield "replaced", str(self.n_replaced), f"{_ratio(self.n_replaced, self.n_tokens):.1%} of tokens"
        kept = _ratio(self.n_accepted_tokens, self.n_draft_tokens)
        yield "accepted", str(self.n_accepted_tokens), f"{kept:.1%} of {self.n_draft_tokens} drafted"
        total = self.latency_s["total"]
        yield "seconds", f"{total:.3f}", ""
        for phase in PHASES:
            yield f"  {phase}", f"{self.latency_s[phase]:.3f}", f"{_ratio(self.latency_s[phase], total):.1%}"
        yield "mean TTFT", f"{sum(self.ttft_s) / len(self.ttft_s):.3f}" if self.ttft_s else "-", ""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

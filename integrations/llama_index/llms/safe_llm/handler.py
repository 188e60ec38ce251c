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
from safe_llm.record import PHASES, totals_table

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
        first = [("answers", str(self.n_runs), ""), ("prompts", str(self.n_prompt_tokens), "tokens")]
        with self._lock:
            return totals_table(first, self)

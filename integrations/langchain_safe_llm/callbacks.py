"""Totals over many calls of ensembles, wherever in a chain, an agent or a batch they happen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TextIO
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.tracers.context import register_configure_hook
from typing_extensions import override

from safe_llm.record import PHASES, SCHEMA_VERSION, ratio, totals_table

__all__ = ["EnsembleCallbackHandler", "get_ensemble_callback"]

_COUNTS = ("n_tokens", "n_points", "n_replaced", "n_draft_tokens", "n_accepted_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one answer of an ensemble says about itself."""

    counts: dict[str, int]
    latency_s: dict[str, float]
    ttft_s: float | None
    points: list[dict[str, Any]]
    is_cached: bool


class EnsembleCallbackHandler(BaseCallbackHandler):
    """Add up what the ensembles did in every LLM run it sees.

    Pass it in `callbacks`, or use `get_ensemble_callback`. Safe to use from many threads.

    Attributes:
        n_runs: Answers of an ensemble: one per LLM run, more if a run returns several.
        n_cached: Answers that came from a cache; they are in no other total.
        n_other_runs: LLM runs whose answer no ensemble made.
        n_errors: LLM runs that failed. A failed run has no record, so those of other models are among them.
        n_stopped: LLM runs that the caller broke off or cancelled.
        n_tokens: Generated tokens, in the drafters' tokens.
        n_points: Ensemble points.
        n_replaced: Ensemble points that chose another token than the drafter.
        n_draft_tokens: Drafted tokens.
        n_accepted_tokens: Drafted tokens that were kept.
        latency_s: Seconds per phase, and "total". Answers that ran at the same time each count in full.
        ttft_s: Seconds to the first token of every answer that has one, in order.
        points: Record of every ensemble point, in order.

    Example:
        >>> handler = EnsembleCallbackHandler()
        >>> chain.invoke("...", config={"callbacks": [handler]})  # doctest: +SKIP
        >>> handler.print_summary()  # doctest: +SKIP
    """

    # Otherwise async runs would hand each of these short methods to a thread, and two ends could change places.
    run_inline = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._running: set[UUID] = set()
        self.n_runs = 0
        self.n_cached = 0
        self.n_other_runs = 0
        self.n_errors = 0
        self.n_stopped = 0
        self.n_tokens = 0
        self.n_points = 0
        self.n_replaced = 0
        self.n_draft_tokens = 0
        self.n_accepted_tokens = 0
        self.latency_s = dict.fromkeys((*PHASES, "total"), 0.0)
        self.ttft_s: list[float] = []
        self.points: list[dict[str, Any]] = []

    # ------------------------------------------------------------------ rates

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 without a draft."""
        return ratio(self.n_accepted_tokens, self.n_draft_tokens)

    @property
    def ensemble_rate(self) -> float:
        """Ensemble points over tokens."""
        return ratio(self.n_points, self.n_tokens)

    @property
    def replacement_rate(self) -> float:
        """Replaced over all tokens."""
        return ratio(self.n_replaced, self.n_tokens)

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean seconds to the first token; None before there is one."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else None

    # ------------------------------------------------------------------ what LangChain calls

    @override
    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._running.add(run_id)

    @override
    def on_chat_model_start(self, serialized: dict[str, Any], messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            self._running.add(run_id)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        answers = [answer for generations in response.generations for g in generations if (answer := _answer(g))]
        with self._lock:
            self._running.discard(run_id)
            self.n_other_runs += not answers
            for answer in answers:
                self._add(answer)

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        with self._lock:
            if run_id not in self._running:  # reported before: a cancelled run may be reported by core, too
                return
            self._running.discard(run_id)
            # GeneratorExit (a stream that is read no further) and CancelledError are no Exceptions.
            if isinstance(error, Exception):
                self.n_errors += 1
            else:
                self.n_stopped += 1

    def _add(self, answer: _Answer) -> None:
        if answer.is_cached:
            self.n_cached += 1
            return
        self.n_runs += 1
        for name, count in answer.counts.items():
            setattr(self, name, getattr(self, name) + count)
        for phase, seconds in answer.latency_s.items():
            self.latency_s[phase] += seconds
        if answer.ttft_s is not None:
            self.ttft_s.append(answer.ttft_s)
        self.points.extend(answer.points)

    # ------------------------------------------------------------------ for people

    def summary(self) -> str:
        """Return the totals as a small table of plain text."""
        beside = {
            "cached": self.n_cached,
            "of other models": self.n_other_runs,
            "failed": self.n_errors,
            "stopped": self.n_stopped,
        }
        with self._lock:
            note = ", ".join(f"{count} {what}" for what, count in beside.items() if count)
            return totals_table([("runs", str(self.n_runs), note)], self)

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print the totals to `file`, by default to standard output."""
        print(self.summary(), file=sys.stdout if file is None else file)


@contextmanager
def get_ensemble_callback() -> Iterator[EnsembleCallbackHandler]:
    """Count everything that ensembles do inside the `with` block.

    It reaches nested chains, agents, `batch()` and asyncio tasks; of threads, those that copy the context, as
    LangChain's own do. Contexts may be nested: each one counts all that happens in it.

    Example:
        >>> with get_ensemble_callback() as totals:  # doctest: +SKIP
        ...     chain.batch(questions)
        >>> totals.print_summary()  # doctest: +SKIP
    """
    slot = _free_slot()
    handler = EnsembleCallbackHandler()
    token = slot.set(handler)
    try:
        yield handler
    finally:
        slot.reset(token)


_Slot = ContextVar[EnsembleCallbackHandler | None]
_slots: list[_Slot] = []
_slots_lock = threading.Lock()


def _free_slot() -> _Slot:
    """Return the first variable that no enclosing context uses.

    LangChain asks every registered variable for one handler, and a registration is for ever. So there is one variable
    per depth of nesting, made when it is first needed, and not one per context.
    """
    with _slots_lock:
        for slot in _slots:
            if slot.get() is None:
                return slot
        slot = ContextVar(f"safe_ensemble_callback_{len(_slots)}", default=None)
        register_configure_hook(slot, inheritable=True)
        _slots.append(slot)
        return slot


def _answer(generation: Generation) -> _Answer | None:
    """Return what a generation says about itself, None if no ensemble made it."""
    message = generation.message if isinstance(generation, ChatGeneration) else None
    info = (generation.generation_info or {}) if message is None else message.response_metadata
    record = info.get("safe")
    if not isinstance(record, Mapping) or record.get("schema_version") != SCHEMA_VERSION:
        return None
    try:
        latency_s = record["latency_s"]
        ttft_s = latency_s["ttft"]
        return _Answer(
            counts={name: int(record[name]) for name in _COUNTS},
            latency_s={phase: float(latency_s[phase]) for phase in (*PHASES, "total")},
            ttft_s=None if ttft_s is None else float(ttft_s),
            points=list(info.get("safe_points") or ()),
            # LangChain's mark of an answer from its cache.
            is_cached=(getattr(message, "usage_metadata", None) or {}).get("total_cost") == 0,
        )
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None  # somebody else's record: a callback must not fail for it

"""Reporting a generation while it runs: ensemble points as custom events, phases as child runs of the LLM run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from langchain_core.callbacks.manager import AsyncCallbackManager, BaseRunManager, CallbackManager
from langchain_core.tracers.langchain import LangChainTracer
from langsmith import RunTree

from safe_llm.events import Result, RoundFinished
from safe_llm.record import PHASES, phase_seconds

__all__ = ["MAX_BLOCKS", "POINT_EVENT", "PhaseTracer", "TraceLevel", "aemit_point", "emit_point", "report_usage"]

logger = logging.getLogger(__name__)

POINT_EVENT = "safe.ensemble_point"
"""Name of the custom event of an ensemble point."""

MAX_BLOCKS = 50
"""How many blocks of rounds a generation is traced as, at most."""

TraceLevel = Literal["summary", "blocks"]


def emit_point(run_manager: BaseRunManager | None, point: dict[str, Any]) -> None:
    """Dispatch a point record as a custom event of the LLM run itself, from a thread.

    LangChain's `dispatch_custom_event` would put it on the parent chain, and fail without one.
    """
    if run_manager is not None:
        manager = CallbackManager(**_of_run(run_manager))
        manager.on_custom_event(POINT_EVENT, point, run_id=run_manager.run_id)


async def aemit_point(run_manager: BaseRunManager | None, point: dict[str, Any]) -> None:
    """Dispatch a point record as a custom event of the LLM run itself, from a coroutine."""
    if run_manager is not None:
        manager = AsyncCallbackManager(**_of_run(run_manager))
        await manager.on_custom_event(POINT_EVENT, point, run_id=run_manager.run_id)


def report_usage(run_manager: BaseRunManager | None, usage: Mapping[str, int]) -> None:
    """Tell LangSmith the token counts of a text model's run; it reads them from messages only, and a text has none.

    Call it before the LLM run ends and after its phases are reported, which inherit its metadata.
    """
    if run_manager is None:
        return
    for _, run in _langsmith_runs(run_manager):
        # A new mapping: the run shares its own with the run manager and other handlers.
        run.extra["metadata"] = {**run.metadata, "usage_metadata": dict(usage)}


def _of_run(run_manager: BaseRunManager) -> dict[str, Any]:
    return {
        "handlers": run_manager.handlers,
        "parent_run_id": run_manager.run_id,
        "tags": run_manager.tags,
        "metadata": run_manager.metadata,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What some consecutive rounds, or the start of the generation, spent; times count from the generation's start."""

    seconds: dict[str, float]
    n_rounds: int
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseRun:
    """One child run to be: all that some rounds spent in one phase."""

    name: str
    start_s: float
    duration_s: float
    facts: dict[str, int]

    @property
    def outputs(self) -> dict[str, Any]:
        return {"duration_s": self.duration_s, **self.facts}

    @property
    def metadata(self) -> dict[str, Any]:
        return {"aggregated": True, **self.facts}


class PhaseTracer:
    """Report the phases of one generation as child runs of its LLM run.

    The runs are `safe.tokenize`, `safe.prefill`, `safe.draft`, `safe.verify` and `safe.ensemble`; a phase that took no
    time has none. They carry numbers only. Phases take turns within every round, so a run stands for all that its
    rounds spent in the phase, laid out as if the phases had come one after another. LangSmith gets them with these
    times; other handlers, whose interface has none, get `duration_s` in the outputs.

    Make it right before the generation begins. A generation that does not finish is not reported.

    Args:
        run_manager: The LLM run, sync or async.
        level: "summary": one set of runs for the whole generation. "blocks": one for its start and one per block of
            consecutive rounds, at most `MAX_BLOCKS` of equal size, each ending when its last round was reported.
    """

    def __init__(self, run_manager: BaseRunManager, level: TraceLevel) -> None:
        self._run_manager = run_manager
        self._level = level
        self._rounds: list[_Block] = []
        self._started = datetime.now(UTC)
        self._clock_s = time.perf_counter()

    def round(self, event: RoundFinished) -> None:
        """Take note of one round; the level "blocks" needs every one."""
        ended_s = time.perf_counter() - self._clock_s
        self._rounds.append(_Block(seconds=phase_seconds(event.timings), n_rounds=1, ended_s=ended_s))

    def finish(self, result: Result) -> None:
        """Report all phases. Call it before the LLM run ends."""
        runs = self._phase_runs(result)
        for run in runs:
            manager = CallbackManager(**self._of_child(run))
            child = manager.on_chain_start({"name": run.name}, dict(run.facts), name=run.name)
            child.on_chain_end(run.outputs)
        self._post(runs)

    async def afinish(self, result: Result) -> None:
        """Report all phases, from a coroutine: async handlers run in its event loop."""
        runs = self._phase_runs(result)
        for run in runs:
            manager = AsyncCallbackManager(**self._of_child(run))
            child = await manager.on_chain_start({"name": run.name}, dict(run.facts), name=run.name)
            await child.on_chain_end(run.outputs)
        self._post(runs)

    # ------------------------------------------------------------------ what to report

    def _phase_runs(self, result: Result) -> list[_PhaseRun]:
        if self._level == "summary":
            seconds = phase_seconds(result.timings)
            n_rounds = result.counters.num_rounds
            return _laid_out(_Block(seconds=seconds, n_rounds=n_rounds, ended_s=sum(seconds.values())), {})
        blocks = [self._opening(result), *self._blocks()]
        return [run for number, block in enumerate(blocks) for run in _laid_out(block, {"block": number})]

    def _opening(self, result: Result) -> _Block:
        """Encoding and prefilling the prompt, which no round covers."""
        whole, rounds = phase_seconds(result.timings), _merged(self._rounds)
        seconds = {phase: whole[phase] - rounds.seconds[phase] for phase in ("tokenize", "prefill")}
        first = self._rounds[:1]
        ended_s = first[0].ended_s - sum(first[0].seconds.values()) if first else sum(seconds.values())
        return _Block(seconds=seconds, n_rounds=0, ended_s=ended_s)

    def _blocks(self) -> list[_Block]:
        size = math.ceil(len(self._rounds) / MAX_BLOCKS)
        return [_merged(self._rounds[i : i + size]) for i in range(0, len(self._rounds), size)] if size else []

    # ------------------------------------------------------------------ whom to report to

    def _of_child(self, run: _PhaseRun) -> dict[str, Any]:
        return {
            "handlers": [h for h in self._run_manager.handlers if not isinstance(h, LangChainTracer)],
            "parent_run_id": self._run_manager.run_id,
            "tags": self._run_manager.inheritable_tags,
            "metadata": {**self._run_manager.inheritable_metadata, **run.metadata},
        }

    def _post(self, runs: Sequence[_PhaseRun]) -> None:
        for tracer, parent in _langsmith_runs(self._run_manager):
            try:
                self._post_to(tracer, parent, runs)
            except Exception as error:
                # As LangChain treats its handlers: a trace that fails must not cost the answer.
                logger.warning("Error in LangSmith runs of phases: %r", error)

    def _post_to(self, tracer: LangChainTracer, parent: RunTree, runs: Sequence[_PhaseRun]) -> None:
        for run in runs:
            start = self._started + timedelta(seconds=run.start_s)
            child = parent.create_child(
                run.name,
                inputs=dict(run.facts),
                outputs=run.outputs,
                start_time=start,
                end_time=start + timedelta(seconds=run.duration_s),
                tags=sorted({*self._run_manager.inheritable_tags, *tracer.tags}),
                extra={"metadata": run.metadata},
            )
            child.post()  # whole, with its end: nothing is left to patch


def _langsmith_runs(run_manager: BaseRunManager) -> list[tuple[LangChainTracer, RunTree]]:
    """Return LangSmith's tracers with their form of the run; without those that do not post it (tracing disabled)."""
    tracers = [handler for handler in run_manager.handlers if isinstance(handler, LangChainTracer)]
    found = [(tracer, tracer.run_map.get(str(run_manager.run_id))) for tracer in tracers]
    return [(tracer, run) for tracer, run in found if run is not None and not run.extra.get("__disabled")]


def _merged(rounds: Sequence[_Block]) -> _Block:
    return _Block(
        seconds={phase: sum(block.seconds[phase] for block in rounds) for phase in PHASES},
        n_rounds=len(rounds),
        ended_s=rounds[-1].ended_s if rounds else 0.0,
    )


def _laid_out(block: _Block, facts: dict[str, int]) -> list[_PhaseRun]:
    """Lay a block's phases one after another, the last one ending with the block."""
    runs: list[_PhaseRun] = []
    start_s = block.ended_s - sum(block.seconds.values())
    for phase, duration_s in block.seconds.items():
        if duration_s > 0.0:
            facts_of_run = {"n_rounds": block.n_rounds, **facts}
            runs.append(_PhaseRun(name=f"safe.{phase}", start_s=start_s, duration_s=duration_s, facts=facts_of_run))
            start_s += duration_s
    return runs

"""Interleaved trials: each round, every contender gets the same prompt, and another one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from safe_llm.bench.trials import Contender, PeakMemory, Trial, Unavailable
from safe_llm.bench.workloads import Conversation
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.member import Member

__all__ = ["BatchTrial", "Progress", "Race", "race", "race_batches"]

Progress = Callable[[str, int, int], None]
"""Called with what is under way, how much of it is done, and how much there is."""

T = TypeVar("T")

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The trials of a workload.

    Attributes:
        trials: In the order in which they ran.
        left_out: Contenders that turned out not to apply, with the reason; they have no trials.
    """

    trials: tuple[Trial, ...]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrial:
    """Several prompts at once.

    Attributes:
        rows: How many.
        round: Number of the round.
        num_tokens: Tokens of all answers.
        total_s: Until the last answer was there.
    """

    rows: int
    round: int
    num_tokens: int
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the time."""
        return self.num_tokens / self.total_s


def race(
    workload: str,
    contenders: Sequence[Contender],
    prompts: Sequence[Conversation],
    *,
    max_tokens: int,
    memory: PeakMemory,
    progress: Progress = lambda *_: None,
) -> Race:
    """Warm every contender up, then let all of them answer each prompt in turn.

    Args:
        workload: Its name.
        contenders: Who takes part.
        prompts: One per round.
        max_tokens: Most tokens of an answer.
        memory: Looks for the peaks.
        progress: Told about every trial.

    Raises:
        SafeLLMError: A contender failed.
    """
    going, trials, left_out = list(contenders), list[Trial](), dict[str, str]()
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first time to warm up
        order = _rotated(going, number - 1)
        for turn, contender in enumerate(order):
            memory.restart()
            try:
                run = contender.run(prompt, max_tokens if number else min(max_tokens, _WARM_UP_TOKENS))
            except Unavailable as reason:
                left_out[contender.name] = str(reason)
                going.remove(contender)
                continue
            if number:
                trials.append(
                    Trial(
                        workload=workload,
                        contender=contender.name,
                        round=number - 1,
                        turn=turn,
                        run=run,
                        peak_bytes=memory.peak_bytes,
                    )
                )
        progress(workload, number, len(prompts))
    return Race(trials=tuple(t for t in trials if t.contender not in left_out), left_out=left_out)


def race_batches(
    members: Sequence[Member],
    config: EnsembleConfig,
    prompts: Sequence[Conversation],
    sizes: Sequence[int],
    *,
    rounds: int,
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = lambda *_: None,
) -> tuple[BatchTrial, ...]:
    """Decode batches of every size in each round, after one small batch of each to warm up.

    Args:
        members: The drafter first.
        config: How they decide; its batches become as large as they must.
        prompts: What rows are taken from; a round begins one prompt further on.
        sizes: Rows per batch.
        rounds: How often.
        max_tokens: Most tokens per row.
        clock: Seconds.
        progress: Told about every round.
    """
    ensemble = Ensemble(members, config.updated({"max_batch_size": max(*sizes, config.max_batch_size)}))
    trials: list[BatchTrial] = []
    for number in range(rounds + 1):
        limit = max_tokens if number else min(max_tokens, _WARM_UP_TOKENS)
        for rows in _rotated(sizes, number - 1):
            batch = [prompts[(number + place) % len(prompts)] for place in range(rows)]
            started = clock()
            results = ensemble.generate(batch, max_tokens=limit)
            total_s = clock() - started
            tokens = sum(result.usage.completion_tokens for result in results)
            if number:
                trials.append(BatchTrial(rows=rows, round=number - 1, num_tokens=tokens, total_s=total_s))
        progress("batches", number, rounds)
    return tuple(trials)


def _rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the items in their order, beginning with another one for each round; round 0 begins with the first."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]

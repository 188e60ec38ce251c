"""From trials to figures: medians, ratios of one round's neighbours with their intervals, and counts per token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from safe_llm.bench.running import BatchTrial
from safe_llm.bench.trials import Trial
from safe_llm.evaluation.statistics import NUM_RESAMPLES, Interval
from safe_llm.record import ratio

__all__ = [
    "BatchFigures",
    "ContenderFigures",
    "batch_figures",
    "contender_figures",
    "median_interval",
    "reference_of",
    "speed_along_text",
]

_LEVEL = 0.95
_REFERENCE = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderFigures:
    """One contender on one workload. Times are medians over the trials, counts are over all of them.

    Attributes:
        name: The contender.
        num_trials: How many trials.
        num_tokens: Tokens of all answers.
        tokens_per_s: Tokens over all of the time, the prompt's included.
        ttft_s: Until the first tokens were final.
        tpot_s: Seconds per later token; None where no answer has any.
        peak_bytes: Most memory in use.
        ratio: Tokens per second over the reference's in the same round; None of the reference itself.
        forwards_per_token: By member; the passes over the prompt are among them.
        drafts_per_token: Drafted tokens; None, like those below, where the contender has no such thing.
        rounds_per_token: Rounds.
        ensemble_rate: Ensemble points per token.
        replacement_rate: Ensemble points that chose another token.
        phases: Share of the time by phase; what none of them accounts for is `other`.
    """

    name: str
    num_trials: int
    num_tokens: int
    tokens_per_s: float
    ttft_s: float
    tpot_s: float | None
    peak_bytes: int
    ratio: Interval | None
    forwards_per_token: Mapping[str, float]
    drafts_per_token: float | None
    rounds_per_token: float | None
    ensemble_rate: float | None
    replacement_rate: float | None
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Batches of one size.

    Attributes:
        rows: The size.
        tokens_per_s: Median over the rounds, all rows together.
        ratio: To the smallest size in the same round; None of that itself.
    """

    rows: int
    tokens_per_s: float
    ratio: Interval | None


def reference_of(names: Iterable[str]) -> str:
    """Return whose speed is 1: `generate`, or the first contender where it did not run; "" where nobody did."""
    known = list(names)
    return _REFERENCE if _REFERENCE in known else next(iter(known), "")


def contender_figures(trials: Sequence[Trial], *, seed: int = 0) -> tuple[ContenderFigures, ...]:
    """Return the figures of one workload's contenders, in the order in which they first ran.

    Args:
        trials: Of one workload; every contender has one in each round.
        seed: Of the intervals.
    """
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        by_name.setdefault(trial.contender, []).append(trial)
    speeds = {name: {t.round: t.run.tokens_per_s for t in own} for name, own in by_name.items()}
    reference = reference_of(by_name)
    return tuple(
        _figures(name, own, None if name == reference else _ratio(speeds[name], speeds[reference], seed))
        for name, own in by_name.items()
    )


def _figures(name: str, trials: Sequence[Trial], relative: Interval | None) -> ContenderFigures:
    runs = [trial.run for trial in trials]
    tokens = sum(run.num_tokens for run in runs)
    later = [run.tpot_s for run in runs if run.tpot_s is not None]
    counts = [run.counts for run in runs]
    members = dict.fromkeys(member for count in counts for member in count.num_forwards)
    return ContenderFigures(
        name=name,
        num_trials=len(runs),
        num_tokens=tokens,
        tokens_per_s=median(run.tokens_per_s for run in runs),
        ttft_s=median(run.ttft_s for run in runs),
        tpot_s=median(later) if later else None,
        peak_bytes=round(median(trial.peak_bytes for trial in trials)),
        ratio=relative,
        forwards_per_token={
            member: ratio(sum(count.num_forwards.get(member, 0) for count in counts), tokens) for member in members
        },
        drafts_per_token=_per_token([count.num_draft_tokens for count in counts], tokens),
        rounds_per_token=_per_token([count.num_rounds for count in counts], tokens),
        ensemble_rate=_per_token([count.num_ensembled for count in counts], tokens),
        replacement_rate=_per_token([count.num_replaced for count in counts], tokens),
        phases=_phase_shares(trials),
    )


def _per_token(counts: Sequence[int | None], tokens: int) -> float | None:
    known = [count for count in counts if count is not None]
    return ratio(sum(known), tokens) if known else None


def _phase_shares(trials: Sequence[Trial]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for trial in trials:
        for phase, value in trial.run.phases.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    if not seconds:
        return {}
    total = sum(trial.run.total_s for trial in trials)
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return {phase: ratio(value, total) for phase, value in seconds.items()}


def batch_figures(trials: Sequence[BatchTrial], *, seed: int = 0) -> tuple[BatchFigures, ...]:
    """Return the figures of every size, the smallest first."""
    speeds: dict[int, dict[int, float]] = {}
    for trial in sorted(trials, key=lambda trial: trial.rows):
        speeds.setdefault(trial.rows, {})[trial.round] = trial.tokens_per_s
    smallest = next(iter(speeds), 0)
    return tuple(
        BatchFigures(
            rows=rows,
            tokens_per_s=median(own.values()),
            ratio=None if rows == smallest else _ratio(own, speeds[smallest], seed),
        )
        for rows, own in speeds.items()
    )


def _ratio(speeds: Mapping[int, float], reference: Mapping[int, float], seed: int) -> Interval:
    return median_interval([speed / reference[number] for number, speed in speeds.items()], seed=seed)


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Return the median with its 95 % percentile bootstrap interval: medians of values drawn with replacement.

    It has no width where there is one value, which says nothing about others.
    """
    table = np.asarray(values)
    draws = np.random.default_rng(seed).integers(len(table), size=(NUM_RESAMPLES, len(table)))
    low, high = np.quantile(np.median(table[draws], axis=1), [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(value=float(np.median(table)), low=float(low), high=float(high))


def speed_along_text(trials: Sequence[Trial], *, num_bins: int = 12) -> list[tuple[float, float]]:
    """Return tokens per second along the answers, prompts left out: (middle of a stretch in tokens, speed).

    Args:
        trials: Of one contender. What came in one step is spread evenly over its tokens.
        num_bins: Stretches of the longest answer.
    """
    longest = max((trial.run.num_tokens for trial in trials), default=0)
    tokens, seconds = np.zeros(num_bins), np.zeros(num_bins)
    for trial in trials:
        steps = trial.run.steps
        for before, after in itertools.pairwise(steps):
            count = after.num_tokens - before.num_tokens
            for place in range(before.num_tokens, after.num_tokens):
                stretch = place * num_bins // longest
                tokens[stretch] += 1
                seconds[stretch] += (after.seconds - before.seconds) / count
    width = longest / num_bins
    return [((n + 0.5) * width, tokens[n] / seconds[n]) for n in range(num_bins) if seconds[n] > 0]

"""How sure an accuracy is: bootstrap intervals over items, and an exact test on the items that two runs disagree on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from safe_llm.errors import EvaluationError

__all__ = ["NUM_RESAMPLES", "Comparison", "Interval", "accuracy_interval", "compare", "mcnemar_p"]

NUM_RESAMPLES = 10_000
_LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval.

    Attributes:
        value: The estimate on the items themselves.
        low: The 2.5 % quantile over resampled items.
        high: The 97.5 % quantile.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one run gets right that another one does not, on the same items.

    Attributes:
        difference: Accuracy of the first minus that of the second, paired by item.
        wins: Items that only the first has right.
        losses: Items that only the second has right.
        p_value: Of the exact two-sided McNemar test.
    """

    difference: Interval
    wins: int
    losses: int
    p_value: float


def accuracy_interval(correct: Sequence[bool], *, seed: int = 0) -> Interval:
    """Return the share of right answers with its percentile bootstrap interval.

    The right answers in a resample of n items are a binomial draw, so that is drawn. All right or all wrong has an
    interval without width: no resample can show what was never seen.

    Raises:
        EvaluationError: There are no items.
    """
    total, right = _checked_size(correct), sum(correct)
    draws = np.random.default_rng(seed).binomial(total, right / total, size=NUM_RESAMPLES)
    return _interval(right / total, draws / total)


def compare(one: Mapping[str, bool], other: Mapping[str, bool], *, seed: int = 0) -> Comparison:
    """Compare two runs item by item.

    An item is won, lost or a draw; their numbers in a resample are a multinomial draw, so that is drawn.

    Args:
        one: Item -> whether its answer is right.
        other: The same of the other run.
        seed: Of the resampling.

    Raises:
        EvaluationError: The runs are of different items, or of none.
    """
    _check_same_items(one, other)
    total = _checked_size(one)
    wins = sum(right and not other[item] for item, right in one.items())
    losses = sum(other[item] and not right for item, right in one.items())
    shares = [wins / total, losses / total, (total - wins - losses) / total]
    draws = np.random.default_rng(seed).multinomial(total, shares, size=NUM_RESAMPLES)
    return Comparison(
        difference=_interval((wins - losses) / total, (draws[:, 0] - draws[:, 1]) / total),
        wins=wins,
        losses=losses,
        p_value=mcnemar_p(wins, losses),
    )


def mcnemar_p(wins: int, losses: int) -> float:
    """Return how probable a split at least as uneven is, were wins and losses equally likely (exact, two-sided)."""
    total, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**total))


def _interval(value: float, draws: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Interval:
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def _checked_size(items: Sequence[bool] | Mapping[str, bool]) -> int:
    if not items:
        raise EvaluationError("there are no answers to compute an accuracy of", hint="give at least one item")
    return len(items)


def _check_same_items(one: Mapping[str, bool], other: Mapping[str, bool]) -> None:
    if one.keys() != other.keys():
        missing, extra = len(one.keys() - other.keys()), len(other.keys() - one.keys())
        raise EvaluationError(
            f"these runs are not of the same items: {missing} only in the first, {extra} only in the second",
            hint="compare runs of the same data and --limit",
        )

"""What advice rests on: how right the members are, how alike their tokens, how far they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from safe_llm.evaluation.agreement import Agreement
from safe_llm.evaluation.boundaries import Boundaries
from safe_llm.evaluation.statistics import Interval
from safe_llm.evaluation.tokenization import Numbers, Overlap, Unspelled

__all__ = ["Accuracy", "Measurements", "wilson_interval"]

_Z = 1.959964
"""The normal distribution's 97.5 % quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """One member alone on the labelled items.

    Attributes:
        member: Its name.
        correct: Item -> whether the answer is right, in whatever form it is given.
        num_strict: Answers that are right in the form that was asked for.
        num_cut: Answers that were cut at the limit of tokens.
        tokens_per_s: Tokens generated per second, all items together.
    """

    member: str
    correct: Mapping[str, bool]
    num_strict: int
    num_cut: int
    tokens_per_s: float

    @property
    def num_items(self) -> int:
        """How many items were asked."""
        return len(self.correct)

    @property
    def num_right(self) -> int:
        """How many were answered right."""
        return sum(self.correct.values())

    @property
    def value(self) -> float:
        """The share of right answers."""
        return self.num_right / self.num_items

    @property
    def interval(self) -> Interval:
        """The accuracy with its Wilson interval: sets are small here, and none or all may be right."""
        return wilson_interval(self.num_right, self.num_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that was measured.

    Attributes:
        accuracies: Of every member, in the order in which the members were given.
        overlaps: Of the vocabularies of every pair.
        numbers: Of every pair.
        boundaries: Of every ordered pair.
        agreements: Of every ordered pair.
        unspelled: What each member cannot represent in the text.
        num_bytes: Length of the text.
        without_template: Members that have no chat template and read the items as a transcript.
        without_dense: Members that give no full rows of scores.
    """

    accuracies: tuple[Accuracy, ...]
    overlaps: tuple[Overlap, ...]
    numbers: tuple[Numbers, ...]
    boundaries: tuple[Boundaries, ...]
    agreements: tuple[Agreement, ...]
    unspelled: tuple[Unspelled, ...]
    num_bytes: int
    without_template: tuple[str, ...] = ()
    without_dense: tuple[str, ...] = ()

    def boundaries_between(self, drafter: str, verifier: str) -> Boundaries:
        """Return what was measured with these roles."""
        return next(b for b in self.boundaries if (b.drafter, b.verifier) == (drafter, verifier))

    def agreement_between(self, drafter: str, verifier: str) -> Agreement:
        """Return what was measured with these roles."""
        return next(a for a in self.agreements if (a.drafter, a.verifier) == (drafter, verifier))

    def numbers_between(self, one: str, other: str) -> Numbers:
        """Return what was measured of this pair, in whatever order."""
        return next(n for n in self.numbers if {n.first, n.second} == {one, other})


def wilson_interval(right: int, total: int) -> Interval:
    """Return a share with its 95 % score interval (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    share, square = right / total, _Z**2 / total
    middle = (share + square / 2) / (1 + square)
    reach = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return Interval(value=share, low=max(0.0, middle - reach), high=min(1.0, middle + reach))

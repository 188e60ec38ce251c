"""Intervals and tests over items: against brute force, and against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.statistics import accuracy_interval, compare, mcnemar_p

RIGHT = [True] * 70 + [False] * 30


def by_item(values: list[bool]) -> dict[str, bool]:
    return {str(place): value for place, value in enumerate(values)}


def resampled(values: np.ndarray) -> tuple[float, float]:
    """The plain bootstrap: draw items with replacement."""
    rng = np.random.default_rng(1)
    means = values[rng.integers(len(values), size=(10_000, len(values)))].mean(axis=1)
    return tuple(np.quantile(means, [0.025, 0.975]))


def test_accuracy_interval_is_that_of_resampled_items():
    found = accuracy_interval(RIGHT)
    assert found.value == 0.7
    assert (found.low, found.high) == pytest.approx(resampled(np.array(RIGHT, float)), abs=0.011)
    assert accuracy_interval(RIGHT) == found  # reproducible
    many = RIGHT * 50
    assert len({accuracy_interval(many, seed=seed).low for seed in range(5)}) > 1


def test_interval_of_a_difference_is_paired():
    other = [False] * 10 + [True] * 60 + [True] * 5 + [False] * 25  # loses ten, wins five
    found = compare(by_item(RIGHT), by_item(other))
    assert (found.difference.value, found.wins, found.losses) == (pytest.approx(0.05), 10, 5)
    differences = np.array(RIGHT, float) - np.array(other, float)
    expected = resampled(differences)
    assert (found.difference.low, found.difference.high) == pytest.approx(expected, abs=0.011)
    assert compare(by_item(other), by_item(RIGHT)).difference.value == pytest.approx(-0.05)


def test_comparison_goes_by_item_not_by_order():
    backwards = dict(reversed(by_item(RIGHT).items()))
    found = compare(by_item(RIGHT), backwards)
    assert (found.wins, found.losses, found.p_value) == (0, 0, 1.0)
    assert (found.difference.low, found.difference.high) == (0, 0)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(8, 2, 112 / 1024), (2, 8, 112 / 1024), (5, 5, 1.0), (0, 0, 1.0), (0, 6, 2 / 64)]
)
def test_mcnemar_is_the_exact_two_sided_binomial(wins, losses, p):
    assert mcnemar_p(wins, losses) == pytest.approx(p)


def test_mcnemar_of_thousands_of_items_is_finite():
    assert 0 <= mcnemar_p(2000, 1000) < 1e-60


def test_runs_of_different_items_are_not_compared():
    one, other = by_item(RIGHT), by_item(RIGHT[:-2]) | {"new": True}
    with pytest.raises(EvaluationError, match="2 only in the first, 1 only in the second"):
        compare(one, other)


@pytest.mark.parametrize("nothing", [lambda: accuracy_interval([]), lambda: compare({}, {})])
def test_no_items_have_no_accuracy(nothing):
    with pytest.raises(EvaluationError, match="no answers"):
        nothing()

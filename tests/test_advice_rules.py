"""The rules of the recommendation, one by one, on measurements made up for them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from safe_llm.config import EnsembleConfig
from safe_llm.evaluation.agreement import Agreement
from safe_llm.evaluation.boundaries import Boundaries
from safe_llm.evaluation.measurements import Accuracy, Measurements, wilson_interval
from safe_llm.evaluation.recommendation import Recommendation, recommend
from safe_llm.evaluation.tokenization import Numbers, Unspelled


def accuracy(name: str, right: str, *, speed: float = 10.0, cut: int = 0) -> Accuracy:
    """`right` has a 1 or a 0 per item."""
    correct = {str(i): char == "1" for i, char in enumerate(right)}
    return Accuracy(member=name, correct=correct, num_strict=0, num_cut=cut, tokens_per_s=speed)


def measured(*accuracies: Accuracy) -> Measurements:
    """Everything but the accuracies is as good as it can be."""
    names = [one.member for one in accuracies]
    return Measurements(
        accuracies=accuracies,
        overlaps=(),
        numbers=tuple(
            Numbers(first=a, second=b, num_numbers=100, num_alike=100) for a, b in itertools.combinations(names, 2)
        ),
        boundaries=tuple(
            Boundaries(drafter=a, verifier=b, num_ends=1000, num_shared=1000, num_unrepresentable=0)
            for a, b in itertools.permutations(names, 2)
        ),
        agreements=tuple(
            Agreement(
                drafter=a,
                verifier=b,
                num_answers=4,
                num_tokens=400,
                num_c1=300,
                num_c2=20,
                num_ensembled=50,
                num_replaced=10,
                num_unchecked=30,
            )
            for a, b in itertools.permutations(names, 2)
        ),
        unspelled=(),
        num_bytes=4000,
    )


def text_of(found: Recommendation) -> str:
    return "\n".join((*found.reasons, *found.warnings))


def shared(found: Measurements, drafter: str, verifier: str, num_shared: int) -> Measurements:
    roles = (drafter, verifier)
    return replace(
        found,
        boundaries=tuple(
            replace(b, num_shared=num_shared) if (b.drafter, b.verifier) == roles else b for b in found.boundaries
        ),
    )


NEAR = (accuracy("a", "1" * 19 + "0"), accuracy("b", "1" * 18 + "00"))
"""95 % and 90 %."""

# ---------------------------------------------------------------------- drafter and verifiers


def test_most_accurate_member_drafts():
    found = recommend(measured(accuracy("a", "1100", speed=99.0), accuracy("b", "1110")))
    assert found.drafter == "b"
    assert "b drafts: it is the most accurate, 3 of 4 right (75.0%)" in text_of(found)


def test_equally_accurate_members_the_faster_one_drafts():
    found = recommend(measured(accuracy("a", "1010", speed=2.0), accuracy("b", "0101", speed=8.0)))
    assert (found.drafter, found.verifiers) == ("b", ("a",))
    assert "a is as accurate, 2 of 4 right (50.0%), but no faster (8.0 to 2.0 tokens/s)" in text_of(found)


def test_members_equal_in_all_the_first_one_drafts():
    assert recommend(measured(accuracy("b", "10"), accuracy("a", "10"))).drafter == "b"


def test_members_within_ten_points_verify_best_first():
    best, near, edge, far = "1" * 10, "1" * 9 + "0", "0" + "1" * 9, "1" * 8 + "00"
    found = recommend(
        measured(
            accuracy("far", far), accuracy("edge", edge), accuracy("best", best), accuracy("near", near, speed=11.0)
        )
    )
    assert (found.drafter, found.verifiers, found.refused) == ("best", ("near", "edge"), ("far",))
    assert "near verifies: 9 of 10 right (90.0%), 10 points below the drafter, within 10 points" in text_of(found)
    assert "would ensemble at 12.5% of the tokens and choose another one at 2.5%" in text_of(found)
    assert "far is left out: 8 of 10 right (80.0%), 20 points below the drafter" in text_of(found)


def test_ten_points_are_ten_points_whatever_their_binary_fractions():
    for right in range(1, 11):  # 0.7 - 0.6 is more than 0.1 in binary
        better, worse = ("1" * n + "0" * (10 - n) for n in (right, right - 1))
        assert recommend(measured(accuracy("a", better), accuracy("b", worse))).verifiers == ("b",)


def test_no_member_in_range_the_best_stays_alone():
    found = recommend(measured(accuracy("a", "1111"), accuracy("b", "1000")))
    assert (found.verifiers, found.weights, found.method) == ((), None, "auto")
    assert "So a alone." in found.reasons
    assert not any("UniTE (the default)" in reason for reason in found.reasons)


def test_nobody_right_makes_no_ensemble():
    found = recommend(measured(accuracy("b", "000"), accuracy("a", "000", speed=10.5)))
    assert (found.drafter, found.verifiers, found.refused) == ("a", (), ("b",))
    assert found.reasons == (
        "a is named only for its speed, 10.5 tokens/s: nobody has an item right.",
        "b is left out: 0 of 3 right (0.0%), as is everybody, so nothing speaks for an ensemble.",
        "So a alone.",
    )
    assert "No member has an item right: these items say nothing about which is best." in found.warnings
    assert "too few to tell" not in text_of(found)


# ---------------------------------------------------------------------- weights


def test_weights_are_equal_where_the_items_do_not_tell():
    found = recommend(measured(*NEAR))
    assert found.weights is None
    assert found.config == EnsembleConfig()


def test_weights_follow_accuracies_that_differ_clearly():
    better, worse = accuracy("a", "1" * 360 + "0" * 40), accuracy("b", "1" * 328 + "0" * 72)
    found = recommend(measured(better, worse, accuracy("c", "0" * 40 + "1" * 360)))
    assert (found.verifiers, found.weights) == (("c", "b"), (90.0, 90.0, 82.0))
    assert found.config == EnsembleConfig(weights=(90.0, 90.0, 82.0))
    assert "Weights as the accuracies: b is clearly less accurate than the drafter." in text_of(found)


# ---------------------------------------------------------------------- method


def test_members_that_cut_alike_get_the_default():
    assert recommend(measured(*NEAR)).method == "auto"


@pytest.mark.parametrize(("drafter", "verifier"), [("a", "b"), ("b", "a")])
@pytest.mark.parametrize(("num_shared", "method"), [(750, "auto"), (749, "prefix-mass")])
def test_few_shared_boundaries_get_prefix_mass_either_way(drafter, verifier, num_shared, method):
    found = recommend(shared(measured(*NEAR), drafter, verifier, num_shared))
    assert (found.drafter, found.method) == ("a", method)
    says_so = f"Only 74.9% of {drafter}'s token ends in the text are boundaries of {verifier} too." in found.reasons
    assert says_so == (method == "prefix-mass")


@pytest.mark.parametrize(("alike", "of", "method"), [(90, 100, "auto"), (89, 100, "prefix-mass"), (0, 9, "auto")])
def test_numbers_cut_differently_get_prefix_mass(alike, of, method):
    numbers = Numbers(first="b", second="a", num_numbers=of, num_alike=alike)
    found = recommend(replace(measured(*NEAR), numbers=(numbers,)))
    assert found.method == method
    assert ("a and b cut only 89 of 100 numbers in the text alike (89.0%)." in found.reasons) == (alike == 89)


def test_members_that_are_left_out_do_not_decide_the_method():
    found = recommend(shared(measured(*NEAR, accuracy("far", "0" * 20)), "a", "far", 0))
    assert (found.verifiers, found.method) == (("b",), "auto")


def test_prefix_mass_is_not_recommended_to_members_that_cannot_serve_it():
    found = recommend(replace(shared(measured(*NEAR), "a", "b", 500), without_dense=("b", "other")))
    assert found.method == "unite"
    assert "So prefix mass would suit, but b cannot give it full rows." in found.reasons


# ---------------------------------------------------------------------- warnings


def test_too_few_items_are_said_to_be_too_few():
    found = recommend(measured(*NEAR))
    assert (
        "20 items are too few to tell a from b: the difference is 5 points, its 95 % interval 0.0 to 15 points"
        " (McNemar's p 1.00)." in found.warnings
    )


def test_three_wins_of_three_prove_nothing():
    """The bootstrap's interval has no width here; the exact test knows better."""
    found = recommend(measured(accuracy("a", "111"), accuracy("b", "000")))
    assert found.refused == ("b",)
    assert any(warning.startswith("3 items are too few to tell a from b") for warning in found.warnings)


def test_good_measurements_have_no_warnings():
    found = recommend(measured(accuracy("a", "1" * 40), accuracy("b", "1" * 20 + "0" * 20)))
    assert found.warnings == ()


def test_doubtful_measurements_are_named():
    good = measured(accuracy("a", "1" * 40, cut=4), accuracy("b", "1" * 20 + "0" * 20, cut=5))
    short = tuple(replace(boundaries, num_ends=199, num_shared=199) for boundaries in good.boundaries)
    unspelled = tuple(Unspelled(member=name, num_bytes=n, spans=()) for name, n in (("a", 0), ("b", 1234)))
    found = recommend(replace(good, boundaries=short, unspelled=unspelled, without_template=("b",)))
    assert found.warnings == (
        "5 of 40 answers of b were cut at the limit of tokens, perhaps before the answer: raise max_tokens.",
        "The text has only 199 token ends; shares of fewer than 200 are rough: give more text.",
        "b cannot represent 1,234 of the text's 4,000 bytes and would abstain there.",
        "b has no chat template and reads the items as a transcript: is it meant to answer questions?",
    )


# ---------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_has_the_published_values(right, total, low, high):
    """The last one is the example of Newcombe, Statistics in Medicine 17 (1998), table I."""
    found = wilson_interval(right, total)
    assert (found.value, found.low, found.high) == pytest.approx((right / total, low, high), abs=5e-5)


def test_shares_of_nothing_are_whole():
    numbers = Numbers(first="a", second="b", num_numbers=0, num_alike=0)
    boundaries = Boundaries(drafter="a", verifier="b", num_ends=0, num_shared=0, num_unrepresentable=0)
    assert (numbers.share, boundaries.share) == (1.0, 1.0)

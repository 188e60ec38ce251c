"""From measurements to drafter, verifiers, weights and method, with the reasons in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from safe_llm.config import EnsembleConfig
from safe_llm.evaluation.measurements import Accuracy, Measurements
from safe_llm.evaluation.statistics import Comparison, compare

__all__ = ["Recommendation", "recommend"]

MAX_GAP = 0.10
"""How far below the best a verifier's accuracy may be (UniTE, arXiv 2410.03777: ensembles of nearer members gain)."""
MIN_SHARED_BOUNDARIES = 0.75
"""Below it, either way, the published rules compare pieces of words with words too often."""
MIN_NUMBERS_ALIKE = 0.9
MIN_NUMBERS = 10
"""Numbers in the text below which it says nothing about how they are cut."""
MIN_ENDS = 200
"""Token ends below which a share is known to 7 points at best."""
MAX_CUT = 0.1
"""Part of a member's answers that may be cut before its accuracy is doubtful."""
MAX_P_VALUE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to run.

    Attributes:
        drafter: The member that drafts.
        verifiers: The members that check, the most accurate first; empty where the drafter is better alone.
        refused: The other members.
        weights: One per member, drafter first, on any scale; None is equal.
        method: How distributions are merged.
        reasons: Why, one sentence each.
        warnings: What the measurements cannot tell, one sentence each.
    """

    drafter: str
    verifiers: tuple[str, ...]
    refused: tuple[str, ...]
    weights: tuple[float, ...] | None
    method: Literal["auto", "unite", "prefix-mass"]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def config(self) -> EnsembleConfig:
        """The recommended settings; all others are the defaults."""
        return EnsembleConfig(method=self.method, weights=self.weights)


def recommend(measured: Measurements) -> Recommendation:
    """Apply the rules of docs/choosing_members.md."""
    drafter, *others = sorted(measured.accuracies, key=lambda one: (-one.num_right, -one.tokens_per_s))
    is_near = {one.member: drafter.num_right > 0 and _gap(drafter, one) <= MAX_GAP for one in others}
    verifiers = [one for one in others if is_near[one.member]]
    refused = [one for one in others if not is_near[one.member]]
    comparisons = {one.member: compare(drafter.correct, one.correct) for one in others}
    weights, why_weights = _weights(drafter, verifiers, comparisons)
    method, why_method = _method(measured, drafter, verifiers)
    reasons = [
        _why_drafter(drafter, others),
        *(_why_verifier(measured, drafter, one) for one in verifiers),
        *(_why_refused(drafter, one) for one in refused),
        *([why_weights, *why_method] if verifiers else [f"So {drafter.member} alone."]),
    ]
    return Recommendation(
        drafter=drafter.member,
        verifiers=tuple(one.member for one in verifiers),
        refused=tuple(one.member for one in refused),
        weights=weights,
        method=method,
        reasons=tuple(reasons),
        warnings=tuple(_warnings(measured, drafter, comparisons)),
    )


def _gap(drafter: Accuracy, one: Accuracy) -> float:
    """How far one member's accuracy is below the drafter's; rounded, so that 3 of 10 are 0.1 below 4 of 10."""
    return round(drafter.value - one.value, 9)


# ---------------------------------------------------------------------- reasons


def _score(one: Accuracy) -> str:
    return f"{one.num_right} of {one.num_items} right ({one.value:.1%})"


def _why_drafter(drafter: Accuracy, others: Sequence[Accuracy]) -> str:
    if drafter.num_right == 0:
        speed = f"{drafter.tokens_per_s:.1f} tokens/s"
        return f"{drafter.member} is named only for its speed, {speed}: nobody has an item right."
    equals = [one for one in others if one.num_right == drafter.num_right]
    if not equals:
        return f"{drafter.member} drafts: it is the most accurate, {_score(drafter)}."
    speeds = " to ".join(f"{one.tokens_per_s:.1f}" for one in (drafter, *equals))
    return (
        f"{drafter.member} drafts: {_are([one.member for one in equals])} as accurate, {_score(drafter)}, but"
        f" no faster ({speeds} tokens/s)."
    )


def _why_verifier(measured: Measurements, drafter: Accuracy, one: Accuracy) -> str:
    agreement = measured.agreement_between(drafter.member, one.member)
    return (
        f"{one.member} verifies: {_score(one)}, {_points(_gap(drafter, one))} below the drafter, within"
        f" {_points(MAX_GAP)}. On the drafter's own answers the two would ensemble at"
        f" {agreement.share(agreement.num_ensembled):.1%} of the tokens and choose another one at"
        f" {agreement.share(agreement.num_replaced):.1%}."
    )


def _why_refused(drafter: Accuracy, one: Accuracy) -> str:
    if drafter.num_right == 0:
        return f"{one.member} is left out: {_score(one)}, as is everybody, so nothing speaks for an ensemble."
    return (
        f"{one.member} is left out: {_score(one)}, {_points(_gap(drafter, one))} below the drafter. A verifier that is"
        f" more than about {_points(MAX_GAP)} below makes answers worse rather than better (UniTE, arXiv 2410.03777)."
    )


def _are(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _points(difference: float) -> str:
    return f"{100 * difference:.1f}".removesuffix(".0") + " points"


# ---------------------------------------------------------------------- weights and method


def _is_clear(comparison: Comparison) -> bool:
    """Whether the items tell two members apart.

    On a handful of items the bootstrap's interval is too narrow, so the exact test must say so too.
    """
    is_beside_0 = comparison.difference.low > 0 or comparison.difference.high < 0
    return is_beside_0 and comparison.p_value < MAX_P_VALUE


def _weights(
    drafter: Accuracy, verifiers: Sequence[Accuracy], comparisons: dict[str, Comparison]
) -> tuple[tuple[float, ...] | None, str]:
    behind = [one.member for one in verifiers if _is_clear(comparisons[one.member])]
    if not behind:
        return None, "Equal weights: no verifier is clearly less accurate than the drafter."
    weights = tuple(round(100 * one.value, 1) for one in (drafter, *verifiers))
    return weights, f"Weights as the accuracies: {_are(behind)} clearly less accurate than the drafter."


def _method(
    measured: Measurements, drafter: Accuracy, verifiers: Sequence[Accuracy]
) -> tuple[Literal["auto", "unite", "prefix-mass"], list[str]]:
    causes = [cause for one in verifiers for cause in _cut_differently(measured, drafter.member, one.member)]
    if not causes:
        return "auto", ["The default method: the members cut this text much alike, so it hardly matters which."]
    lacking = [one.member for one in (drafter, *verifiers) if one.member in measured.without_dense]
    if lacking:
        return "unite", [*causes, f"So prefix mass would suit, but {' and '.join(lacking)} cannot give it full rows."]
    return "prefix-mass", [*causes, "So prefix mass: it compares strings, where UniTE compares tokens."]


def _cut_differently(measured: Measurements, drafter: str, verifier: str) -> Iterator[str]:
    for one, other in ((drafter, verifier), (verifier, drafter)):
        share = measured.boundaries_between(one, other).share
        if share < MIN_SHARED_BOUNDARIES:
            yield f"Only {share:.1%} of {one}'s token ends in the text are boundaries of {other} too."
    numbers = measured.numbers_between(drafter, verifier)
    if numbers.num_numbers >= MIN_NUMBERS and numbers.share < MIN_NUMBERS_ALIKE:
        yield (
            f"{drafter} and {verifier} cut only {numbers.num_alike} of {numbers.num_numbers} numbers in the text alike"
            f" ({numbers.share:.1%})."
        )


# ---------------------------------------------------------------------- warnings


def _warnings(measured: Measurements, drafter: Accuracy, comparisons: dict[str, Comparison]) -> Iterator[str]:
    if drafter.num_right == 0:
        yield "No member has an item right: these items say nothing about which is best."
    else:
        yield from (
            _too_few(drafter, name, comparison) for name, comparison in comparisons.items() if not _is_clear(comparison)
        )
    for one in measured.accuracies:
        if one.num_cut > MAX_CUT * one.num_items:
            yield (
                f"{one.num_cut} of {one.num_items} answers of {one.member} were cut at the limit of tokens, perhaps"
                " before the answer: raise max_tokens."
            )
    ends = min(boundaries.num_ends for boundaries in measured.boundaries)
    if ends < MIN_ENDS:
        yield f"The text has only {ends} token ends; shares of fewer than {MIN_ENDS} are rough: give more text."
    for unspelled in measured.unspelled:
        if unspelled.num_bytes:
            yield (
                f"{unspelled.member} cannot represent {unspelled.num_bytes:,} of the text's {measured.num_bytes:,}"
                " bytes and would abstain there."
            )
    for name in measured.without_template:
        yield f"{name} has no chat template and reads the items as a transcript: is it meant to answer questions?"


def _too_few(drafter: Accuracy, name: str, comparison: Comparison) -> str:
    difference = comparison.difference
    return (
        f"{drafter.num_items} items are too few to tell {drafter.member} from {name}: the difference is"
        f" {_points(difference.value)}, its 95 % interval {100 * difference.low:.1f} to {_points(difference.high)}"
        f" (McNemar's p {comparison.p_value:.2f})."
    )

"""How far a draft goes: a fixed number of tokens (the paper), or as far as one more token is likely to pay.

Whatever a rule looks at must be the same however a request is run (alone or in a batch, whatever the machine does),
because where a draft ends can change how a verifier cuts the text there. So a rule sees probabilities and counts, and
never a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["AdaptiveLookahead", "FixedLookahead", "Lookahead", "verify_cost"]

_MOST = 16
"""Longest adaptive draft: where every token survives, longer ones gain little, and a stream would come in lumps."""
_FIRST = 4
"""Longest first draft of an answer: the reader waits for it. It doubles from round to round."""
_PRIOR_RATE = 0.8
_PRIOR_COST = 20.0
_PRIOR_REPLACED = 4.0
"""Priors of the two running estimates, as so many drafter steps and replacements that were seen."""


class Lookahead(Protocol):
    """One row's rule.

    Attributes:
        needs_confidences: Whether it looks at them.
    """

    @property
    def needs_confidences(self) -> bool:
        """Whether it looks at probabilities, which cost a pass over the vocabulary."""
        ...

    def enough(self, num_drafted: int, confidences: Sequence[float]) -> int | None:
        """Return how many tokens of a draft to verify now, or None while it should go on.

        Args:
            num_drafted: Tokens drafted so far.
            confidences: The drafter's probability of each of them, if the rule needs them.
        """
        ...

    def learn(self, confidences: Sequence[float], *, num_decided: int, was_replaced: bool) -> None:
        """Take note of a round.

        Args:
            confidences: The drafter's probability of the tokens that were decided or dropped, if the rule needs them.
            num_decided: How many were decided.
            was_replaced: Whether the last of these was replaced.
        """
        ...


class FixedLookahead:
    """The paper's: so many tokens a round."""

    needs_confidences = False

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def enough(self, num_drafted: int, confidences: Sequence[float]) -> int | None:  # noqa: ARG002 - see Lookahead
        """Return the number once it is reached."""
        return self._num_tokens if num_drafted >= self._num_tokens else None

    def learn(self, confidences: Sequence[float], *, num_decided: int, was_replaced: bool) -> None:
        """Nothing is learned."""


def verify_cost(num_bytes: Sequence[int | None]) -> float:
    """Estimate what a round's verifier passes cost, in drafted tokens.

    Half of a pass over few tokens goes into reading the weights, half into launching what is to be computed, whatever
    the size. Of that 40 % are worth it all the same: a pass over a draft that is accepted whole brings a guess at the
    next token, which mostly spares the drafter a pass. (Both measured on the demo models, on a CPU. The estimate need
    not be good: at the optimum the rate is flat.)

    Args:
        num_bytes: Sizes of the members' weights, the drafter's first; None where one is not known, and all are then
            taken to be equal.
    """
    known = [size for size in num_bytes if size is not None]
    sizes = known if len(known) == len(num_bytes) else [1] * len(num_bytes)
    return 0.6 * sum((1.0 + size / sizes[0]) / 2.0 for size in sizes[1:])


class AdaptiveLookahead:
    """Drafts until the rate of the whole would suffer from one token more.

    A round that drafts n tokens costs n of them and c for the verifiers. The next token is of use only if all
    before it survive. Tokens per cost is greatest where a draft ends as soon as that probability is below the rate
    itself: then the next token would bring less than an average one does (for a constant share e of replaced tokens
    that is n* = sqrt(c^2 + 2c/e) - c).

    A token of probability p is replaced with probability k (1 - p)^1.5; the exponent fits the demo models, k and the
    rate are running estimates over the row.
    """

    needs_confidences = True

    def __init__(self, verify_cost: float) -> None:
        """Begin a row.

        Args:
            verify_cost: Of one round's verifier passes, in drafted tokens (c).
        """
        self._verify_cost = verify_cost
        self._tokens = _PRIOR_RATE * _PRIOR_COST
        self._cost = _PRIOR_COST
        self._replaced = self._expected = _PRIOR_REPLACED
        self._longest = _FIRST

    def enough(self, num_drafted: int, confidences: Sequence[float]) -> int | None:  # noqa: ARG002 - see Lookahead
        """Return where the draft ends, if it has come so far."""
        survival, rate, factor = 1.0, self._tokens / self._cost, self._replaced / self._expected
        for count, confidence in enumerate(confidences, 1):
            survival *= max(0.0, 1.0 - factor * _doubt(confidence))
            if survival < rate or count >= self._longest:
                return count
        return None

    def learn(self, confidences: Sequence[float], *, num_decided: int, was_replaced: bool) -> None:
        """Update the share of replaced tokens and the rate."""
        self._replaced += was_replaced
        self._expected += sum(map(_doubt, confidences[:num_decided]))
        self._tokens += num_decided
        self._cost += len(confidences) + self._verify_cost
        self._longest = min(2 * self._longest, _MOST)


def _doubt(confidence: float) -> float:
    doubt: float = max(0.0, 1.0 - confidence) ** 1.5
    return doubt

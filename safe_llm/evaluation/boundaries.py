"""How often a verifier could be asked about a given text: the engine's boundary check, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safe_llm.alignment import Alignment
from safe_llm.evaluation.tokenization import Reading
from safe_llm.events import Outcome
from safe_llm.verification import boundary_check
from safe_llm.vocabulary import NOT_EXACT, Vocabulary

__all__ = ["Boundaries", "boundaries_of", "boundary_outcomes"]

LOOKAHEAD = 5
"""Tokens per round, the engine's default: what has a boundary may depend on how much text is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """How often a verifier could be asked on texts that a drafter writes.

    Attributes:
        drafter: Whose token ends are counted.
        verifier: Whose boundaries they should be.
        num_ends: Token ends of the drafter.
        num_shared: Those that pass the boundary check.
        num_unrepresentable: Those that fail it because the verifier cannot spell the text there.
    """

    drafter: str
    verifier: str
    num_ends: int
    num_shared: int
    num_unrepresentable: int

    @property
    def share(self) -> float:
        """Shared ends over all; 1 without any."""
        return self.num_shared / self.num_ends if self.num_ends else 1.0


def boundaries_of(drafter: Reading, verifier: Reading, texts: Sequence[bytes]) -> Boundaries:
    """Count the drafter's token ends in the texts, and those where the verifier could be asked."""
    outcomes = [
        outcome for data in texts for outcome in boundary_outcomes(drafter.vocabulary, verifier.vocabulary, data)
    ]
    return Boundaries(
        drafter=drafter.name,
        verifier=verifier.name,
        num_ends=len(outcomes),
        num_shared=outcomes.count(None),
        num_unrepresentable=outcomes.count(Outcome.UNREPRESENTABLE),
    )


def boundary_outcomes(drafter: Vocabulary, verifier: Vocabulary, data: bytes) -> list[Outcome | None]:
    """Let the engine check a text as if the drafter wrote it round by round, and everything were kept.

    Returns:
        For every token end that the drafter has in `data`, in order: None where what comes next is a candidate, else
        why it is none.
    """
    starts = list(dict.fromkeys([0, *(end for end in drafter.encode(data).ends if end != NOT_EXACT)]))
    stops = [*starts[1:], len(data)]
    keys = [data[start:stop] for start, stop in zip(starts, stops, strict=True)]  # the last is END, which is empty
    alignment = Alignment(verifier)
    outcomes: list[Outcome | None] = []
    unchanged = 0
    for i in range(0, len(starts), LOOKAHEAD):
        drafted = slice(i, i + LOOKAHEAD)
        alignment.update(data[: stops[drafted][-1]], unchanged)
        outcomes += [boundary_check([alignment], *it) for it in zip(starts[drafted], keys[drafted], strict=True)]
        unchanged = starts[i]
    return outcomes[1:]  # at byte 0 there is no end

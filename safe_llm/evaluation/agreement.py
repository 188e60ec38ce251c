"""How often two members agree on the drafter's own answers: the engine's checks, with a merge that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.events import Outcome, Result
from safe_llm.member import Member
from safe_llm.methods import Merged, Method, Point, make_method

__all__ = ["Agreement", "Watching", "agreement_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """A method that only looks: it finds consensus and merges as `method` does, and keeps the drafted token.

    So the answer is the drafter's own greedy one, and the first of a point's candidates is what the ensemble wanted.
    """

    method: Method

    @property
    def needs_dense(self) -> bool:
        """As the method that it watches."""
        return self.method.needs_dense

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        """Find consensus as the watched method does."""
        return self.method.consensus(point, threshold)

    def keeps_drafter(self, point: Point) -> bool:
        """Keep the drafter's token where the watched method does."""
        return self.method.keeps_drafter(point)

    def waits(self, point: Point) -> bool:
        """Wait where the watched method does."""
        return self.method.waits(point)

    def merge(self, point: Point) -> Merged:
        """Merge, put the winner first among the candidates, and choose the drafted token."""
        merged = self.method.merge(point)
        candidates = sorted(merged.candidates, key=lambda candidate: candidate.token != merged.chosen)
        return Merged(chosen=point.drafted, candidates=tuple(candidates))

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """Sample as the watched method does: there, nothing is kept."""
        return self.method.distribution(point, temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the checks say about a verifier on the drafter's own greedy answers. Counts of the drafter's tokens.

    Attributes:
        drafter: Whose answers they are.
        verifier: Who is asked.
        num_answers: Answers.
        num_tokens: Their tokens, ENDs included.
        num_c1: Kept because the verifier's own token is its argmax.
        num_c2: Kept because the mean probability is over 1/2, though it is not.
        num_ensembled: Where the ensemble would act.
        num_replaced: Where it would choose another token, too.
        num_unchecked: Where the verifier has no token boundary or cannot represent the text.
    """

    drafter: str
    verifier: str
    num_answers: int
    num_tokens: int
    num_c1: int
    num_c2: int
    num_ensembled: int
    num_replaced: int
    num_unchecked: int

    def share(self, count: int) -> float:
        """Return a count as a part of all tokens; 0 without any."""
        return count / self.num_tokens if self.num_tokens else 0.0


def agreement_of(
    drafter: Member,
    verifier: Member,
    answers: Callable[[Ensemble], Iterable[Result]],
) -> Agreement:
    """Count what the paper's checks and UniTE, with equal weights, make of the drafter's own greedy answers.

    Args:
        drafter: Who answers.
        verifier: Who is asked.
        answers: Gets answers from the ensemble that it is given.
    """
    config = EnsembleConfig()
    with Ensemble([drafter, verifier], config, method=Watching(method=make_method(config))) as ensemble:
        results = list(answers(ensemble))
    outcomes: Counter[str] = Counter()
    for result in results:
        outcomes.update(result.counters.outcomes)
    points = [point for result in results for point in result.points]
    return Agreement(
        drafter=drafter.name,
        verifier=verifier.name,
        num_answers=len(results),
        num_tokens=outcomes.total(),
        num_c1=outcomes[Outcome.C1],
        num_c2=outcomes[Outcome.C2],
        num_ensembled=outcomes[Outcome.CONFIRMED] + outcomes[Outcome.REPLACED],
        num_replaced=sum(point.candidates[0].token != point.drafted for point in points),
        num_unchecked=outcomes[Outcome.OOV_LIKE] + outcomes[Outcome.UNREPRESENTABLE],
    )

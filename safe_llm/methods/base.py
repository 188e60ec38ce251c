"""What a method sees of a position, and what it must answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from safe_llm.backends.base import FloatArray, Scores
from safe_llm.events import Candidate, Outcome
from safe_llm.vocabulary import Vocabulary

__all__ = ["END", "MemberView", "Merged", "Method", "Point", "best", "paper_consensus"]

END = b""
"""The key of END among candidates; no token has empty bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One member at one position: its next-token distribution there.

    Attributes:
        name: The member.
        vocabulary: Its vocabulary.
        scores: Scores that hold the position.
        position: The position's index in `scores`.
        weight: The member's weight; they sum to 1.
        own: The member's own token that starts here in its tokenization of the draft; for the drafter the drafted
            token. None where nothing is drafted (mode `every-token`).
        own_is_best: Whether `own` is the member's argmax.
        following: The member's own tokens of the draft from here on; for the drafter the drafted ones.
        path: Where each of `following` is scored (scores and position), and after them what comes next, if known.
        after: Scores (one position) had the given ids followed here, at the cost of a forward pass; None where that
            cannot be asked.
        memo: Scratch space for a method, shared by all views of this member in one round.
    """

    name: str
    vocabulary: Vocabulary
    scores: Scores
    position: int
    weight: float
    own: int | None = None
    own_is_best: bool = False
    following: Sequence[int] = ()
    path: Sequence[tuple[Scores, int]] = ()
    after: Callable[[Sequence[int]], Scores] | None = None
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def own_probability(self) -> float:
        """P(own) under the member's full softmax; 0 without an own token. The first call costs a vocabulary pass."""
        if self.own is None:
            return 0.0
        key = ("own", id(self.scores), self.position)
        if key not in self.memo:
            self.memo[key] = float(np.exp(self.scores.log_probs([self.position], [self.own])[0]))
        probability: float = self.memo[key]
        return probability

    def key(self, token_id: int) -> bytes:
        """The candidate key of a token of this member: its bytes, or END."""
        return self.vocabulary.surface(token_id)

    def id_of(self, key: bytes) -> int | None:
        """This member's single token for a key, or None."""
        return self.vocabulary.symbols.end_id if key == END else self.vocabulary.ids.get(key)

    def top(self, k: int) -> tuple[list[bytes], list[int], list[float]]:
        """Keys, ids and logits of the k best tokens that can be chosen, best first; a repeated key only once."""
        ids, logits = self.scores.top_k([self.position], k)
        found: dict[bytes, tuple[int, float]] = {}
        for token_id, logit in zip(ids[0].tolist(), logits[0].tolist(), strict=True):
            if logit > -np.inf:
                found.setdefault(self.key(token_id), (token_id, logit))
        return list(found), [i for i, _ in found.values()], [x for _, x in found.values()]

    def best_tokens(self, k: int) -> tuple[tuple[bytes, float], ...]:
        """Keys and probabilities (full softmax) of the k best tokens, best first. For reports, not for decisions."""
        keys, ids, _ = self.top(k)
        log_probs = self.scores.log_probs([self.position] * len(ids), ids)
        return tuple(zip(keys, np.exp(log_probs).tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A candidate position.

    Attributes:
        views: The members, the drafter first.
        drafted: Key of the drafted token.
        rest: Drafted text behind it, up to the next token boundary of all members; empty where its own end is one.
        is_open: That boundary is the draft's end, where more text may change how the verifiers cut it.
    """

    views: tuple[MemberView, ...]
    drafted: bytes
    rest: bytes = b""
    is_open: bool = False

    @property
    def span(self) -> bytes:
        """Drafted text from this boundary of all members to the next one; empty for END."""
        return self.drafted + self.rest

    @property
    def drafter(self) -> MemberView:
        """The drafter's view."""
        return self.views[0]

    @property
    def verifiers(self) -> tuple[MemberView, ...]:
        """The verifiers' views."""
        return self.views[1:]

    def spellable(self, key: bytes) -> bool:
        """Whether the drafter can commit this key."""
        if key == END:
            return self.drafter.vocabulary.symbols.end_id is not None
        return bool(self.drafter.vocabulary.ids_of(key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What an ensemble operation decided.

    Attributes:
        chosen: Key of the winner.
        candidates: The best of the union, best first, at most five.
        drafted: The drafted text that `chosen` competed with; None where that is the drafted token.
    """

    chosen: bytes
    candidates: tuple[Candidate, ...]
    drafted: bytes | None = None


class Method(Protocol):
    """An ensemble method: its consensus rule and its choice.

    Attributes:
        needs_dense: Whether members must give full rows of scores.
    """

    @property
    def needs_dense(self) -> bool:
        """Whether members must give full rows of scores."""
        ...

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        """Return why the drafted token is accepted without an ensemble (C1, C2, GATE), or None. Greedy decoding."""
        ...

    def keeps_drafter(self, point: Point) -> bool:
        """Whether the method's own gate keeps the drafter's token, also at every token (GaC)."""
        ...

    def waits(self, point: Point) -> bool:
        """Whether to leave an open point to the next round, when more is drafted. Greedy decoding."""
        ...

    def merge(self, point: Point) -> Merged:
        """Merge the distributions and choose greedily, sharpening included."""
        ...

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """Return the ensembled distribution at a temperature, summing to 1, for sampling. No sharpening."""
        ...


def paper_consensus(point: Point, threshold: float) -> Outcome | None:
    """The paper's C1 (every verifier's own token is its argmax) and C2 (weighted mean probability over threshold)."""
    if all(view.own_is_best for view in point.verifiers):
        return Outcome.C1
    if sum(view.weight * view.own_probability for view in point.views) > threshold:
        return Outcome.C2
    return None


def best(point: Point, keys: Sequence[bytes], scores: FloatArray, members: FloatArray) -> Merged:
    """Return the winner and the runners-up.

    Args:
        point: The position.
        keys: Candidates [U].
        scores: Their scores [U].
        members: Each member's probability [M, U].
    """

    def tie(index: int) -> tuple[float, int]:
        token_id = point.drafter.id_of(keys[index])
        return -float(scores[index]), len(point.drafter.vocabulary.tokens) if token_id is None else token_id

    order = [i for i in sorted(range(len(keys)), key=tie) if scores[i] > -np.inf]
    chosen = next(i for i in order if point.spellable(keys[i]))
    names = [view.name for view in point.views]
    candidates = tuple(
        Candidate(
            token=keys[i],
            probability=float(scores[i]),
            probabilities=dict(zip(names, members[:, i].tolist(), strict=True)),
        )
        for i in order[:5]
    )
    return Merged(chosen=keys[chosen], candidates=candidates)

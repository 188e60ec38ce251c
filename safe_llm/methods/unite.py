"""UniTE (arXiv 2410.03777): the union of every member's top-k tokens, each member's softmax over that union only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from safe_llm.backends.base import FloatArray
from safe_llm.events import Outcome
from safe_llm.methods.base import END, MemberView, Merged, Point, best, paper_consensus
from safe_llm.methods.sharpening import Sharpening, sharpen
from safe_llm.sampling import softmax

__all__ = ["UniTE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniTE:
    """The paper's default method.

    Attributes:
        top_k: Tokens that each member puts into the union.
        sharpening: What to do where no candidate reaches 1/2.
        sharpening_threshold: lambda of prefix sharpening.
    """

    top_k: int = 10
    sharpening: Sharpening = "prefix"
    sharpening_threshold: float = 0.1

    @property
    def needs_dense(self) -> bool:
        """Top-k and a few chosen logits are enough."""
        return False

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        """The paper's C1 and C2."""
        return paper_consensus(point, threshold)

    def keeps_drafter(self, point: Point) -> bool:  # noqa: ARG002 - UniTE has no gate
        """UniTE has no gate."""
        return False

    def waits(self, point: Point) -> bool:  # noqa: ARG002 - tokens are compared, not what they are pieces of
        """Nothing is left for later."""
        return False

    def merge(self, point: Point) -> Merged:
        """Mean of the members' softmaxes over the union, sharpened, argmax."""
        keys, logits, drafter_top = self._union(point)
        members = softmax(logits)
        weights = np.array([view.weight for view in point.views])
        ensembled = weights @ members
        scores = sharpen(
            self.sharpening,
            keys=keys,
            ensembled=ensembled,
            members=members,
            weights=weights,
            drafter_top=drafter_top,
            threshold=self.sharpening_threshold,
        )
        return best(point, keys, scores, members)

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """Mean of the members' tempered softmaxes over the union."""
        keys, logits, _ = self._union(point)
        weights = np.array([view.weight for view in point.views])
        return dict(zip(keys, (weights @ softmax(logits, temperature)).tolist(), strict=True))

    def _union(self, point: Point) -> tuple[list[bytes], FloatArray, frozenset[bytes]]:
        """Return the union's keys [U], each member's logits over it [M, U], and the drafter's own keys."""
        tops = [view.top(self.top_k) for view in point.views]
        keys = list(dict.fromkeys(key for top, _, _ in tops for key in top))
        rows = [_logits_over(view, keys, top) for view, top in zip(point.views, tops, strict=True)]
        return keys, np.stack(rows), frozenset(tops[0][0])


def _logits_over(
    view: MemberView, keys: Sequence[bytes], top: tuple[list[bytes], list[int], list[float]]
) -> FloatArray:
    """One member's logits over the union [U]; -inf for a key that it cannot spell.

    A key that the member has no token for gets the first token of the member's own encoding of it. If that token
    already stands for another key, its mass counts there and not twice.
    """
    known = dict(zip(top[0], top[2], strict=True))
    missing = [key for key in keys if key not in known]
    taken = set(top[1])
    asked: dict[bytes, int] = {}
    for key in missing:
        if (token_id := view.id_of(key)) is not None:
            asked[key] = token_id
            taken.add(token_id)
    for key in missing:
        if key not in asked and key != END:
            first = _first_token(view, key)
            if first is not None and first not in taken:
                asked[key] = first
                taken.add(first)
    if asked:
        logits = view.scores.logits([view.position] * len(asked), list(asked.values()))
        known |= dict(zip(asked, logits.tolist(), strict=True))
    return np.array([known.get(key, -np.inf) for key in keys], dtype=np.float64)


def _first_token(view: MemberView, key: bytes) -> int | None:
    """First token of the member's encoding of `key`, skipping a bare space."""
    ids = view.vocabulary.ids_of(key)
    if len(ids) > 1 and view.vocabulary.surface(ids[0]) == b" ":
        return ids[1]
    return ids[0] if ids else None

"""GaC (arXiv 2406.12585): full softmaxes scattered into the union of all vocabularies, averaged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from safe_llm.events import Outcome
from safe_llm.methods.base import END, Merged, Point, best, paper_consensus
from safe_llm.methods.sharpening import Sharpening, sharpen
from safe_llm.vocabulary import Vocabulary

__all__ = ["GaC"]

SHORTLIST = 64
"""Candidates that sharpening looks at: the best of the mean. No other can hold more than 1/64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaC:
    """The union of all vocabularies, with GaC's own gate: the drafter is kept where it has at least 1/2.

    Attributes:
        top_k: How many of the drafter's tokens may be a prefix in prefix sharpening.
        sharpening: What to do where no candidate reaches 1/2.
        sharpening_threshold: lambda of prefix sharpening.
    """

    top_k: int = 10
    sharpening: Sharpening = "prefix"
    sharpening_threshold: float = 0.1

    @property
    def needs_dense(self) -> bool:
        """Every member's full row is averaged."""
        return True

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        """The paper's C1 and C2, and the gate."""
        return paper_consensus(point, threshold) or (Outcome.GATE if self.keeps_drafter(point) else None)

    def keeps_drafter(self, point: Point) -> bool:
        """GaC's gate: no ensemble where the drafter gives its token 1/2 or more."""
        return point.drafter.own_probability >= 0.5

    def waits(self, point: Point) -> bool:  # noqa: ARG002 - tokens are compared, not what they are pieces of
        """Nothing is left for later."""
        return False

    def merge(self, point: Point) -> Merged:
        """Mean of the scattered softmaxes, sharpened, argmax."""
        keys, members = self._scattered(point, 1.0)
        weights = np.array([view.weight for view in point.views])
        mean = torch.as_tensor(weights, dtype=members.dtype, device=members.device) @ members
        shortlist = torch.sort(mean, descending=True, stable=True).indices[:SHORTLIST]
        names = [keys[i] for i in shortlist.tolist()]
        ensembled = mean[shortlist].cpu().numpy().astype(np.float64)
        rows = members[:, shortlist].cpu().numpy().astype(np.float64)
        scores = sharpen(
            self.sharpening,
            keys=names,
            ensembled=ensembled,
            members=rows,
            weights=weights,
            drafter_top=frozenset(point.drafter.top(self.top_k)[0]) if self.sharpening == "prefix" else frozenset(),
            threshold=self.sharpening_threshold,
        )
        return best(point, names, scores, rows)

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """Mean of the tempered, scattered softmaxes over all keys that have mass."""
        keys, members = self._scattered(point, temperature)
        weights = torch.tensor([view.weight for view in point.views], dtype=members.dtype, device=members.device)
        mean = weights @ members
        held = torch.nonzero(mean > 0).flatten().tolist()
        return dict(zip([keys[i] for i in held], mean[held].tolist(), strict=True))

    @staticmethod
    def _scattered(point: Point, temperature: float) -> tuple[list[bytes], torch.Tensor]:
        """Return the union's keys [U] and every member's softmax over it [M, U], float32 on the drafter's device."""
        keys, maps = _union_of(tuple(view.vocabulary for view in point.views))
        rows = []
        home: torch.device | None = None
        for view, columns in zip(point.views, maps, strict=True):
            logits = view.scores.dense([view.position])[0]
            home = home or logits.device
            probs = torch.softmax((logits - logits.max()) / temperature, dim=-1)
            row = torch.zeros(len(keys) + 1, dtype=torch.float32, device=logits.device)
            rows.append(row.index_add_(0, columns.to(logits.device), probs)[:-1].to(home))
        return keys, torch.stack(rows)


@functools.lru_cache(maxsize=4)
def _union_of(vocabularies: tuple[Vocabulary, ...]) -> tuple[list[bytes], tuple[torch.Tensor, ...]]:
    """The union's keys, drafter's first in id order, and each member's map from column to key (U: nowhere)."""
    index: dict[bytes, int] = {}
    maps = []
    for vocabulary in vocabularies:
        columns = np.full(vocabulary.width, -1, dtype=np.int64)
        end = vocabulary.symbols.end_id
        for i, token in enumerate(vocabulary.tokens):
            if token is not None:
                columns[i] = index.setdefault(token, len(index))
            elif i == end:
                columns[i] = index.setdefault(END, len(index))
        maps.append(columns)
    for columns in maps:
        columns[columns < 0] = len(index)
    return list(index), tuple(torch.from_numpy(columns) for columns in maps)

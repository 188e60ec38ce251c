"""Does a backend's cache agree with the model without one? Asked of every local model when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from safe_llm.backends.base import Backend, Feed, Symbols
from safe_llm.backends.dense import DenseScores
from safe_llm.errors import MemberError, UnsupportedModelError

__all__ = ["CheckedBackend", "check_cache"]


class CheckedBackend(Backend, Protocol):
    """A backend with all logits at hand."""

    def forward(self, feeds: Sequence[Feed]) -> DenseScores:
        """As `Backend.forward`."""
        ...

    def scores(self, logits: torch.Tensor) -> DenseScores:
        """Wrap raw logits [N, W] of this model, which are taken over."""
        ...


# Its last passes are of at most 16 ids, so that passes of fixed shapes are checked where they are in use.
_LENGTH = 20
# Which quantile of a row's deviations must be below what, in standard deviations of the logits. In half precision a
# single position may be far off by rounding alone (0.5 was seen in a correct model, at a median of 0.1), while a wrong
# position or mask moves all that follow it (medians from 0.5 to 3).
_FULL_PRECISION = (1.0, 1e-3)
_HALF_PRECISION = (0.5, 0.25)


def check_cache(
    backend: CheckedBackend,
    uncached: Callable[[list[int]], DenseScores],
    *,
    symbols: Symbols,
    num_ids: int,
    kind: str,
    is_half_precision: bool,
) -> None:
    """Append to, roll back and append to two ragged rows, and compare their logits with uncached passes.

    Costs three cached and two uncached passes over at most 20 random ids.

    Args:
        backend: New, without rows.
        uncached: Returns the scores after each id of a text, computed in one pass without what is checked.
        symbols: What the backend was made with.
        num_ids: Ids below it can be fed.
        kind: What the model calls its type, for errors.
        is_half_precision: Something between ids and logits has 16 bits or fewer.

    Raises:
        UnsupportedModelError: They differ by more than rounding, or the model does not take the cache or the masks.
    """
    ids = _random_ids(symbols, num_ids)
    texts = [
        ids[: min(_LENGTH, backend.max_context)],
        ids[_LENGTH:][: max(1, min(_LENGTH, backend.max_context) // 2)],
    ]
    try:
        cached = _cached(backend, texts)
    except MemberError as error:
        raise UnsupportedModelError(
            f"model {backend.name!r} (type {kind!r}) cannot run on the cache: {error.__cause__ or error}"
        ) from error
    plain = [uncached(text) for text in texts]
    quantile, tolerance = _HALF_PRECISION if is_half_precision else _FULL_PRECISION
    deviations = [_deviations(scores, whole) for scores, whole in zip(cached, plain, strict=True)]
    deviation = max(float(row.quantile(quantile)) for row in deviations)
    if not deviation <= tolerance:
        raise UnsupportedModelError(
            f"model {backend.name!r} (type {kind!r}) failed the self-check: cached and uncached "
            f"logits differ by {deviation:.2g} of their spread, rounding explains up to {tolerance:.2g}",
            hint="it may not honour explicit positions or masks; self_check=False takes it as it is",
        )


def _cached(backend: CheckedBackend, texts: list[list[int]]) -> list[DenseScores]:
    """Return each text's last scores after a detour: half of it, a wrong end, back to a quarter, and on."""
    rows = [backend.open() for _ in texts]
    halves, quarters = [len(text) // 2 for text in texts], [len(text) // 4 for text in texts]
    starts = [Feed(row=row, ids=text[:half]) for row, text, half in zip(rows, texts, halves, strict=True) if half]
    if starts:
        backend.forward(starts)
    backend.forward([Feed(row=row, ids=text[:1]) for row, text in zip(rows, texts, strict=True)])
    for row, quarter in zip(rows, quarters, strict=True):
        backend.rollback(row, quarter)
    ends = [text[quarter:] for text, quarter in zip(texts, quarters, strict=True)]
    scores = backend.forward([Feed(row=row, ids=end, keep=len(end)) for row, end in zip(rows, ends, strict=True)])
    for row in rows:
        backend.close(row)
    kept = torch.split(scores.dense(range(len(scores))), [len(end) for end in ends])
    return [backend.scores(part) for part in kept]


def _random_ids(symbols: Symbols, num_ids: int) -> list[int]:
    """Return ids that occur in texts, the same each time."""
    usable = np.flatnonzero(symbols.usable[:num_ids])
    return [int(token) for token in np.random.default_rng(0).choice(usable, size=2 * _LENGTH)]


def _deviations(scores: DenseScores, reference: DenseScores) -> torch.Tensor:
    """Return each position's root mean square difference [N], in standard deviations of the reference's last N."""
    found = scores.dense(range(len(scores)))
    wanted = reference.dense(range(len(reference) - len(scores), len(reference)))
    usable = torch.isfinite(wanted[0])
    found, wanted = found[:, usable], wanted[:, usable]
    difference = (found - wanted).square().mean(dim=1).sqrt()
    return difference / wanted.std(dim=1).clamp_min(1e-6)

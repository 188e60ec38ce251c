"""Sharpening: what to do where no candidate of the ensembled distribution reaches 1/2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np

from safe_llm.backends.base import FloatArray

__all__ = ["Sharpening", "sharpen"]

Sharpening = Literal["prefix", "geometric", "none"]


def sharpen(
    kind: Sharpening,
    *,
    keys: Sequence[bytes],
    ensembled: FloatArray,
    members: FloatArray,
    weights: FloatArray,
    drafter_top: Collection[bytes],
    threshold: float,
) -> FloatArray:
    """Return the scores to take the argmax of.

    `prefix` (the paper's heuristic): mass of longer candidates moves to their prefix, for prefixes above `threshold`
    that are among the drafter's own top k and not a bare space. `geometric`: the weighted geometric mean instead of
    the arithmetic one. Where some candidate already has 1/2, nothing changes.

    Args:
        kind: Which sharpening.
        keys: Candidates [U].
        ensembled: Their mean probability [U].
        members: Each member's probability [M, U].
        weights: Members' weights [M], summing to 1.
        drafter_top: The drafter's own top-k keys.
        threshold: lambda.
    """
    if kind == "none" or ensembled.max() >= 0.5:
        return ensembled
    if kind == "geometric":
        with np.errstate(divide="ignore"):
            geometric: FloatArray = np.exp(weights @ np.log(members))
        return geometric
    sharpened = ensembled.copy()
    for i, key in enumerate(keys):
        if ensembled[i] > threshold and key in drafter_top and key not in (b"", b" "):
            sharpened[i] += sum(ensembled[k] for k, other in enumerate(keys) if k != i and other.startswith(key))
    return sharpened

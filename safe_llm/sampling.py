"""Logits to probabilities and draws; pure functions. Everything is float64, ties go to the lowest index."""

from __future__ import annotations

import numpy as np
import torch

from safe_llm.backends.base import FloatArray

__all__ = ["draw", "nucleus", "residual", "sampling_probs", "softmax"]


def softmax(logits: FloatArray, temperature: float = 1.0) -> FloatArray:
    """Return the softmax of `logits` [..., N] over the last axis; -inf gets 0.

    The maximum is subtracted before dividing, so that no temperature overflows.
    """
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    weights = np.exp(shifted)
    probs: FloatArray = weights / weights.sum(axis=-1, keepdims=True)
    return probs


def nucleus(probs: FloatArray, top_p: float) -> FloatArray:
    """Keep the smallest set of most probable entries [N] whose mass reaches `top_p`, renormalized."""
    if top_p >= 1.0:
        return probs
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.zeros_like(probs)
    chosen = order[before < top_p]
    kept[chosen] = probs[chosen]
    normalized: FloatArray = kept / kept.sum()
    return normalized


def sampling_probs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return the distribution that is sampled from: temperature, then nucleus.

    Args:
        logits: One position's full logits [W], float32.
        temperature: Above 0.
        top_p: In (0, 1].

    Returns:
        Probabilities [W], float64, on the logits' device.
    """
    shifted = (logits.double() - logits.max()) / temperature
    probs = torch.softmax(shifted, dim=-1)
    if top_p >= 1.0:
        return probs
    ordered, order = torch.sort(probs, descending=True, stable=True)
    kept = torch.where(ordered.cumsum(0) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(probs).scatter_(0, order, kept / kept.sum())


def draw(probs: FloatArray | torch.Tensor, uniform: float) -> int:
    """Return the index [N] at which the cumulative distribution passes `uniform` in [0, 1)."""
    if isinstance(probs, torch.Tensor):
        cumulative = probs.cumsum(0)
        target = torch.tensor(uniform, dtype=cumulative.dtype, device=cumulative.device) * cumulative[-1]
        return int(torch.searchsorted(cumulative, target, right=True).clamp(max=len(probs) - 1))
    total = np.cumsum(probs)
    return min(int(np.searchsorted(total, uniform * total[-1], side="right")), len(probs) - 1)


def residual(target: FloatArray, proposal: FloatArray) -> FloatArray:
    """Return norm(max(0, target - proposal)), what a rejected proposal is replaced from (speculative sampling)."""
    rest = np.maximum(target - proposal, 0.0)
    total = rest.sum()
    # equal up to rounding: nothing is left to draw from, and then the target itself is right
    out: FloatArray = rest / total if total > 0.0 else target / target.sum()
    return out

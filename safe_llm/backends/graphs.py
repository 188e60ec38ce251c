"""Passes of fixed shapes, captured once as CUDA graphs and replayed: one launch instead of a thousand.

A step of a 7B model on a fast GPU is a few milliseconds of work behind some twenty of Python and kernel launches. A
graph needs fixed shapes, so new tokens are padded to 1, 4, 8 or 16 and the cache is read up to the next power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from safe_llm.backends.slots import SlotCache, SlotPass

__all__ = ["MOST_TOKENS", "CudaCapture", "GraphedPasses", "bucket_of", "kv_bucket_of"]

MOST_TOKENS = 16
_BUCKETS = (1, 4, 8, MOST_TOKENS)
_MIN_KV = 256

Compute = Callable[[SlotPass, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a pass, ids [B, T] and the positions [B, T] they see to logits [B, T, W]."""


def bucket_of(num_tokens: int) -> int:
    """Return how many tokens a row's feed of 1 to 16 is padded to."""
    return next(bucket for bucket in _BUCKETS if bucket >= num_tokens)


def kv_bucket_of(kv_stop: int, most: int) -> int:
    """Return up to which position a pass reads the cache, at most `most`."""
    return min(max(_MIN_KV, 1 << (kv_stop - 1).bit_length()), most)


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""From a computation to a function that repeats it, and the tensor that each repetition writes its result to."""


@dataclass(frozen=True, slots=True)
class _Captured:
    table: torch.Tensor
    replay: Callable[[], object]
    logits: torch.Tensor


class GraphedPasses:
    """One model's graphs, by shape. They belong to the cache's tensors, and go when these are exchanged."""

    def __init__(self, cache: SlotCache, capture: Capture) -> None:
        self._cache = cache
        self._capture = capture
        self._captured: dict[tuple[int, int, int, int], _Captured] = {}
        self._generation = cache.generation

    @property
    def num_captured(self) -> int:
        """How many shapes there are graphs of."""
        return len(self._captured)

    def run(self, now: SlotPass, table: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Return logits [B, T, W] of a pass, by replaying its graph; the first pass of a shape captures it.

        Args:
            now: The pass, which the cache has made room for.
            table: Ids, positions seen, positions written [3, B, T].
            compute: What to capture.
        """
        if self._generation != self._cache.generation:
            self._captured.clear()
            self._generation = self._cache.generation
        key = (now.first, now.stop, table.shape[2], now.kv_stop)
        if key not in self._captured:
            self._captured[key] = self._record(now, table.clone(), compute)
        found = self._captured[key]
        found.table.copy_(table)
        found.replay()
        return found.logits.clone()  # the next replay writes there again

    def _record(self, now: SlotPass, table: torch.Tensor, compute: Compute) -> _Captured:
        def once() -> torch.Tensor:
            # a new pass each time, since a pass keeps the indices that it computes
            self._cache.current = SlotPass(
                first=now.first, stop=now.stop, start=now.start, kv_stop=now.kv_stop, write=table[2]
            )
            return compute(self._cache.current, table[0], table[1])

        return _Captured(table, *self._capture(once))


class CudaCapture:
    """Captures on one GPU; all graphs of a model share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's type of it is private

    def __call__(self, once: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        """See `Capture`. Runs `once` twice before, on a stream of its own: libraries allocate on first use."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            once()
            once()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = once()
        self._pool = self._pool or graph.pool()
        return graph.replay, logits

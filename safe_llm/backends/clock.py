"""How long forward passes take, without waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PassClock"]


class PassClock:
    """Adds up the time of passes: wall clock on a CPU, device events on a GPU, which need no synchronisation."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[None]:
        """Add the time of what happens inside, kernels that it started included."""
        if device.type != "cuda":
            started = time.perf_counter()
            yield
            self._total_s += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(device))
        yield
        end.record(torch.cuda.current_stream(device))
        self._pending.append((begin, end))
        while len(self._pending) > 1 and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            self._add(*self._pending.popleft())

    def seconds(self) -> float:
        """Return the sum, after waiting for what still runs."""
        while self._pending:
            self._add(*self._pending.popleft())
        return self._total_s

    def _add(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        end.synchronize()
        self._total_s += begin.elapsed_time(end) / 1000

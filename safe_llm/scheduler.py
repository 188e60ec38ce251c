"""Many callers on one engine, without a thread of its own.

Whoever waits for an answer runs the next round, for all requests that are under way. So requests of many threads decode
in one batch, one request alone costs nothing extra, and a caller that goes away simply stops driving.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Sequence

from safe_llm.engine import Engine
from safe_llm.errors import Cancelled, GenerationError, GenerationTimeoutError, SafeLLMError
from safe_llm.events import Event
from safe_llm.row import Row
from safe_llm.types import GenerationRequest

__all__ = ["Scheduler"]


class Scheduler:
    """Lets rows into the engine's batch, drives it, and sees that they leave it, however they end.

    Attributes:
        is_closed: New requests are refused.
    """

    def __init__(self, engine: Engine, max_batch_size: int) -> None:
        self.is_closed = False
        self._engine = engine
        self._max_batch_size = max_batch_size
        self._lock = _FairLock()
        self._active: list[Row] = []
        self._waiting: deque[Row] = deque()

    @property
    def num_requests(self) -> int:
        """Requests that are under way or wait."""
        return len(self._active) + len(self._waiting)

    @property
    def occupancy(self) -> tuple[int, int]:
        """Requests that are under way, and requests that wait."""
        return len(self._active), len(self._waiting)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        cancel: threading.Event | None,
        *,
        detailed: bool = False,
        timeout: float | None = None,
    ) -> Generator[Event | Row, None, None]:
        """Yield the requests' events; a row that fails is yielded itself. Leaving early frees everything.

        Args:
            requests: What to decode.
            cancel: Stops within a round once it is set.
            detailed: Fill in the probabilities and best tokens of every decision, needed or not.
            timeout: Seconds from now after which they are given up, within a round.
        """
        now = time.perf_counter()
        rows = [Row(request=r, index=i, submitted_s=now, detailed=detailed) for i, r in enumerate(requests)]
        self._waiting.extend(rows)  # without the lock: it is held for a whole round, and the next one should have them
        running = list(rows)
        try:
            while running:
                if cancel is not None and cancel.is_set():
                    raise Cancelled("the request was cancelled")
                if timeout is not None and time.perf_counter() - now > timeout:
                    raise GenerationTimeoutError(f"no answer within {timeout} s", hint="raise `timeout`")
                self._drive(running)
                for row in running:
                    while row.events:
                        yield row.events.popleft()
                    if row.error is not None:
                        yield row
                running = [row for row in running if not row.is_done or row.events]
        finally:
            self._drop(rows)

    def _drive(self, mine: Sequence[Row]) -> None:
        """Run the next round of all requests, unless somebody else's round already has news for these."""
        with self._lock:
            if any(row.events or row.is_done for row in mine):
                return
            self._admit()
            try:
                if self._active:
                    self._engine.round(self._active)
            except Exception as error:
                self._fail(error)
            except BaseException:
                # an interrupt may hit between two rows' commits; no row may go on with a part of a round
                self._fail(GenerationError("the round was interrupted"))
                self._retire()
                raise
            self._retire()

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_batch_size:
            row = self._waiting.popleft()
            try:
                self._engine.join(row)
            except Exception as error:
                row.error = _owned(error)
            except BaseException:
                self._waiting.appendleft(row)
                raise
            else:
                self._active.append(row)

    def _fail(self, error: Exception) -> None:
        """A forward pass failed: it concerns every row of the batch, and nobody else."""
        owned = _owned(error)
        for row in self._active:
            if not row.is_done:
                row.error = owned

    def _retire(self) -> None:
        for row in self._active:
            if row.is_done:
                self._engine.leave(row)
        self._active = [row for row in self._active if not row.is_done]

    def _drop(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                if row in self._waiting:
                    self._waiting.remove(row)
                elif row in self._active:
                    self._active.remove(row)
                    self._engine.leave(row)

    def close(self) -> None:
        """Refuse new requests and end those under way with `Cancelled`."""
        with self._lock:
            self.is_closed = True
            for row in (*self._active, *self._waiting):
                row.error = row.error or Cancelled("the ensemble was closed")
            self._waiting.clear()
            self._retire()
            self._engine.release()


class _FairLock:
    """A lock that goes to whoever has waited longest.

    `threading.Lock` mostly goes back to who released it: then one caller drives round after round while the others wait
    to take their tokens, or to join.

    An interrupt (Ctrl-C) may hit between any two steps of it. A thread that was interrupted while it left still holds
    the lock, and has it again at once when it next enters, which `Scheduler.run` does to clean up.
    """

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._turns: deque[tuple[int, threading.Lock]] = deque()  # threads in order; the first one holds the lock

    def __enter__(self) -> None:
        me, turn = threading.get_ident(), threading.Lock()
        if self._turns and self._turns[0][0] == me:
            return
        turn.acquire()
        try:
            with self._inner:
                self._turns.append((me, turn))
                if self._turns[0][1] is turn:
                    turn.release()
            turn.acquire()
        except BaseException:  # interrupted while waiting
            self._leave(turn)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(self._turns[0][1])

    def _leave(self, turn: threading.Lock) -> None:
        with self._inner:
            was_first = bool(self._turns) and self._turns[0][1] is turn
            self._turns = deque(entry for entry in self._turns if entry[1] is not turn)
            if was_first and self._turns:
                self._turns[0][1].release()


def _owned(error: Exception) -> BaseException:
    """Make any failure one of ours, and let go of the tensors that its traceback's frames hold."""
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, SafeLLMError):
        return error
    owned = GenerationError(f"decoding failed: {type(error).__name__}: {error}")
    owned.__cause__ = error
    return owned

"""Async callers on blocking work: each call runs in a thread of its own and stops when nobody waits for it any more.

The engine has no async twin. What these functions run gets a `cancel` event, as `Ensemble.generate` and
`Ensemble.stream` take one; it is set when the awaiting task leaves, and nobody waits for the thread to notice.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["iterate_in_thread", "run_in_thread"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """The work is over. An error is popped to be raised: a frame that kept it would be held by its traceback."""

    errors: list[BaseException] = field(default_factory=list)


class _Places:
    """Places for items that are made and not taken yet; the producer takes one before it makes an item.

    A `SimpleQueue`, because `free` may be called by a garbage collection inside of `take`.
    """

    def __init__(self, number: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(number):
            self._free.put(None)

    def take(self) -> None:
        """Block until there is a place."""
        self._free.get()

    def free(self) -> None:
        """Give a place, and so wake a producer that waits for one."""
        self._free.put(None)


class _Seat:
    """Held by the consumer's frame alone, as a closed loop drops that frame without running its `finally`."""

    def __init__(self, places: _Places) -> None:
        self._places = places

    def leave(self) -> None:
        """Wake the producer, which finds that it is cancelled or that the loop is closed."""
        self._places.free()

    __del__ = leave


async def run_in_thread(call: Callable[[threading.Event], T]) -> T:
    """Run `call(cancel)` in a daemon thread with the caller's context, and return what it returns.

    Not in the loop's executor, whose few workers would limit how many requests share a batch. If the awaiting task is
    cancelled, `cancel` is set and the task goes on at once; what the call then returns or raises is dropped.

    Args:
        call: The blocking work. It should return soon after its argument is set.

    Raises:
        BaseException: Whatever the call raises.
    """
    loop = asyncio.get_running_loop()
    cancel = threading.Event()
    done: asyncio.Future[T | _End] = loop.create_future()
    _start(cancel.set, _call, call, cancel, lambda outcome: loop.call_soon_threadsafe(_settle, done, outcome))
    try:
        outcome = await done
    except BaseException:
        cancel.set()
        raise
    if isinstance(outcome, _End):
        raise outcome.errors.pop()
    return outcome


async def iterate_in_thread(
    make: Callable[[threading.Event], Iterator[T]], *, max_items: int = 64
) -> AsyncGenerator[T, None]:
    """Yield the items of `make(cancel)`, an iterator that is made, driven and closed in a daemon thread.

    It starts with the first `anext`, in the context of that moment. Each item is delivered as soon as it is there.
    Leaving (`aclose`, cancellation) sets `cancel` and waits for nothing; the thread then closes the iterator. Whoever
    may leave early should use `contextlib.aclosing`, or the loop does it only when the generator is collected.

    Args:
        make: Makes the iterator. Its steps should end soon after its argument is set.
        max_items: At most so many items are made ahead of the consumer, at least 1.

    Raises:
        BaseException: Whatever `make` or the iterator raises, after the items before it.
    """
    loop = asyncio.get_running_loop()
    cancel = threading.Event()
    places = _Places(max_items)
    seat = _Seat(places)
    arrived: asyncio.Queue[T | _End] = asyncio.Queue()

    def stop() -> None:
        cancel.set()
        places.free()

    _start(stop, _produce, make, cancel, places, lambda item: loop.call_soon_threadsafe(arrived.put_nowait, item))
    try:
        while not isinstance(item := await arrived.get(), _End):
            places.free()
            yield item
        if item.errors:
            raise item.errors.pop()
    finally:
        cancel.set()
        seat.leave()


_WORKERS: dict[threading.Thread, Callable[[], None]] = {}
"""Threads at work, and what makes each of them stop."""

_PATIENCE_S = 60.0
"""How long the interpreter's end waits for a round that has begun."""


def _start(stop: Callable[[], None], work: Callable[..., None], *args: Any) -> None:
    run = contextvars.copy_context().run

    def whole() -> None:
        try:
            run(work, *args)
        finally:
            _WORKERS.pop(threading.current_thread(), None)

    worker = threading.Thread(target=whole, name="safe_llm-worker", daemon=True)
    _WORKERS[worker] = stop
    worker.start()


@atexit.register
def _stop_workers() -> None:
    """End what is still at work: a thread inside of torch when the interpreter ends would abort the process."""
    workers = dict(_WORKERS)
    for stop in workers.values():
        stop()
    for worker in workers:
        if worker.is_alive():
            worker.join(_PATIENCE_S)


def _call(call: Callable[[threading.Event], T], cancel: threading.Event, tell: Callable[[T | _End], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody to tell
        try:
            result = call(cancel)
        except BaseException as error:
            tell(_End([error]))
        else:
            tell(result)


def _settle(done: asyncio.Future[T], outcome: T) -> None:
    if not done.done():
        done.set_result(outcome)


def _produce(
    make: Callable[[threading.Event], Iterator[T]],
    cancel: threading.Event,
    places: _Places,
    tell: Callable[[T | _End], object],
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody to tell
        try:
            _feed(make(cancel), cancel, places, tell)
        except BaseException as error:
            tell(_End([error]))
        else:
            tell(_End())


def _feed(items: Iterator[T], cancel: threading.Event, places: _Places, tell: Callable[[T | _End], object]) -> None:
    end = _End()
    try:
        places.take()
        while not cancel.is_set() and (item := next(items, end)) is not end:
            tell(item)
            places.take()
    finally:
        if hasattr(items, "close"):
            items.close()

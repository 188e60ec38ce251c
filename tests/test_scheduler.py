"""Many callers on one engine: who gets the next round, and when they hear of it."""

from __future__ import annotations

import statistics
import threading
import time

import pytest

from safe_llm.scheduler import _FairLock
from safe_llm.testing import scripted_ensemble


def slowed(safe, seconds=0.01):
    """Forwards that let other threads run, as real ones do."""
    backend = safe.members[0].backend
    forward = backend.forward

    def slow(feeds):
        time.sleep(seconds)
        return forward(feeds)

    backend.forward = slow
    return backend


def test_short_answer_is_delivered_while_a_long_one_runs():
    safe = scripted_ensemble({"q": "one two three " * 60})
    backend = slowed(safe)
    running = threading.Event()
    taken = []

    def long():
        for _ in safe.stream("q", max_tokens=150):
            running.set()

    thread = threading.Thread(target=long)
    thread.start()
    assert running.wait(30)
    for _ in range(6):
        before = backend.num_forwards
        safe.generate("q", max_tokens=5)
        taken.append(backend.num_forwards - before)
    thread.join(30)
    # its own round, what was left of the other's, and one that the other begins before it is heard; the median, since
    # the machine may not let a thread run for a while
    assert statistics.median(taken) <= 3 * 5 + 1, "finished answers waited for rounds of others"


def test_request_joins_the_round_after_its_submission():
    safe = scripted_ensemble({"q": "one two three " * 60})
    backend = slowed(safe)
    sizes = []
    forward = backend.forward

    def watched(feeds):
        sizes.append(len(feeds))
        if len(sizes) == 10:
            threads.append(threading.Thread(target=safe.generate, args=("q",), kwargs={"max_tokens": 5}))
            threads[0].start()
            while safe._scheduler.num_requests < 2:
                time.sleep(0.001)
        return forward(feeds)

    threads = []
    backend.forward = watched
    safe.generate("q", max_tokens=60)
    threads[0].join(30)
    rest_of_the_round_and_the_prompt = 6
    assert max(sizes[10 : 10 + rest_of_the_round_and_the_prompt + 1]) == 2


def test_fair_lock_goes_to_who_waited_longest():
    lock, order, threads = _FairLock(), [], []

    def wait(number):
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            threads.append(threading.Thread(target=wait, args=(number,)))
            threads[-1].start()
            while len(lock._turns) < number + 2:
                time.sleep(0.001)
    with lock:  # asked for last, so it comes last
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("handed_over", [False, True])
def test_fair_lock_survives_an_interrupt_of_a_waiter(handed_over, monkeypatch):
    lock = _FairLock()
    real = threading.Lock

    class Interrupted:
        """A turn whose owner is interrupted while it waits."""

        def __init__(self):
            self._lock = real()
            self._asked = 0

        def acquire(self):
            self._asked += 1
            if self._asked == 2:
                if handed_over:
                    lock.__exit__()  # the holder leaves at that moment
                raise KeyboardInterrupt
            return self._lock.acquire()

        def release(self):
            self._lock.release()

    holder = threading.Thread(target=lock.__enter__)
    holder.start()
    holder.join(10)
    monkeypatch.setattr("safe_llm.scheduler.threading.Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.__enter__()
    monkeypatch.undo()
    if not handed_over:
        lock.__exit__()
    entered = threading.Thread(target=lambda: lock.__enter__())
    entered.start()
    entered.join(10)
    assert not entered.is_alive(), "nobody can have the lock any more"


def test_fair_lock_survives_an_interrupt_of_a_holder_that_leaves():
    lock = _FairLock()
    leave = lock._leave

    def interrupted(turn):
        lock._leave = leave
        raise KeyboardInterrupt

    lock._leave = interrupted
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    with lock:  # what cleans up after it
        pass
    entered = threading.Thread(target=lambda: lock.__enter__())
    entered.start()
    entered.join(10)
    assert not entered.is_alive(), "nobody can have the lock any more"

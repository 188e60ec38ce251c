"""Async callers: results and errors cross, the loop goes on, leaving stops the thread, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from safe_llm.concurrency import iterate_in_thread, run_in_thread
from safe_llm.errors import Cancelled
from safe_llm.testing import scripted_ensemble

GUARD_S = 60.0  # against a hang only
ANSWERS = {"Who?": "The position is Incorrect, don't you think so?", "long": "The position is Incorrect " * 50}


@pytest.fixture(autouse=True)
def _every_thread_ends():
    yield
    for thread in workers():
        thread.join(GUARD_S)
    assert workers() == []


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("safe_llm")]


def asynchronous(test):
    """Run a test that is a coroutine function; all its awaiting has one generous limit."""

    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(asyncio.wait_for(test(**arguments), GUARD_S))

    return run


async def reached(event: threading.Event) -> None:
    """Wait for a thread without stopping the loop and without the code under test."""
    assert await asyncio.to_thread(event.wait, GUARD_S)


class Source(Iterator[int]):
    """Counts up; records who drove and closed it, and how far it came."""

    def __init__(self, cancel: threading.Event, *, stop: int = 10**9, error: BaseException | None = None) -> None:
        self.cancel, self.stop, self.error = cancel, stop, error
        self.made = 0
        self.drivers = {threading.current_thread()}
        self.closed_by: threading.Thread | None = None
        self.was_closed = threading.Event()
        self.made_some = {n: threading.Event() for n in (1, 3, 4, 64)}

    def __next__(self) -> int:
        self.drivers.add(threading.current_thread())
        if self.made == self.stop:
            raise self.error or StopIteration
        self.made += 1
        if self.made in self.made_some:
            self.made_some[self.made].set()
        return self.made

    def close(self) -> None:
        self.closed_by = threading.current_thread()
        self.was_closed.set()


def source_of(made: list[Source], **options):
    def make(cancel):
        made.append(Source(cancel, **options))
        return made[0]

    return make


# ---------------------------------------------------------------------- one call


@asynchronous
async def test_call_returns_its_result_and_raises_its_exception():
    assert await run_in_thread(lambda cancel: (cancel.is_set(), threading.current_thread().daemon)) == (False, True)
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda cancel: 1 / 0)


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
@asynchronous
async def test_stop_iteration_of_a_call_is_an_error_and_no_hang(error):
    def call(cancel):
        raise error

    with pytest.raises(RuntimeError, match="raised Stop") if error is StopIteration else pytest.raises(error):
        await run_in_thread(call)


def test_keyboard_interrupt_in_the_thread_reaches_the_caller():
    def call(cancel):
        raise KeyboardInterrupt

    async def drain():
        return [item async for item in iterate_in_thread(call)]

    for work in (lambda: run_in_thread(call), drain):
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(work())


@asynchronous
async def test_call_sees_the_callers_context_and_keeps_its_changes_to_itself():
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("caller")

    def call(cancel):
        seen = variable.get()
        variable.set("thread")
        return seen

    assert await run_in_thread(call) == "caller"
    assert [item async for item in iterate_in_thread(lambda cancel: iter([variable.get()]))] == ["caller"]
    assert variable.get() == "caller"


@asynchronous
async def test_loop_runs_on_while_a_call_blocks():
    ticks = 0
    enough = threading.Event()
    call = asyncio.create_task(run_in_thread(lambda cancel: enough.wait(GUARD_S)))
    for _ in range(100):
        await asyncio.sleep(0)
        ticks += 1
    assert not call.done()
    enough.set()
    assert (await call, ticks) == (True, 100)


@asynchronous
async def test_more_calls_than_an_executor_has_workers_run_at_once():
    together = threading.Barrier(50)  # to_thread has at most 32
    await asyncio.gather(*(run_in_thread(lambda cancel: together.wait(GUARD_S)) for _ in range(50)))


@pytest.mark.parametrize("late", ["result", "error"])
@asynchronous
async def test_cancelled_caller_goes_on_at_once_and_the_thread_is_told(late):
    started, told, release, ended = (threading.Event() for _ in range(4))

    def call(cancel):
        started.set()
        if cancel.wait(GUARD_S):
            told.set()
        release.wait(GUARD_S)
        try:
            if late == "error":
                raise ValueError("nobody wants to know")
            return late
        finally:
            ended.set()

    noise = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
    task = asyncio.create_task(run_in_thread(call))
    await reached(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await reached(told)
    assert not ended.is_set(), "nobody waited for the thread"
    release.set()
    for thread in workers():
        await asyncio.to_thread(thread.join, GUARD_S)
    await asyncio.sleep(0)
    del task
    gc.collect()
    assert noise == []


@asynchronous
async def test_failed_work_is_freed_without_the_garbage_collector():
    # what fails may hold gigabytes
    class Model:
        def fail(self, cancel):
            raise ValueError

    async def drained(make):
        return [item async for item in iterate_in_thread(make)]

    gc.disable()
    try:
        for run in (run_in_thread, drained):
            model = Model()
            gone = weakref.ref(model)
            with contextlib.suppress(ValueError):
                await run(model.fail)
            del model
            for thread in workers():
                await asyncio.to_thread(thread.join, GUARD_S)
            assert gone() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------- items


@asynchronous
async def test_items_come_in_order_and_one_thread_makes_drives_and_closes_the_iterator():
    made = []
    assert [item async for item in iterate_in_thread(source_of(made, stop=200), max_items=3)] == list(range(1, 201))
    await reached(made[0].was_closed)
    assert made[0].drivers == {made[0].closed_by}
    assert threading.current_thread() not in made[0].drivers


@asynchronous
async def test_error_comes_after_the_items_before_it():
    stream = iterate_in_thread(source_of([], stop=3, error=ValueError("broken")))
    assert [await anext(stream) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)


@pytest.mark.parametrize(("error", "raised"), [(LookupError, LookupError), (StopIteration, RuntimeError)])
@asynchronous
async def test_error_of_make_is_raised_and_its_stop_iteration_is_no_silent_end(error, raised):
    def failing(cancel):
        raise error

    with pytest.raises(raised):
        await anext(iterate_in_thread(failing))


@asynchronous
async def test_item_is_delivered_before_the_next_one_is_made():
    received = threading.Event()

    def items(cancel):
        yield "first"
        assert received.wait(GUARD_S)
        yield "second"

    stream = iterate_in_thread(items)
    assert await anext(stream) == "first"
    received.set()
    assert [item async for item in stream] == ["second"]


@pytest.mark.parametrize("max_items", [2, 3])
@asynchronous
async def test_producer_is_never_further_ahead_than_allowed(max_items):
    made = []
    async with contextlib.aclosing(iterate_in_thread(source_of(made), max_items=max_items)) as stream:
        assert await anext(stream) == 1
        await reached(made[0].made_some[1 + max_items])
        await asyncio.sleep(0.01)  # time to do wrong
        assert made[0].made == 1 + max_items
        assert [await anext(stream) for _ in range(20)] == list(range(2, 22))


@asynchronous
async def test_nothing_starts_before_the_first_step():
    made = []
    stream = iterate_in_thread(source_of(made))
    await asyncio.sleep(0)
    assert made == workers() == []
    await stream.aclose()
    assert made == []


@pytest.mark.parametrize("max_items", [1, 3, 64])
@asynchronous
async def test_leaving_wakes_a_producer_that_waits_for_room_and_it_closes_the_iterator(max_items):
    made = []
    stream = iterate_in_thread(source_of(made), max_items=max_items)
    assert await anext(stream) == 1
    await reached(made[0].made_some[max_items])
    await stream.aclose()
    await reached(made[0].was_closed)
    assert made[0].cancel.is_set()
    assert made[0].made <= max_items + 1, "nothing was made after leaving"
    assert threading.current_thread() is not made[0].closed_by
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@asynchronous
async def test_cancelled_consumer_leaves_at_once():
    started, told, release = (threading.Event() for _ in range(3))

    def items(cancel):
        started.set()
        if cancel.wait(GUARD_S):
            told.set()
        release.wait(GUARD_S)
        yield "too late"

    stream = iterate_in_thread(items)
    task = asyncio.create_task(anext(stream))
    await reached(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await reached(told)
    release.set()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@asynchronous
async def test_exception_in_the_consumers_block_stops_the_producer():
    async def consume():
        async with contextlib.aclosing(iterate_in_thread(source_of(made))) as stream:
            async for _ in stream:
                raise LookupError

    made = []
    with pytest.raises(LookupError):
        await consume()
    await reached(made[0].was_closed)
    assert made[0].cancel.is_set()


@asynchronous
async def test_generator_that_is_dropped_is_closed_by_the_loop():
    made = []
    stream = iterate_in_thread(source_of(made))
    await anext(stream)
    del stream
    gc.collect()
    await reached(made[0].was_closed)


@asynchronous
async def test_error_after_leaving_is_dropped_silently():
    noise = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))

    def items(cancel):
        yield 1
        cancel.wait(GUARD_S)
        raise ValueError("nobody wants to know")

    stream = iterate_in_thread(items)
    assert await anext(stream) == 1
    await stream.aclose()
    for thread in workers():
        await asyncio.to_thread(thread.join, GUARD_S)
    await asyncio.sleep(0)
    gc.collect()
    assert noise == []


@asynchronous
async def test_many_streams_share_a_loop():
    async def total(stop):
        return sum([item async for item in iterate_in_thread(source_of([], stop=stop), max_items=2)])

    stops = range(40)
    assert await asyncio.gather(*map(total, stops)) == [stop * (stop + 1) // 2 for stop in stops]


def test_many_loops_in_many_threads():
    async def drain():
        return [item async for item in iterate_in_thread(source_of([], stop=50), max_items=2)]

    results = []
    loops = [threading.Thread(target=lambda: results.append(asyncio.run(drain()))) for _ in range(8)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(GUARD_S)
    assert results == [list(range(1, 51))] * 8


# ---------------------------------------------------------------------- loops that end


@pytest.fixture
def thread_failures(monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    return failures


def test_run_that_ends_with_an_open_stream_stops_its_producer(thread_failures):
    made, streams = [], []

    async def leave_it_open():
        streams.append(iterate_in_thread(source_of(made), max_items=2))
        await anext(streams[0])

    asyncio.run(leave_it_open())
    assert made[0].was_closed.wait(GUARD_S)
    assert thread_failures == []


def test_loop_that_is_closed_without_ceremony_lets_the_producer_end(thread_failures):
    made = []
    loop = asyncio.new_event_loop()
    stream = iterate_in_thread(source_of(made), max_items=3)

    async def step(stream):  # within the loop, whose hooks the generator then has
        return await anext(stream)

    assert loop.run_until_complete(step(stream)) == 1
    assert made[0].made_some[4].wait(GUARD_S)
    loop.close()
    assert not made[0].was_closed.is_set(), "it waits for room, as the stream may be read on"
    del stream
    gc.collect()
    assert made[0].was_closed.wait(GUARD_S)
    assert thread_failures == []


@pytest.mark.parametrize("outcome", ["result", "error", "item"])
def test_thread_that_has_nobody_to_tell_ends_silently(outcome, thread_failures):
    started, release = threading.Event(), threading.Event()

    def call(cancel):
        started.set()
        release.wait(GUARD_S)
        if outcome == "error":
            raise ValueError
        return iter([1, 2, 3])

    loop = asyncio.new_event_loop()
    work = anext(iterate_in_thread(call)) if outcome == "item" else run_in_thread(call)
    waiting = asyncio.wait_for(work, 0.01)
    with pytest.raises(TimeoutError):
        loop.run_until_complete(waiting)
    assert started.wait(GUARD_S)
    loop.close()
    release.set()
    for thread in workers():
        thread.join(GUARD_S)
    assert thread_failures == []


def test_stopped_loop_reads_on_where_it_was():
    loop = asyncio.new_event_loop()
    stream = iterate_in_thread(source_of([], stop=9), max_items=2)
    try:
        assert [loop.run_until_complete(anext(stream)) for _ in range(9)] == list(range(1, 10))
        with pytest.raises(StopAsyncIteration):
            loop.run_until_complete(anext(stream))
    finally:
        loop.close()


# ---------------------------------------------------------------------- the real engine


@asynchronous
async def test_engine_gives_the_same_text_in_every_way():
    safe = scripted_ensemble(ANSWERS)
    expected = safe.generate("Who?").text
    result = await run_in_thread(lambda cancel: safe.generate("Who?", cancel=cancel))
    pieces = [piece async for piece in iterate_in_thread(lambda cancel: safe.stream("Who?", cancel=cancel))]
    assert result.text == "".join(pieces) == expected == ANSWERS["Who?"]
    assert len(pieces) > 1


def gated(safe, rounds):
    """Let the drafter do `rounds` forwards, then wait until a permit is released for each further one."""
    permits, reached_limit = threading.Semaphore(rounds), threading.Event()
    forward = safe.members[0].backend.forward

    def limited(feeds):
        if not permits.acquire(blocking=False):
            reached_limit.set()
            permits.acquire(timeout=GUARD_S)
        return forward(feeds)

    safe.members[0].backend.forward = limited
    return permits, reached_limit


@pytest.mark.parametrize("way", ["call", "items"])
@asynchronous
async def test_cancelled_task_stops_the_engine_within_one_round(way):
    safe = scripted_ensemble(ANSWERS, lookahead=3)
    verifier = safe.members[1].backend
    permits, reached_limit = gated(safe, 20)
    ends = []

    def call(cancel):
        try:
            return safe.generate("long", cancel=cancel, max_tokens=500)
        except Cancelled as error:
            ends.append(error)
            raise

    items = iterate_in_thread(lambda cancel: safe.stream("long", cancel=cancel, max_tokens=500))
    task = asyncio.create_task(run_in_thread(call) if way == "call" else drain(items))
    await reached(reached_limit)
    verified = verifier.num_forwards
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    permits.release(10_000)
    for thread in workers():
        await asyncio.to_thread(thread.join, GUARD_S)
    assert verifier.num_forwards <= verified + 1
    assert len(ends) == (way == "call")
    assert safe._scheduler.num_requests == 0
    assert [member.num_sessions for member in safe.members] == [0, 0]


async def drain(items):
    async with contextlib.aclosing(items) as stream:
        return [item async for item in stream]


@asynchronous
async def test_loop_ticks_while_the_engine_decodes():
    safe = scripted_ensemble(ANSWERS)
    permits, reached_limit = gated(safe, 5)
    task = asyncio.create_task(run_in_thread(lambda cancel: safe.generate("Who?", cancel=cancel).text))
    await reached(reached_limit)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    permits.release(10_000)
    assert await task == ANSWERS["Who?"]


LEAVES_AT_EXIT = """
import asyncio
from safe_llm.concurrency import iterate_in_thread, run_in_thread
from safe_llm.testing import scripted_ensemble

safe = scripted_ensemble({f"Q{n}": " ".join(f"word{n}{k}" for k in range(200)) for n in range(4)})

async def leave(n):
    stream = iterate_in_thread(lambda cancel: safe.stream(f"Q{n}", events=True, max_tokens=2000, cancel=cancel))
    await anext(stream)
    await stream.aclose()

async def main():
    await asyncio.gather(*map(leave, range(4)))

asyncio.run(main())
loop = asyncio.new_event_loop()
task = loop.create_task(run_in_thread(lambda cancel: safe.generate("Q0", max_tokens=2000, cancel=cancel)))
loop.run_until_complete(asyncio.sleep(0.05))  # and then nobody runs the loop any more
"""


def test_interpreter_ends_while_workers_are_at_work():
    # E20: a daemon thread inside of torch at the end would abort the process
    done = subprocess.run([sys.executable, "-c", LEAVES_AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr

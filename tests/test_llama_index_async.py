"""SafeLLM among concurrent callers: the loop stays free, cancellation and readers that leave, errors, batches."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import aclosing

import pytest
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler

from llama_index.llms.safe_llm import SafeLLM
from llama_index_support import LONG, NUMBERS, QUESTION, VERIFIED, llm, replying, text_of, treasure, user
from safe_llm.errors import GenerationError, GenerationTimeoutError, MemberError
from safe_llm.testing import scripted_ensemble

ASYNC = ["acomplete", "achat", "astream_complete", "astream_chat"]
STREAMS = ["stream_complete", "stream_chat"]


class Gate:
    """Lets a member's forward passes through one at a time, once they are counted."""

    def __init__(self, model: SafeLLM, free: int) -> None:
        self.backend = model.load().members[0].backend
        self.reached = threading.Event()
        self.open = threading.Event()
        self._free = free
        self._forward = self.backend.forward
        self.backend.forward = self.forward
        self.num_forwards = 0

    def forward(self, feeds):
        self.num_forwards += 1
        if self.num_forwards > self._free:
            self.reached.set()
            assert self.open.wait(20), "nobody opened the gate"
        return self._forward(feeds)


def fresh(**options) -> SafeLLM:
    """A model that no other test uses."""
    return llm(ensemble=scripted_ensemble(treasure(VERIFIED)), max_tokens=1000, **options)


def ask(method: str, question: str):
    return question if "complete" in method else user(question)


async def all_of(model: SafeLLM, method: str, question: str):
    """The responses, whether they are streamed or not."""
    result = getattr(model, method)(ask(method, question))
    if not method.startswith("a"):
        return list(result) if "stream" in method else [result]
    result = await result
    return [r async for r in result] if "stream" in method else [result]


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def num_requests(model: SafeLLM) -> int:
    return model.load()._scheduler.num_requests


@pytest.mark.parametrize("method", ASYNC)
async def test_the_loop_ticks_while_a_member_computes(method):
    model = fresh()
    gate = Gate(model, free=3)
    task = asyncio.create_task(all_of(model, method, QUESTION))
    await until(gate.reached.is_set)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    gate.open.set()
    assert text_of((await task)[-1]) == VERIFIED


@pytest.mark.parametrize("method", ASYNC)
async def test_the_loop_ticks_while_weights_are_loaded(method, monkeypatch):
    loading, loaded = threading.Event(), threading.Event()

    def from_spec(spec, progress):
        loading.set()
        assert loaded.wait(20), "nobody let the loading end"
        return scripted_ensemble(treasure(VERIFIED))

    monkeypatch.setattr("safe_llm.ensemble.Ensemble.from_spec", from_spec)
    model = SafeLLM(drafter=f"slow-{method}", is_chat_model=True)
    task = asyncio.create_task(all_of(model, method, QUESTION))
    await until(loading.is_set)
    for _ in range(20):
        await asyncio.sleep(0)
    loaded.set()
    assert text_of((await task)[-1]) == VERIFIED


@pytest.mark.parametrize("method", ASYNC)
async def test_a_cancelled_task_stops_decoding_within_a_round(method):
    model = fresh()
    gate = Gate(model, free=3)
    task = asyncio.create_task(all_of(model, method, LONG))
    await until(gate.reached.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reached = gate.num_forwards
    gate.open.set()
    await until(lambda: num_requests(model) == 0)
    assert gate.num_forwards - reached <= 16  # what is left of the round: the longest draft
    assert text_of((await all_of(model, method, QUESTION))[-1]) == VERIFIED


@pytest.mark.parametrize("debug", [False, True], ids=["alone", "kept-exception"])
@pytest.mark.parametrize("how", ["close", "break"])
@pytest.mark.parametrize("method", STREAMS)
def test_a_reader_that_leaves_a_stream_ends_the_request(method, how, debug):
    # the debug handler keeps the exception, whose traceback keeps what it passed through
    handlers = [LlamaDebugHandler(print_trace_on_end=False)] if debug else []
    model = fresh(callback_manager=CallbackManager(handlers))
    stream = getattr(model, method)(ask(method, LONG))
    if how == "close":
        next(stream)
        stream.close()
    else:
        for _ in stream:
            break
        del stream
        gc.collect()
    assert num_requests(model) == 0


@pytest.mark.parametrize("debug", [False, True], ids=["alone", "kept-exception"])
@pytest.mark.parametrize("method", STREAMS)
async def test_a_reader_that_leaves_an_async_stream_ends_the_request(method, debug):
    handlers = [LlamaDebugHandler(print_trace_on_end=False)] if debug else []
    model = fresh(callback_manager=CallbackManager(handlers))
    async with aclosing(await getattr(model, f"a{method}")(ask(method, LONG))) as stream:
        async for _ in stream:
            break
    await until(lambda: num_requests(model) == 0)


def test_a_stream_that_is_never_read_costs_nothing():
    model = fresh()
    stream = model.stream_chat(user(LONG))
    assert num_requests(model) == 0
    del stream
    assert model.complete(QUESTION).text == VERIFIED


async def test_chunks_arrive_while_later_ones_are_not_yet_decoded():
    model = fresh()
    gate = Gate(model, free=10)
    stream = await model.astream_chat(user(LONG))
    async with aclosing(stream):
        first = await anext(stream)
        assert first.delta
        assert not gate.open.is_set()  # the rest is not there yet
        gate.open.set()
        *_, last = [r async for r in stream]
    assert last.message.content == NUMBERS[: len(last.message.content)]


@pytest.mark.parametrize("method", ["complete", "chat", *STREAMS])
def test_a_call_that_takes_too_long_is_given_up(method):
    model = fresh(timeout=0.05)
    gate = Gate(model, free=3)

    def consume():
        result = getattr(model, method)(ask(method, LONG))
        return list(result) if "stream" in method else result

    threading.Timer(0.2, gate.open.set).start()
    with pytest.raises(GenerationTimeoutError, match=r"no answer within 0.05 s"):
        consume()
    assert num_requests(model) == 0
    assert issubclass(GenerationTimeoutError, TimeoutError)


@pytest.mark.parametrize("method", ["complete", "chat", *STREAMS, *ASYNC])
async def test_a_member_that_fails_is_named_and_the_next_call_works(method):
    model = fresh()
    backend = model.load().members[1].backend
    forward = backend.forward

    def failing(feeds):
        raise MemberError("verifier", "out of memory")

    backend.forward = failing
    with pytest.raises(GenerationError, match="'verifier': out of memory"):
        await all_of(model, method, QUESTION)
    backend.forward = forward
    assert model.complete(QUESTION).text == VERIFIED


async def test_concurrent_calls_share_batches_and_do_not_mix():
    def reply(conversation):
        number = conversation.split("number ")[-1].split(".")[0]
        return f"{NUMBERS[:300]}, and the answer to {number}."

    model = replying(reply)
    gate = Gate(model, free=0)
    widths = []
    backend, forward = gate.backend, gate.backend.forward
    backend.forward = lambda feeds: widths.append(len(feeds)) or forward(feeds)
    calls = [asyncio.create_task(model.acomplete(f"Question number {i}.")) for i in range(8)]
    await until(lambda: sum(t.name == "safe_llm-worker" for t in threading.enumerate()) == 8)
    gate.open.set()
    answers = await asyncio.gather(*calls)
    assert [a.text for a in answers] == [f"{NUMBERS[:300]}, and the answer to {i}." for i in range(8)]
    assert max(widths) == 8


async def test_threads_and_tasks_use_one_model_at_once():
    model = fresh()
    in_threads = [asyncio.to_thread(model.complete, QUESTION) for _ in range(4)]
    answers = await asyncio.gather(*in_threads, *(model.achat(user(QUESTION)) for _ in range(4)))
    assert {text_of(a) for a in answers} == {VERIFIED}

"""Both LangChain models: what has to be the same on every path, and what ends a call."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from langchain_safe_llm import ChatSafeLLM, EnsembleTimeoutError
from langchain_support import (
    ALL_PATHS,
    COUNT,
    DRAFTED,
    EASY,
    MODELS,
    NUMBERS,
    PATHS,
    QUESTION,
    VERIFIED,
    Recorder,
    ask,
    before_forwards,
    ended,
    forwards,
    hold_until_cancelled,
    is_freed,
    open_requests,
    text_of,
    treasure,
    wait_until,
)
from safe_llm import errors
from safe_llm.record import point_record

each_path = pytest.mark.parametrize(("cls", "path"), ALL_PATHS)
each_model = pytest.mark.parametrize("cls", MODELS)


def prompt_of(cls, text):
    return [{"role": "user", "content": text}] if cls is ChatSafeLLM else text


# ---------------------------------------------------------------------- one answer on all paths


@each_path
async def test_every_path_gives_the_engines_answer(cls, path):  # E08, E15, E16
    ensemble = treasure()
    expected = ensemble.generate(prompt_of(cls, QUESTION))
    assert expected.points  # or there is nothing to compare
    answer = await ask(cls(ensemble=ensemble), path)
    assert answer.text == answer.generation.text == expected.text
    assert answer.points == [point_record(point) for point in expected.points]
    assert answer.usage == {
        "input_tokens": expected.usage.prompt_tokens,
        "output_tokens": expected.usage.completion_tokens,
        "total_tokens": expected.usage.total_tokens,
    }
    assert answer.info["model_name"] == "drafter+verifier"
    assert answer.info["model_provider"] == "safe_llm"
    assert answer.finish == ("stop", "end")
    counters = expected.counters
    record = answer.info["safe"]
    assert record["members"] == ["drafter", "verifier"]
    assert record["fingerprint"] == ensemble.fingerprint
    assert (record["n_points"], record["n_tokens"]) == (counters.num_ensembled, counters.num_tokens)
    assert record["n_forwards"] == counters.num_forwards
    assert record["acceptance_rate"] == counters.acceptance_rate
    assert is_freed(ensemble)


@each_path
async def test_points_are_custom_events_of_the_run_wherever_there_is_one(cls, path):
    answer = await ask(cls(ensemble=treasure()), path)
    if cls is ChatSafeLLM and path in ("stream", "astream", "events_v2"):
        assert answer.recorder.points == []  # core passes no run there
    else:
        assert answer.recorder.points == answer.points


@each_path
async def test_new_tokens_are_the_text(cls, path):  # E03
    answer = await ask(cls(ensemble=treasure()), path)
    tokens = answer.recorder.tokens
    if path in ("invoke", "ainvoke", "batch", "abatch"):
        assert tokens == []
    else:
        assert len(tokens) > 3  # it does stream
        assert "".join(tokens) == answer.text


@each_model
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_each_chunk_is_reported_once_and_before_it_is_yielded(cls, asynchronous):  # E03, E21
    model, recorder = cls(ensemble=treasure()), Recorder()
    config = {"callbacks": [recorder]}
    seen = []

    def check(chunk):
        seen.append(text_of(chunk))
        assert recorder.tokens == seen

    if asynchronous:
        async for chunk in model.astream(QUESTION, config=config):
            check(chunk)
    else:
        for chunk in model.stream(QUESTION, config=config):
            check(chunk)
    assert len(seen) > 3
    assert None not in recorder.chunks


@each_model
async def test_first_chunk_arrives_before_the_answer_is_complete(cls):  # E04, E21
    ensemble = treasure()
    model = cls(ensemble=ensemble)
    total = (await ask(model, "invoke", COUNT)).num_forwards
    for _ in model.stream(COUNT):
        assert forwards(ensemble) - total < total
        break
    before = forwards(ensemble)
    go_on = threading.Event()
    before_forwards(ensemble, lambda: forwards(ensemble) - before < 12 or go_on.wait(30))
    chunks = []
    async for chunk in model.astream(COUNT):
        chunks.append(text_of(chunk))
        go_on.set()  # without a first chunk this is never reached
    assert "".join(chunks) == NUMBERS


# ---------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["three"], "one, two, "),  # of several tokens, and over two chunks
        ([", "], "one"),
        (["e, t"], "on"),
        (["nine", "four", "seven"], "one, two, three, "),
        (["three, four, five, six"], "one, two, "),
        (["zebra", "o"], ""),
    ],
)
@each_path
async def test_stop_string_cuts_exactly_and_ends_decoding(cls, path, stop, text):  # E06
    ensemble = treasure()
    model = cls(ensemble=ensemble)
    answer = await ask(model, path, COUNT, stop=stop)
    assert answer.text == answer.generation.text == text
    assert answer.finish == ("stop", "stop_string")
    needed = sum(len(part) for part in (text, *stop)) + ensemble.config.lookahead + 2  # no token is longer than a char
    assert forwards(ensemble) == answer.num_forwards <= needed
    assert is_freed(ensemble)


@each_path
async def test_stop_strings_of_the_object_and_of_bind(cls, path):  # E06
    ensemble = treasure()
    whole = (await ask(cls(ensemble=ensemble), path, COUNT)).num_forwards
    model = cls(ensemble=ensemble, stop=["four"])
    bound = cls(ensemble=ensemble, stop=["two"]).bind(stop=["four"])
    for asked in (model, bound):
        if "v3" in path and asked is bound:
            continue  # core's v3 path of a bound model is that of any runnable
        answer = await ask(asked, path, COUNT)
        assert answer.text == "one, two, three, "
        assert answer.num_forwards < whole / 2
    answer = await ask(model, path, COUNT, stop=["three"])
    assert answer.text == "one, two, "


@each_path
@pytest.mark.parametrize(("stop", "text"), [("two", "one, "), (None, "one, two, "), ([], NUMBERS)])
async def test_stop_as_str_none_and_empty_list(cls, path, stop, text):
    model = cls(ensemble=treasure(), stop="three")
    answer = await ask(model, path, COUNT, stop=stop)
    assert answer.text == text


@each_model
def test_stop_of_the_object_as_str_is_one_string(cls):
    assert cls(ensemble=treasure(), stop="three").stop == ["three"]
    assert cls(ensemble=treasure(), stop_sequences=["three"]).stop == ["three"]
    assert cls(ensemble=treasure(), stop=[]).stop == []


# ---------------------------------------------------------------------- other parameters


@each_path
@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
async def test_max_tokens_of_call_bind_and_object(cls, path, name):  # E10
    ensemble = treasure()
    model = cls(ensemble=ensemble, **{name: 9})
    for asked, kwargs, expected in (
        (model, {}, 9),
        (model, {name: 4}, 4),
        (model.bind(**{name: 6}), {}, 6),
        (model.bind(**{name: 6}), {name: 3}, 3),
        (model, {name: None}, 9),
    ):
        if "v3" in path and asked is not model:
            continue
        answer = await ask(asked, path, COUNT, **kwargs)
        assert answer.usage["output_tokens"] == expected
        assert answer.finish == ("length", "max_tokens")
        assert NUMBERS.startswith(answer.text)
        assert answer.num_forwards <= expected + 2


@each_path
async def test_unknown_parameter_names_the_nearest_and_the_next_call_works(cls, path):
    model, recorder = cls(ensemble=treasure()), Recorder()
    with pytest.raises(errors.UnknownNameError, match=r"'max_token'.*did you mean 'max_tokens'"):
        await ask(model, path, EASY, max_token=3, recorder=recorder)
    await ended(recorder)
    assert recorder.events == ["start", "error"]
    assert (await ask(model, path, EASY)).text == DRAFTED[EASY]


@each_model
def test_unknown_parameter_of_the_object_names_the_nearest(cls):
    with pytest.raises(ValueError, match=r"'temprature'.*did you mean 'temperature'"):
        cls(ensemble=treasure(), temprature=0.5)
    with pytest.raises(ValueError, match="give exactly one of ensemble, preset and drafter"):
        cls()
    with pytest.raises(ValueError, match="temperature must be"):
        cls(ensemble=treasure(), temperature=-1.0)


@each_model
async def test_sampling_is_reproduced_by_the_seed_on_all_paths(cls):
    model = cls(ensemble=treasure(), temperature=3.0, max_tokens=8)
    answers = {}
    for seed in (1, 2):
        paths = [path for other, path in ALL_PATHS if other is cls]
        found = [await ask(model, path, seed=seed) for path in paths]
        assert len({answer.text for answer in found}) == 1
        assert {answer.info["safe"]["seed"] for answer in found} == {seed}
        answers[seed] = found[0].text
    assert answers[1] != answers[2]


@each_path
async def test_logprobs_are_in_the_metadata(cls, path):
    answer = await ask(cls(ensemble=treasure()), path, EASY, logprobs=2)
    content = answer.info["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == DRAFTED[EASY]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    assert "logprobs" not in (await ask(cls(ensemble=treasure()), path, EASY)).info


# ---------------------------------------------------------------------- the event loop


@pytest.mark.parametrize(("cls", "path"), [pair for pair in ALL_PATHS if pair[1].startswith(("a", "events"))])
async def test_event_loop_ticks_while_an_answer_is_made(cls, path):  # E05
    ensemble = treasure()
    loop = asyncio.get_running_loop()

    def needs_a_tick():
        ticked = threading.Event()
        loop.call_soon_threadsafe(ticked.set)
        assert ticked.wait(30)

    before_forwards(ensemble, needs_a_tick)
    assert (await ask(cls(ensemble=ensemble), path, EASY)).text == DRAFTED[EASY]


async def _consume(model, path, recorder):
    config = {"callbacks": [recorder]}
    if path == "astream":
        return [chunk async for chunk in model.astream(COUNT, config=config)]
    return await model.ainvoke(COUNT, config=config)


@each_model
@pytest.mark.parametrize("path", ["ainvoke", "astream"])
async def test_cancelled_task_stops_decoding_within_a_round(cls, path, monkeypatch):
    ensemble, recorder = treasure(), Recorder()
    waits = hold_until_cancelled(ensemble, monkeypatch, after=9)
    task = asyncio.create_task(_consume(cls(ensemble=ensemble), path, recorder))
    while not waits.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_freed(ensemble)
    assert forwards(ensemble) <= 9 + ensemble.config.lookahead + 1
    assert recorder.events == ["start", "error"]
    assert isinstance(recorder.errors[0], asyncio.CancelledError)
    monkeypatch.undo()


# ---------------------------------------------------------------------- early ends


@each_model
def test_leaving_a_stream_frees_the_engine(cls):  # E20
    ensemble, recorder = treasure(), Recorder()
    stream = cls(ensemble=ensemble).stream(COUNT, config={"callbacks": [recorder]})
    next(stream)
    assert open_requests(ensemble) == 1
    before = forwards(ensemble)
    stream.close()
    assert is_freed(ensemble)
    assert forwards(ensemble) == before
    assert recorder.events == ["start", "error"]


@each_model
async def test_leaving_an_async_stream_frees_the_engine(cls):  # E20
    ensemble, recorder = treasure(), Recorder()
    stream = cls(ensemble=ensemble).astream(COUNT, config={"callbacks": [recorder]})
    await anext(stream)
    await stream.aclose()
    assert is_freed(ensemble)
    assert recorder.events == ["start", "error"]


@each_model
async def test_consumer_that_stops_reading_stops_decoding(cls, monkeypatch):
    monkeypatch.setattr("safe_llm.concurrency.iterate_in_thread.__kwdefaults__", {"max_items": 2})
    ensemble = treasure(lookahead=1)
    model = cls(ensemble=ensemble)
    whole = (await ask(model, "invoke", COUNT)).num_forwards
    stream = model.astream(COUNT)
    await anext(stream)
    wait_until(lambda: forwards(ensemble) > whole + 2)
    await asyncio.sleep(0.05)
    assert forwards(ensemble) < whole * 1.5
    rest = [text_of(chunk) async for chunk in stream]
    assert NUMBERS.endswith("".join(rest))
    assert is_freed(ensemble)


@each_path
async def test_timeout_gives_up_within_a_round(cls, path):
    ensemble = treasure()
    before_forwards(ensemble, lambda: time.sleep(0.02))
    recorder = Recorder()
    with pytest.raises(EnsembleTimeoutError, match=r"no answer within 0.01 s \(raise `timeout`\)") as caught:
        await ask(cls(ensemble=ensemble, timeout=0.01), path, COUNT, recorder=recorder)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, errors.GenerationError)
    assert is_freed(ensemble)
    assert forwards(ensemble) <= 1 + ensemble.config.lookahead  # the prompt and one round
    await ended(recorder)
    assert recorder.events[0] == "start"
    assert recorder.events[-1] == "error"


@each_path
async def test_timeout_that_is_not_reached_changes_nothing(cls, path):
    answer = await ask(cls(ensemble=treasure(), timeout=600), path, EASY)
    assert answer.text == DRAFTED[EASY]


@each_path
async def test_member_that_fails_ends_the_call_and_not_the_next(cls, path):  # F21
    ensemble, recorder = treasure(), Recorder()
    failing = [True]

    def fail():
        if failing and forwards(ensemble) >= 4:
            failing.clear()
            raise ZeroDivisionError

    before_forwards(ensemble, fail)
    model = cls(ensemble=ensemble)
    with pytest.raises(errors.GenerationError, match="ZeroDivisionError"):
        await ask(model, path, COUNT, recorder=recorder)
    await ended(recorder)
    assert recorder.events == ["start", "error"]
    assert is_freed(ensemble)
    assert (await ask(model, path, COUNT)).text == NUMBERS


@each_path
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("method", ["on_llm_new_token", "on_custom_event", "on_llm_end"])
async def test_handler_that_raises_costs_the_answer_only_if_it_wants(cls, path, raises, method):
    class Broken(Recorder):
        raise_error = raises

    def broken(self, *args, **kwargs):
        called.append(method)
        raise ZeroDivisionError("of the handler")

    called = []
    setattr(Broken, method, broken)
    ensemble = treasure()
    try:
        output = await PATHS[path](cls(ensemble=ensemble), QUESTION, {"config": {"callbacks": [Broken()]}})
    except ZeroDivisionError:
        assert raises
        assert called
    else:
        assert not (raises and called)
        assert text_of(output) == VERIFIED[QUESTION]
    assert is_freed(ensemble)

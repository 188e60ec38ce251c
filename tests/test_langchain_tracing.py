"""Ensemble points as custom events and phases as child runs: in LangSmith, for other handlers, sync and async."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from contextlib import closing
from datetime import datetime

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.langchain import LangChainTracer
from langsmith import Client, tracing_context

from langchain_models import QUESTION, WORDS, AsyncChat, TinyChat, TinyLLM, expected
from langchain_safe_llm import _tracing
from langchain_safe_llm._tracing import MAX_BLOCKS, POINT_EVENT, PhaseTracer, aemit_point, emit_point, report_usage
from safe_llm.events import RoundFinished, Timings
from safe_llm.record import PHASES, point_record

pytest_plugins = ["langsmith_server"]
loopback = pytest.mark.allow_hosts(["127.0.0.1"])

POINTS = [point_record(point) for point in expected(QUESTION).points]


class Recorder(BaseCallbackHandler):
    """Notes what it is told, in order."""

    def __init__(self):
        self.events = []
        self.started = {}
        self.ended = {}
        self.llm_run = None

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs):
        self.llm_run = run_id

    def on_llm_start(self, serialized, prompts, *, run_id, **kwargs):
        self.llm_run = run_id

    def on_custom_event(self, name, data, *, run_id, tags, metadata, **kwargs):
        self.events.append((name, data, run_id, tags))

    def on_chain_start(self, serialized, inputs, *, run_id, parent_run_id, metadata, name, **kwargs):
        self.started[run_id] = (name, inputs, parent_run_id, metadata)

    def on_chain_end(self, outputs, *, run_id, **kwargs):
        self.ended[run_id] = outputs


class AsyncRecorder(Recorder, AsyncCallbackHandler):
    async def on_chat_model_start(self, *args, **kwargs):
        Recorder.on_chat_model_start(self, *args, **kwargs)

    async def on_custom_event(self, *args, **kwargs):
        await asyncio.sleep(0)
        Recorder.on_custom_event(self, *args, **kwargs)

    async def on_chain_start(self, *args, **kwargs):
        await asyncio.sleep(0)
        Recorder.on_chain_start(self, *args, **kwargs)

    async def on_chain_end(self, *args, **kwargs):
        await asyncio.sleep(0)
        Recorder.on_chain_end(self, *args, **kwargs)


class Failing(BaseCallbackHandler):
    def on_custom_event(self, *args, **kwargs):
        raise ZeroDivisionError("custom")

    def on_chain_start(self, *args, **kwargs):
        raise ZeroDivisionError("chain")


def when(run, which):
    return datetime.fromisoformat(run[which].removesuffix("Z")).replace(tzinfo=None)


def seconds(run):
    return (when(run, "end_time") - when(run, "start_time")).total_seconds()


def phase_runs(server, name="TinyChat"):
    """The LLM run, its child runs, and what its answer says about itself."""
    llm = server.run(name)
    (generation,) = llm["outputs"]["generations"][0]
    return llm, server.children(llm), generation["message"]["kwargs"]["response_metadata"]["safe"]


# ---------------------------------------------------------------------- ensemble points


@pytest.mark.parametrize("model", [TinyChat(), TinyLLM()], ids=["chat", "text"])
def test_points_are_custom_events_of_the_llm_run(model):
    recorder = Recorder()
    chain = RunnableLambda(lambda question: question) | model
    chain.invoke(QUESTION, config={"callbacks": [recorder], "tags": ["mine"]})
    assert [data for _, data, _, _ in recorder.events] == POINTS
    assert {(name, run_id) for name, _, run_id, _ in recorder.events} == {(POINT_EVENT, recorder.llm_run)}
    assert all("mine" in tags for *_, tags in recorder.events)


@pytest.mark.parametrize("recorder_class", [Recorder, AsyncRecorder])
@pytest.mark.parametrize("model", [TinyChat(), AsyncChat(trace_phases="summary")], ids=["thread", "native"])
def test_points_reach_handlers_from_async_runs(model, recorder_class):
    recorder = recorder_class()
    asyncio.run(model.ainvoke(QUESTION, config={"callbacks": [recorder]}))
    assert [(data, run_id) for _, data, run_id, _ in recorder.events] == [(p, recorder.llm_run) for p in POINTS]


def test_points_are_in_the_event_stream_of_the_model():
    async def events():
        return [event async for event in TinyChat().astream_events(QUESTION, version="v2")]

    seen = asyncio.run(events())
    (start,) = [event for event in seen if event["event"] == "on_chat_model_start"]
    points = [event for event in seen if event["event"] == "on_custom_event"]
    assert [event["data"] for event in points] == POINTS
    assert {(event["name"], event["run_id"]) for event in points} == {(POINT_EVENT, start["run_id"])}


def test_without_a_run_there_is_nothing_to_report_to():
    assert emit_point(None, POINTS[0]) is None
    assert asyncio.run(aemit_point(None, POINTS[0])) is None


def test_handler_that_fails_does_not_cost_the_answer(caplog):
    answer = TinyChat(trace_phases="summary").invoke(QUESTION, config={"callbacks": [Failing()]})
    assert answer.content == expected(QUESTION).text
    messages = [record.getMessage() for record in caplog.records]
    assert sum("Failing.on_custom_event" in message for message in messages) == len(POINTS)
    assert any("Failing.on_chain_start" in message for message in messages)


def test_handler_that_wants_to_raise_does():
    handler = Failing()
    handler.raise_error = True
    with pytest.raises(ZeroDivisionError, match="custom"):
        TinyChat().invoke(QUESTION, config={"callbacks": [handler]})


# ---------------------------------------------------------------------- phases in LangSmith


@loopback
def test_summary_is_one_child_per_phase_with_true_durations(langsmith_server):
    TinyChat(trace_phases="summary").invoke(QUESTION)
    llm, children, record = phase_runs(langsmith_server)
    assert [run["name"] for run in children] == [f"safe.{phase}" for phase in PHASES]
    for phase, run in zip(PHASES, children, strict=True):
        assert seconds(run) == pytest.approx(record["latency_s"][phase], abs=1e-6)
        assert run["outputs"] == {"duration_s": record["latency_s"][phase], "n_rounds": record["n_rounds"]}
        assert run["inputs"] == {"n_rounds": record["n_rounds"]}
        assert run["extra"]["metadata"]["aggregated"] is True
        assert run["run_type"] == "chain"
        assert when(llm, "start_time") <= when(run, "start_time") <= when(run, "end_time") <= when(llm, "end_time")
    for one, other in itertools.pairwise(children):
        assert abs((when(other, "start_time") - when(one, "end_time")).total_seconds()) <= 2e-6


@loopback
def test_children_belong_to_the_llm_run_of_their_trace(langsmith_server):
    chain = RunnableLambda(lambda question: question).with_config(run_name="first") | TinyChat(trace_phases="summary")
    chain.invoke(QUESTION, config={"run_name": "root", "tags": ["mine"], "metadata": {"who": "me"}})
    llm, children, _ = phase_runs(langsmith_server)
    root = langsmith_server.run("root")
    assert len(children) == len(PHASES)
    for run in children:
        assert run["trace_id"] == llm["trace_id"] == root["id"]
        own = when(run, "start_time").strftime("%Y%m%dT%H%M%S%fZ") + run["id"]
        assert run["dotted_order"] == f"{llm['dotted_order']}.{own}"
        assert run["session_name"] == llm["session_name"] == "test"
        assert "mine" in run["tags"]
        assert run["extra"]["metadata"]["who"] == "me"


@loopback
@pytest.mark.parametrize("level", ["summary", "blocks"])
def test_children_are_posted_once_and_hold_no_text(langsmith_server, level):
    TinyChat(trace_phases=level).invoke(QUESTION)
    llm, children, _ = phase_runs(langsmith_server)
    for run in children:
        assert [operation for operation, run_id in langsmith_server.operations if run_id == run["id"]] == ["post"]
        assert not any(word in json.dumps(run) for word in WORDS)
    assert [operation for operation, run_id in langsmith_server.operations if run_id == llm["id"]].count("post") == 1
    assert len(langsmith_server.runs()) == 1 + len(children)
    assert "treasure" in json.dumps(llm)


@loopback
@pytest.mark.parametrize("limit", [1, 4, MAX_BLOCKS])
def test_blocks_keep_to_their_limit_and_to_the_totals(langsmith_server, monkeypatch, limit):
    monkeypatch.setattr(_tracing, "MAX_BLOCKS", limit)
    TinyChat(trace_phases="blocks").invoke(QUESTION)
    llm, children, record = phase_runs(langsmith_server)
    blocks = {}
    for run in children:
        blocks.setdefault(run["inputs"]["block"], []).append(run)
    assert [run["name"] for run in blocks.pop(0)] == ["safe.tokenize", "safe.prefill"]
    assert 1 <= len(blocks) <= limit < record["n_rounds"] or limit == MAX_BLOCKS
    assert list(blocks) == list(range(1, len(blocks) + 1))
    sizes = [runs[0]["inputs"]["n_rounds"] for runs in blocks.values()]
    assert sum(sizes) == record["n_rounds"]
    assert len(set(sizes[:-1])) <= 1
    for phase in PHASES:
        took = [run["outputs"]["duration_s"] for run in children if run["name"] == f"safe.{phase}"]
        assert sum(took) == pytest.approx(record["latency_s"][phase], abs=1e-6)
    for run in children:
        assert seconds(run) == pytest.approx(run["outputs"]["duration_s"], abs=1e-6)
        assert when(llm, "start_time") <= when(run, "start_time") <= when(run, "end_time") <= when(llm, "end_time")
    ends = [max(when(run, "end_time") for run in runs) for runs in blocks.values()]
    starts = [min(when(run, "start_time") for run in runs) for runs in blocks.values()]
    assert all((start - end).total_seconds() > -1e-5 for end, start in zip(ends, starts[1:], strict=False))


@loopback
def test_children_are_posted_from_async_runs(langsmith_server):
    asyncio.run(AsyncChat(trace_phases="summary").ainvoke(QUESTION))
    _, children, _ = phase_runs(langsmith_server, "AsyncChat")
    assert [run["name"] for run in children] == [f"safe.{phase}" for phase in PHASES]


@loopback
def test_concurrent_runs_keep_their_children_apart(langsmith_server):
    TinyChat(trace_phases="summary").batch([QUESTION] * 4)
    models = [run for run in langsmith_server.runs().values() if run["run_type"] == "llm"]
    assert len(models) == 4
    for llm in models:
        children = langsmith_server.children(llm)
        assert len(children) == len(PHASES)
        assert {run["trace_id"] for run in children} == {llm["id"]}


@loopback
def test_disabled_tracing_posts_no_children(langsmith_server):
    with tracing_context(enabled=False):
        TinyChat(trace_phases="summary").invoke(QUESTION, config={"callbacks": [LangChainTracer()]})
    assert langsmith_server.runs() == {}


@loopback
@pytest.mark.parametrize("batched", [False, True])
def test_children_arrive_over_the_older_interfaces(langsmith_server, batched):
    langsmith_server.use_multipart = False
    with closing(Client(auto_batch_tracing=batched)) as client:
        TinyChat(trace_phases="summary").invoke(QUESTION, config={"callbacks": [LangChainTracer(client=client)]})
    llm, children, _ = phase_runs(langsmith_server)
    assert [run["name"] for run in children] == [f"safe.{phase}" for phase in PHASES]
    assert langsmith_server.paths == ({"/runs/batch"} if batched else {"/runs"})
    assert llm["end_time"]


@loopback
def test_langsmith_that_fails_does_not_cost_the_answer(langsmith_server, caplog):
    def refuse(values):
        raise ZeroDivisionError("no")

    with caplog.at_level(logging.WARNING), closing(Client(hide_outputs=refuse)) as client:
        model = TinyChat(trace_phases="summary")
        answer = model.invoke(QUESTION, config={"callbacks": [LangChainTracer(client=client)]})
    assert answer.content == expected(QUESTION).text
    assert any("Error in LangSmith runs of phases" in record.getMessage() for record in caplog.records)


# ---------------------------------------------------------------------- phases for other handlers


def check_children(recorder, level):
    names = [name for name, *_ in recorder.started.values()]
    assert list(recorder.started) == list(recorder.ended)
    assert set(names) == {f"safe.{phase}" for phase in PHASES}
    assert (len(names) == len(PHASES)) is (level == "summary")
    assert {parent for _, _, parent, _ in recorder.started.values()} == {recorder.llm_run}
    for run_id, (_, inputs, _, metadata) in recorder.started.items():
        assert recorder.ended[run_id]["duration_s"] > 0
        assert recorder.ended[run_id]["n_rounds"] == inputs["n_rounds"] == metadata["n_rounds"]
        assert metadata["who"] == "me"
        assert metadata["aggregated"] is True


@pytest.mark.parametrize("level", ["summary", "blocks"])
def test_plain_handler_is_told_of_every_child(level):
    recorder = Recorder()
    model = TinyChat(trace_phases=level)
    answer = model.invoke(QUESTION, config={"callbacks": [recorder], "metadata": {"who": "me"}})
    check_children(recorder, level)
    took = [out["duration_s"] for run, out in recorder.ended.items() if recorder.started[run][0] == "safe.draft"]
    assert sum(took) == pytest.approx(answer.response_metadata["safe"]["latency_s"]["draft"])


@pytest.mark.parametrize("recorder_class", [Recorder, AsyncRecorder])
@pytest.mark.parametrize("level", ["summary", "blocks"])
def test_async_runs_tell_handlers_of_every_child(level, recorder_class):
    recorder = recorder_class()
    model = AsyncChat(trace_phases=level)
    asyncio.run(model.ainvoke(QUESTION, config={"callbacks": [recorder], "metadata": {"who": "me"}}))
    check_children(recorder, level)


@loopback
def test_handler_of_the_model_and_langsmith_each_get_the_children_once(langsmith_server):
    recorder = Recorder()
    TinyChat(trace_phases="summary", callbacks=[recorder]).invoke(QUESTION, config={"metadata": {"who": "me"}})
    check_children(recorder, "summary")
    assert len(langsmith_server.runs()) == 1 + len(PHASES)


@loopback
def test_text_model_tells_langsmith_its_usage(langsmith_server):
    class Metered(TinyLLM):
        def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
            report_usage(run_manager, {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7})
            return super()._generate(prompts)

    recorder = Recorder()
    Metered().invoke(QUESTION, config={"callbacks": [recorder], "metadata": {"who": "me"}})
    metadata = langsmith_server.run("Metered")["extra"]["metadata"]
    assert metadata["usage_metadata"] == {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}
    assert metadata["who"] == "me"
    assert report_usage(None, {}) is None


def test_phases_that_took_no_time_have_no_child():
    result = expected(QUESTION)
    only = type(result)(**{f: getattr(result, f) for f in result.__slots__} | {"timings": Timings(draft_s=2.0)})
    for level in ("summary", "blocks"):
        recorder = Recorder()

        class Direct(TinyChat):
            def _generate(self, messages, stop=None, run_manager=None, *, level=level, **kwargs):
                tracer = PhaseTracer(run_manager, level)
                if level == "blocks":
                    timings = Timings(draft_s=2.0)
                    tracer.round(
                        RoundFinished(index=0, decisions=(), num_draft_tokens=0, committed=b"", timings=timings)
                    )
                tracer.finish(only)
                return super()._generate(messages)

        Direct().invoke(QUESTION, config={"callbacks": [recorder]})
        assert [name for name, *_ in recorder.started.values()] == ["safe.draft"]
        assert [out["duration_s"] for out in recorder.ended.values()] == [2.0]

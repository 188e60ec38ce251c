"""`EnsembleCallbackHandler` and `get_ensemble_callback`: what is counted, once each, wherever it happens."""

from __future__ import annotations

import asyncio
import contextvars
import io
import threading
from uuid import uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tracers import context

from langchain_models import (
    EASY,
    QUESTION,
    AsyncChat,
    StreamingChat,
    TinyChat,
    TinyLLM,
    chat_result,
    expected,
    info_of,
    record_of,
)
from langchain_safe_llm import callbacks
from langchain_safe_llm.callbacks import EnsembleCallbackHandler, get_ensemble_callback
from safe_llm.record import PHASES, SCHEMA_VERSION, point_record


def check_totals(handler, *questions):
    """Exactly the answers to these questions were added up."""
    results = [expected(question) for question in questions]
    counters = [result.counters for result in results]
    assert handler.n_runs == len(results)
    assert handler.n_tokens == sum(result.usage.completion_tokens for result in results)
    assert handler.n_points == sum(c.num_ensembled for c in counters) == len(handler.points)
    assert handler.n_replaced == sum(c.num_replaced for c in counters)
    assert handler.n_draft_tokens == sum(c.num_draft_tokens for c in counters)
    assert handler.n_accepted_tokens == sum(c.num_accepted_tokens for c in counters)
    assert len(handler.ttft_s) == len(results)


def beside(handler):
    return (handler.n_cached, handler.n_other_runs, handler.n_errors, handler.n_stopped)


def answered(info=None, **message):
    return LLMResult(generations=[[ChatGeneration(message=AIMessage("", response_metadata=info or {}, **message))]])


class Broken(TinyChat):
    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        raise ZeroDivisionError("broken")


class TwoAnswers(TinyChat):
    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        results = [chat_result(expected(question)) for question in (QUESTION, EASY)]
        results[0].generations.append(ChatGeneration(message=AIMessage("not by an ensemble")))
        return type(results[0])(generations=results[0].generations + results[1].generations)


# ---------------------------------------------------------------------- what is counted


def test_totals_of_one_answer_are_its_record():
    handler = EnsembleCallbackHandler()
    answer = TinyChat().invoke(QUESTION, config={"callbacks": [handler]})
    record = answer.response_metadata["safe"]
    check_totals(handler, QUESTION)
    assert handler.points == [point_record(point) for point in expected(QUESTION).points]
    assert handler.latency_s == {phase: record["latency_s"][phase] for phase in (*PHASES, "total")}
    assert handler.ttft_s == [record["latency_s"]["ttft"]]
    assert handler.acceptance_rate == record["acceptance_rate"] > 0
    assert handler.ensemble_rate == record["ensemble_rate"] > 0
    assert handler.replacement_rate == record["replacement_rate"] > 0
    assert beside(handler) == (0, 0, 0, 0)


def test_totals_of_a_chain_of_two_calls_add_up():
    handler = EnsembleCallbackHandler()
    messages = []
    chain = TinyChat() | RunnableLambda(lambda message: messages.append(message) or EASY) | TinyChat()
    messages.append(chain.invoke(QUESTION, config={"callbacks": [handler]}))
    check_totals(handler, QUESTION, EASY)
    latencies = [message.response_metadata["safe"]["latency_s"] for message in messages]
    assert handler.latency_s["draft"] == pytest.approx(sum(latency["draft"] for latency in latencies))
    assert handler.latency_s["total"] == pytest.approx(sum(latency["total"] for latency in latencies))
    assert handler.mean_ttft_s == pytest.approx(sum(latency["ttft"] for latency in latencies) / 2)


def test_batches_and_threads_lose_nothing():
    handler = EnsembleCallbackHandler()
    TinyChat().batch([QUESTION, EASY] * 6, config={"callbacks": [handler], "max_concurrency": 8})
    check_totals(handler, *[QUESTION, EASY] * 6)


@pytest.mark.parametrize("model", [TinyChat(), AsyncChat(trace_phases="summary")], ids=["thread", "native"])
def test_totals_are_complete_when_an_async_call_returns(model):
    handler = EnsembleCallbackHandler()

    async def calls():
        await model.ainvoke(QUESTION, config={"callbacks": [handler]})
        check_totals(handler, QUESTION)
        await model.abatch([QUESTION, EASY], config={"callbacks": [handler]})

    asyncio.run(calls())
    check_totals(handler, QUESTION, QUESTION, EASY)


def test_async_events_are_handled_in_the_event_loop():
    threads = []

    class Noting(EnsembleCallbackHandler):
        def on_llm_end(self, response, **kwargs):
            threads.append(threading.current_thread())
            super().on_llm_end(response, **kwargs)

    asyncio.run(TinyChat().ainvoke(EASY, config={"callbacks": [Noting()]}))
    assert threads == [threading.main_thread()]


def test_streamed_answer_is_counted_once():
    handler = EnsembleCallbackHandler()
    for _ in StreamingChat().stream(QUESTION, config={"callbacks": [handler]}):
        pass
    check_totals(handler, QUESTION)
    assert handler.points == [point_record(point) for point in expected(QUESTION).points]


def test_text_models_and_several_prompts_are_counted():
    handler = EnsembleCallbackHandler()
    TinyLLM().invoke(QUESTION, config={"callbacks": [handler]})
    TinyLLM().generate([EASY, QUESTION], callbacks=[handler])
    check_totals(handler, QUESTION, EASY, QUESTION)


def test_every_answer_of_a_run_is_counted_and_others_beside_it_are_not():
    handler = EnsembleCallbackHandler()
    TwoAnswers().invoke(QUESTION, config={"callbacks": [handler]})
    check_totals(handler, QUESTION, EASY)
    assert beside(handler) == (0, 0, 0, 0)


def test_several_prompts_in_one_result_are_counted():
    handler = EnsembleCallbackHandler()
    texts = [[Generation(text="", generation_info=info_of(expected(question)))] for question in (QUESTION, EASY)]
    handler.on_llm_end(LLMResult(generations=texts), run_id=uuid4())
    check_totals(handler, QUESTION, EASY)


# ---------------------------------------------------------------------- what is not


def test_answers_from_the_cache_are_counted_apart():
    handler = EnsembleCallbackHandler()
    model = TinyChat(cache=InMemoryCache())
    for _ in range(3):
        model.invoke(QUESTION, config={"callbacks": [handler]})
    check_totals(handler, QUESTION)
    assert beside(handler) == (2, 0, 0, 0)


def test_other_models_are_counted_and_otherwise_ignored():
    handler = EnsembleCallbackHandler()
    for model in (FakeListChatModel(responses=["a"]), FakeListLLM(responses=["a"])):
        model.invoke(QUESTION, config={"callbacks": [handler]})
    check_totals(handler)
    assert beside(handler) == (0, 2, 0, 0)


def test_failed_runs_are_counted():
    handler = EnsembleCallbackHandler()
    with pytest.raises(ZeroDivisionError):
        Broken().invoke(QUESTION, config={"callbacks": [handler]})
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Broken().ainvoke(QUESTION, config={"callbacks": [handler]}))
    TinyChat().invoke(EASY, config={"callbacks": [handler]})
    check_totals(handler, EASY)
    assert beside(handler) == (0, 0, 2, 0)


def test_stream_that_is_read_no_further_was_stopped():
    handler = EnsembleCallbackHandler()
    stream = StreamingChat().stream(QUESTION, config={"callbacks": [handler]})
    next(stream)
    stream.close()
    check_totals(handler)
    assert beside(handler) == (0, 0, 0, 1)


def test_error_is_counted_once_and_only_of_a_run_that_started():
    handler = EnsembleCallbackHandler()
    run_id = uuid4()
    handler.on_llm_error(ValueError(), run_id=run_id)
    handler.on_chat_model_start({}, [[HumanMessage("")]], run_id=run_id)
    handler.on_llm_error(asyncio.CancelledError(), run_id=run_id)
    handler.on_llm_error(ValueError(), run_id=run_id)
    assert beside(handler) == (0, 0, 0, 1)
    handler.on_llm_start({}, [""], run_id=run_id)
    handler.on_llm_end(answered(), run_id=run_id)
    handler.on_llm_error(ValueError(), run_id=run_id)
    assert beside(handler) == (0, 1, 0, 1)


RECORD = record_of(expected(EASY))
STRANGE = [
    None,
    "safe",
    {"schema_version": SCHEMA_VERSION},
    RECORD | {"schema_version": SCHEMA_VERSION + 1},
    RECORD | {"n_points": None},
    RECORD | {"n_points": "many"},
    RECORD | {"n_points": float("inf")},
    RECORD | {"latency_s": None},
    RECORD | {"latency_s": {"total": 1.0}},
    RECORD | {"latency_s": RECORD["latency_s"] | {"ttft": "soon"}},
]


@pytest.mark.parametrize("record", STRANGE, ids=range(len(STRANGE)))
def test_strange_records_are_those_of_another_model(record):
    handler = EnsembleCallbackHandler()
    handler.on_llm_end(answered({"safe": record}), run_id=uuid4())
    text = LLMResult(generations=[[Generation(text="", generation_info={"safe": record})]])
    handler.on_llm_end(text, run_id=uuid4())
    check_totals(handler)
    assert beside(handler) == (0, 2, 0, 0)


@pytest.mark.parametrize(
    "generations", [[], [[]], [[Generation(text="")]], [[ChatGeneration(message=HumanMessage(""))]]]
)
def test_results_without_any_record_are_those_of_another_model(generations):
    handler = EnsembleCallbackHandler()
    handler.on_llm_end(LLMResult(generations=generations), run_id=uuid4())
    assert beside(handler) == (0, 1, 0, 0)


@pytest.mark.parametrize("points", [None, (), [], 7])
def test_record_without_points_counts(points):
    handler = EnsembleCallbackHandler()
    handler.on_llm_end(answered({"safe": RECORD, "safe_points": points}), run_id=uuid4())
    assert handler.n_runs + handler.n_other_runs == 1
    assert handler.n_runs == (points != 7)
    assert handler.points == []


def test_answer_without_a_first_token_has_no_ttft():
    handler = EnsembleCallbackHandler()
    record = RECORD | {"latency_s": RECORD["latency_s"] | {"ttft": None}}
    handler.on_llm_end(answered({"safe": record}), run_id=uuid4())
    assert (handler.n_runs, handler.ttft_s, handler.mean_ttft_s) == (1, [], None)


# ---------------------------------------------------------------------- the context manager


def test_context_counts_nested_chains_and_threads_and_nothing_after_it():
    model = TinyChat()
    inner = RunnableLambda(lambda question: model.invoke(question).content)
    chain = RunnableParallel(one=inner, other=RunnableLambda(lambda _: EASY) | model)
    with get_ensemble_callback() as totals:
        chain.invoke(QUESTION)
        check_totals(totals, QUESTION, EASY)
        model.batch([EASY] * 3, config={"max_concurrency": 3})
    model.invoke(QUESTION)
    check_totals(totals, QUESTION, EASY, EASY, EASY, EASY)


def test_context_counts_asyncio_tasks():
    async def calls():
        with get_ensemble_callback() as totals:
            chain = RunnableLambda(lambda question: question) | AsyncChat(trace_phases="summary")
            await asyncio.gather(*[asyncio.create_task(chain.ainvoke(question)) for question in (QUESTION, EASY)])
            await TinyChat().abatch([EASY, EASY])
        return totals

    check_totals(asyncio.run(calls()), QUESTION, EASY, EASY, EASY)


def test_context_reaches_threads_without_context_through_the_config():
    def in_a_thread(question, config):
        thread = threading.Thread(target=TinyChat().invoke, args=(question, config))
        thread.start()
        thread.join()

    with get_ensemble_callback() as totals:
        RunnableLambda(in_a_thread).invoke(QUESTION)
    check_totals(totals, QUESTION)


def test_contexts_side_by_side_do_not_see_each_other():
    async def call(question):
        with get_ensemble_callback() as totals:
            await asyncio.sleep(0)
            await TinyChat().ainvoke(question)
        return totals

    async def calls():
        return await asyncio.gather(call(QUESTION), call(EASY))

    one, other = asyncio.run(calls())
    check_totals(one, QUESTION)
    check_totals(other, EASY)


def test_nested_contexts_each_count_all_that_happens_in_them():
    model = TinyChat()

    def inside(question):
        with get_ensemble_callback() as inner:
            model.invoke(question)
        seen.append(inner)
        return question

    seen = []
    with get_ensemble_callback() as outer:
        (RunnableLambda(inside) | model).invoke(QUESTION)
        with get_ensemble_callback() as middle:
            inside(EASY)
        model.invoke(EASY)
    check_totals(seen[0], QUESTION)
    check_totals(seen[1], EASY)
    check_totals(middle, EASY)
    check_totals(outer, QUESTION, QUESTION, EASY, EASY)


def test_context_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), get_ensemble_callback() as totals:
        Broken().invoke(QUESTION)
    TinyChat().invoke(QUESTION)
    check_totals(totals)
    assert totals.n_errors == 1


def test_contexts_leave_one_hook_per_depth_behind():
    def nested(depth):
        with get_ensemble_callback():
            if depth > 1:
                nested(depth - 1)

    nested(3)
    before = len(context._configure_hooks)
    for _ in range(50):
        nested(3)
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(nested, 3)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(context._configure_hooks) == before
    assert all(slot.get() is None for slot in callbacks._slots)


def test_handler_in_the_context_and_in_the_config_counts_once():
    with get_ensemble_callback() as totals:
        TinyChat(callbacks=[totals]).invoke(EASY, config={"callbacks": [totals]})
    check_totals(totals, EASY)


# ---------------------------------------------------------------------- the table


def test_summary_is_an_aligned_table():
    handler = EnsembleCallbackHandler()
    record = RECORD | {"n_tokens": 40, "n_points": 4, "n_replaced": 2, "n_draft_tokens": 80, "n_accepted_tokens": 60}
    seconds = {"tokenize": 0.1, "prefill": 0.4, "draft": 1.0, "verify": 0.3, "ensemble": 0.2, "total": 2.0, "ttft": 0.5}
    handler.on_llm_end(answered({"safe": record | {"latency_s": seconds}}), run_id=uuid4())
    handler.on_llm_end(answered(), run_id=uuid4())
    assert handler.summary().splitlines() == [
        "runs                1  1 of other models",
        "tokens             40",
        "points              4  10.0% of tokens",
        "replaced            2  5.0% of tokens",
        "accepted           60  75.0% of 80 drafted",
        "seconds         2.000",
        "  tokenize      0.100  5.0%",
        "  prefill       0.400  20.0%",
        "  draft         1.000  50.0%",
        "  verify        0.300  15.0%",
        "  ensemble      0.200  10.0%",
        "mean TTFT       0.500",
    ]


def test_summary_of_nothing_has_no_rates(capsys):
    handler = EnsembleCallbackHandler()
    assert handler.summary().split()[:2] == ["runs", "0"]
    assert handler.summary().endswith(" -")
    handler.print_summary()
    handler.print_summary(file := io.StringIO())
    assert file.getvalue() == handler.summary() + "\n"
    assert capsys.readouterr().out == handler.summary() + "\n"

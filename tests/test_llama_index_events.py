"""What LlamaIndex's instrumentation and callbacks hear of an ensemble."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler

from llama_index.llms.safe_llm import EnsembleEventHandler
from llama_index_support import LONG, QUESTION, VERIFIED, everyway, llm, recording, replying, text_of, user
from safe_llm.record import PHASES

WAYS = [
    "complete",
    "chat",
    "stream_complete",
    "stream_chat",
    "acomplete",
    "achat",
    "astream_complete",
    "astream_chat",
]
OURS = ("EnsemblePointEvent", "EnsembleRoundEvent", "EnsembleGenerationEndEvent")
STARTS = ("LLMChatStartEvent", "LLMCompletionStartEvent")
ENDS = ("LLMChatEndEvent", "LLMCompletionEndEvent")


async def called(model, way, question=QUESTION):
    """The last response of one way."""
    result = getattr(model, way)(question if "complete" in way else user(question))
    if way.startswith("a"):
        result = await result
    if "stream" not in way:
        return result
    return [r async for r in result][-1] if way.startswith("a") else list(result)[-1]


@pytest.mark.parametrize("way", WAYS)
async def test_events_of_a_call_carry_its_span(way):
    with recording() as recorder:
        response = await called(llm(), way)
    (start,), (end,) = recorder.named(*STARTS), recorder.named(*ENDS)
    assert start.span_id.startswith(f"SafeLLM.{way}-")
    assert {event.span_id for event in recorder.named(*OURS)} == {start.span_id}
    assert end.response.raw == response.raw
    points = recorder.named("EnsemblePointEvent")
    assert [event.point for event in points] == response.raw["safe_points"] != []
    rounds = recorder.named("EnsembleRoundEvent")
    assert len(rounds) == response.raw["safe"]["n_rounds"]
    assert sum(r.num_draft_tokens for r in rounds) == response.raw["safe"]["n_draft_tokens"]
    assert sum(len(r.outcomes) for r in rounds) == sum(response.raw["safe"]["outcomes"].values())
    assert set(rounds[0].latency_s) == set(PHASES)
    (finished,) = recorder.named("EnsembleGenerationEndEvent")
    assert finished.safe == response.raw["safe"]
    assert finished.safe_points == response.raw["safe_points"]
    assert finished.usage == response.raw["usage"]
    assert finished.finish_reason == "stop"
    assert set(finished.safe["latency_s"]) > set(PHASES)


async def test_concurrent_calls_keep_their_spans():
    model = llm()
    with recording() as recorder:
        await asyncio.gather(*(called(model, "astream_chat") for _ in range(3)))
    spans = {event.span_id for event in recorder.named(*STARTS)}
    assert len(spans) == 3
    for span in spans:
        assert len([e for e in recorder.named("EnsembleGenerationEndEvent") if e.span_id == span]) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_one_llm_event_with_exact_counts_per_call(way):
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 10_000)  # nobody may count by themselves
    debug = LlamaDebugHandler(print_trace_on_end=False)
    model = llm(callback_manager=CallbackManager([counter, debug]))
    response = await called(model, way)
    (event,) = counter.llm_token_counts
    assert event.prompt_token_count == response.raw["usage"]["prompt_tokens"]
    assert event.completion_token_count == response.raw["usage"]["completion_tokens"]
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_waits_once_for_the_rate_limiter(way):
    class Limiter:
        count = 0

        def acquire(self):
            self.count += 1

        async def async_acquire(self):
            self.count += 1

    limiter = Limiter()
    await called(llm(rate_limiter=limiter), way)
    assert limiter.count == 1


def test_a_span_per_call_and_no_more():
    spans = SimpleSpanHandler()
    get_dispatcher().span_handlers.append(spans)
    try:
        llm().chat(user(QUESTION))
        list(llm().stream_complete(QUESTION))
    finally:
        get_dispatcher().span_handlers.remove(spans)
    assert [span.id_.split("-")[0] for span in spans.completed_spans] == ["SafeLLM.chat", "SafeLLM.stream_complete"]


class Raising(BaseEventHandler):
    def handle(self, event, **kwargs):
        raise ZeroDivisionError


async def test_a_handler_that_raises_changes_nothing():
    handler = Raising()
    get_dispatcher().event_handlers.append(handler)
    try:
        responses = await everyway(llm(), QUESTION)
    finally:
        get_dispatcher().event_handlers.remove(handler)
    assert {text_of(r) for r in responses.values()} == {VERIFIED}


def test_a_point_that_a_stop_string_cuts_off_is_an_event_but_no_part_of_the_answer():
    with recording() as recorder:
        response = llm().complete(QUESTION, stop=["new"])
    events = [event.point for event in recorder.named("EnsemblePointEvent")]
    assert events[: len(response.raw["safe_points"])] == response.raw["safe_points"]
    assert len(events) > len(response.raw["safe_points"])


def test_a_stream_that_is_left_has_no_end():
    with recording() as recorder:
        for _ in llm(max_tokens=1000).stream_chat(user(LONG)):
            break
    assert recorder.named("EnsembleRoundEvent")
    assert not recorder.named("EnsembleGenerationEndEvent", *ENDS)
    (error,) = recorder.named("ExceptionEvent")
    assert isinstance(error.exception, GeneratorExit)


# ---------------------------------------------------------------------- the handler


async def test_the_handler_adds_up_a_query():
    model = llm()
    with EnsembleEventHandler().listening() as totals, EnsembleEventHandler().listening() as others:
        raws = [r.raw for r in (await everyway(model, QUESTION)).values()]
    model.complete(QUESTION)  # nobody listens any more
    assert totals.model_dump() == others.model_dump()
    assert totals.n_runs == 8
    assert totals.n_prompt_tokens == sum(raw["usage"]["prompt_tokens"] for raw in raws)
    for name in ("n_tokens", "n_points", "n_replaced", "n_draft_tokens", "n_accepted_tokens"):
        assert getattr(totals, name) == sum(raw["safe"][name] for raw in raws) > 0
    for phase in (*PHASES, "total"):
        assert totals.latency_s[phase] == pytest.approx(sum(raw["safe"]["latency_s"][phase] for raw in raws))
    assert totals.points == [point for raw in raws for point in raw["safe_points"]]
    assert len(totals.ttft_s) == 8


def test_the_summary_is_a_table():
    assert "mean TTFT           -" in EnsembleEventHandler().summary()
    with EnsembleEventHandler().listening() as totals:
        llm().complete(QUESTION)
    lines = totals.summary().splitlines()
    assert lines[0] == "answers             1"
    assert [line.split()[0] for line in lines] == [
        "answers", "prompts", "tokens", "points", "replaced", "accepted", "seconds", *PHASES, "mean",
    ]  # fmt: skip
    assert totals.class_name() == "EnsembleEventHandler"


def test_the_handler_ignores_other_events_and_needs_no_points():
    with EnsembleEventHandler().listening() as totals:
        replying(lambda c: "Yes.").chat(user("?"))
    assert (totals.n_runs, totals.n_points, totals.points) == (1, 0, [])

"""The smallest LangChain models around an ensemble: they report all that there is to report, and do nothing else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation, LLMResult

from langchain_safe_llm._tracing import PhaseTracer, aemit_point, emit_point
from safe_llm import Ensemble
from safe_llm.events import EnsemblePoint, Result, RoundFinished, TextDelta
from safe_llm.record import point_record, safe_record
from safe_llm.testing import scripted_ensemble

QUESTION = "Where is the treasure?"
EASY = "Is it far?"
DRAFTED = {QUESTION: "Under the old oak, two steps to the left.", EASY: "No, not far."}
VERIFIED = {QUESTION: "Under the new oak, two steps to the left.", EASY: "No, not far."}
WORDS = ("treasure", "Under", "oak", "steps", "far")


@functools.cache
def safe() -> Ensemble:
    return scripted_ensemble(DRAFTED, VERIFIED)


@functools.cache
def expected(question: str) -> Result:
    return safe().generate(question)


def record_of(result: Result) -> dict[str, Any]:
    return safe_record(result, members=["drafter", "verifier"], mode="safe", method="unite", fingerprint="0f")


def info_of(result: Result) -> dict[str, Any]:
    return {"safe": record_of(result), "safe_points": [point_record(p) for p in result.points]}


def usage_of(result: Result) -> dict[str, int]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def decoded(prompt: str, run_manager: Any, level: Any) -> Result:
    tracer = PhaseTracer(run_manager, level) if level else None
    with closing(safe().stream(prompt, events=True)) as events:
        for event in events:
            if isinstance(event, EnsemblePoint):
                emit_point(run_manager, point_record(event))
            elif tracer is not None and isinstance(event, RoundFinished):
                tracer.round(event)
    if tracer is not None:
        tracer.finish(event.result)
    return event.result


def chat_result(result: Result) -> ChatResult:
    message = AIMessage(content=result.text, response_metadata=info_of(result), usage_metadata=usage_of(result))
    return ChatResult(generations=[ChatGeneration(message=message)])


class TinyChat(BaseChatModel):
    trace_phases: str | None = None

    @property
    def _llm_type(self) -> str:
        return "tiny"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return chat_result(decoded(messages[-1].content, run_manager, self.trace_phases))


class AsyncChat(TinyChat):
    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        tracer = PhaseTracer(run_manager, self.trace_phases)
        for event in safe().stream(messages[-1].content, events=True):
            if isinstance(event, EnsemblePoint):
                await aemit_point(run_manager, point_record(event))
            elif isinstance(event, RoundFinished):
                tracer.round(event)
        await tracer.afinish(event.result)
        return chat_result(event.result)


class StreamingChat(TinyChat):
    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for event in safe().stream(messages[-1].content, events=True):
            if isinstance(event, TextDelta):
                yield ChatGenerationChunk(message=AIMessageChunk(content=event.text))
            elif isinstance(event, EnsemblePoint):
                info = {"safe_points": [point_record(event)]}
                yield ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=info))
        info = {"safe": record_of(event.result)}
        yield ChatGenerationChunk(
            message=AIMessageChunk(content="", response_metadata=info, usage_metadata=usage_of(event.result))
        )


class TinyLLM(BaseLLM):
    @property
    def _llm_type(self) -> str:
        return "tiny"

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        results = [decoded(prompt, run_manager, None) for prompt in prompts]
        return LLMResult(generations=[[Generation(text=r.text, generation_info=info_of(r))] for r in results])

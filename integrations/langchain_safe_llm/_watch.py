"""What happens beside decoding: custom events of ensemble points, child runs of phases."""

from __future__ import annotations

from typing import cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages.ai import UsageMetadata

from langchain_safe_llm._tracing import PhaseTracer, TraceLevel, aemit_point, emit_point, report_usage
from safe_llm.events import EnsemblePoint, Event, GenerationFinished, Result, RoundFinished
from safe_llm.record import point_record

__all__ = ["Watch", "usage_of"]


def usage_of(result: Result) -> UsageMetadata:
    """Token counts in LangChain's names."""
    return UsageMetadata(
        input_tokens=result.usage.prompt_tokens,
        output_tokens=result.usage.completion_tokens,
        total_tokens=result.usage.total_tokens,
    )


class Watch:
    """Reports one generation to the callbacks of its run.

    Attributes:
        is_idle: Nobody listens, so nobody needs to watch.
    """

    def __init__(
        self,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        level: TraceLevel | None,
        *,
        report_usage: bool = False,
    ) -> None:
        """Watch one generation.

        Args:
            run_manager: Its run.
            level: How its phases are traced.
            report_usage: Tell LangSmith the token counts, which it reads from chat messages only.
        """
        self._report_usage = report_usage
        self.is_idle = run_manager is None or not run_manager.handlers
        self._run_manager = run_manager
        self._tracer = None if level is None or run_manager is None else PhaseTracer(run_manager, level)

    def see(self, event: Event) -> None:
        """Report an event of a synchronous call."""
        if isinstance(event, EnsemblePoint):
            emit_point(self._run_manager, point_record(event))
        elif isinstance(event, GenerationFinished):
            if self._tracer is not None:
                self._tracer.finish(event.result)
            self._report(event.result)
        else:
            self._note(event)

    async def asee(self, event: Event) -> None:
        """Report an event of an asynchronous call; async handlers run in its event loop."""
        if isinstance(event, EnsemblePoint):
            await aemit_point(self._run_manager, point_record(event))
        elif isinstance(event, GenerationFinished):
            if self._tracer is not None:
                await self._tracer.afinish(event.result)
            self._report(event.result)
        else:
            self._note(event)

    def _note(self, event: Event) -> None:
        if self._tracer is not None and isinstance(event, RoundFinished):
            self._tracer.round(event)

    def _report(self, result: Result) -> None:
        if self._report_usage:
            report_usage(self._run_manager, cast("dict[str, int]", usage_of(result)))

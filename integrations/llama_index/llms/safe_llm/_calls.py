"""One call of an ensemble, in the four ways LlamaIndex makes it."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from llama_index.llms.safe_llm._responses import Reader, Step
from llama_index.llms.safe_llm.events import report, report_end
from safe_llm.concurrency import iterate_in_thread
from safe_llm.events import Event, Result
from safe_llm.record import point_record
from safe_llm.types import Prompt

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["Call", "R"]

R = TypeVar("R", ChatResponse, CompletionResponse)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[R]):
    """One prompt on its way to responses. Use it once.

    All four ways fold the same events, so they cannot differ in what they return.

    Attributes:
        ensemble: Who answers.
        prompt: The question.
        params: The engine's parameters.
        reader: Takes the answer apart.
        respond: Makes a response of what was read, what is new, and the record of a finished answer.
        timeout: Seconds after which it is given up, or None.
        span_id: The span of the method that was called.
    """

    ensemble: Ensemble
    prompt: Prompt
    params: Mapping[str, Any]
    reader: Reader
    respond: Callable[[Reader, Step, dict[str, Any] | None], R]
    timeout: float | None
    span_id: str | None

    def run(self) -> R:
        """Return the finished answer."""
        *_, last = self.stream()
        return last.model_copy(update={"delta": None})

    async def arun(self) -> R:
        """As `run`; the loop stays free, and cancellation stops decoding within a round."""
        async with aclosing(self.astream()) as responses:
            last = [response async for response in responses][-1]
        return last.model_copy(update={"delta": None})

    def stream(self) -> Generator[R, None, None]:
        """Return the responses; the arguments are checked before this returns."""
        return self._responses(self._events(threading.Event()))

    def reported_stream(self, reported: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[R, None, None]:
        """As `stream`, as a call that `reported`, one of LlamaIndex's decorators, makes an LLM event of.

        The decorators do not close what they wrap: if a handler keeps the exception of a reader that has left, its
        traceback keeps the request, which would go on waiting for that reader.

        Args:
            reported: The decorator.
            *args: What the method was called with, `self` first.
            **kwargs: Its keywords.
        """
        responses = self.stream()
        return _closing_both(reported(lambda *_, **__: responses)(*args, **kwargs), responses)

    async def reported_astream(
        self, reported: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[R, None]:
        """As `reported_stream`."""
        responses = self.astream()

        async def start(*_: Any, **__: Any) -> AsyncGenerator[R, None]:
            return responses

        return _aclosing_both(await reported(start)(*args, **kwargs), responses)

    def _responses(self, events: Generator[Event, None, None]) -> Generator[R, None, None]:
        with closing(events):
            for event in events:
                yield from self._see(event)

    async def astream(self) -> AsyncGenerator[R, None]:
        """As `stream`, but nothing is checked before the first response is awaited."""
        async with aclosing(iterate_in_thread(self._events)) as events:
            async for event in events:
                for response in self._see(event):
                    yield response

    def _events(self, cancel: threading.Event) -> Generator[Event, None, None]:
        return self.ensemble.stream(
            self.prompt, events=True, detailed=False, cancel=cancel, timeout=self.timeout, **self.params
        )

    def _see(self, event: Event) -> Iterator[R]:
        report(event, self.span_id)
        for step in self.reader.feed(event):
            raw = None
            if self.reader.result is not None:
                raw = self._raw(self.reader.result)
                report_end(raw, self.span_id)
            yield self.respond(self.reader, step, raw)

    def _raw(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        return {
            "model_name": "+".join(member.name for member in self.ensemble.members),
            "finish_reason": "tool_calls" if self.reader.calls else str(result.finish_reason),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            },
            "safe": self.ensemble.record(result),
            "safe_points": [point_record(point) for point in result.points],
        }


def _closing_both(outer: Generator[R, None, None], inner: Generator[R, None, None]) -> Generator[R, None, None]:
    with closing(inner):
        yield from outer


async def _aclosing_both(outer: AsyncGenerator[R, None], inner: AsyncGenerator[R, None]) -> AsyncGenerator[R, None]:
    async with aclosing(inner), aclosing(outer):
        async for response in outer:
            yield response

"""From the engine's events to answers: each one taken apart as it comes, several of one request side by side."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

from safe_llm.concurrency import iterate_in_thread
from safe_llm.events import Event, GenerationFinished, Result, TextDelta
from safe_llm.server.replies import CallDelta, CalledFunction, FinishWord
from safe_llm.tool_calling import (
    CALL_BEGIN,
    CALL_END,
    AnswerParser,
    ContentPart,
    InvalidToolCall,
    Part,
    ReasoningPart,
)
from safe_llm.types import ToolCall

__all__ = ["Choice", "Make", "together"]

Make = Callable[[threading.Event], Iterator[Event]]
"""Starts one answer; the argument cancels it within a round."""


class Choice:
    """One answer while it is written.

    Attributes:
        index: Its number in the request.
        content: The text so far. A block that is no valid call is text: nobody may run it, and whoever reads the answer
            should see it.
        reasoning: The thoughts so far.
        calls: Tool calls so far.
        result: The engine's result, once the answer is finished.
    """

    def __init__(self, index: int, parser: AnswerParser | None) -> None:
        """Begin an answer; without a parser all of it is text."""
        self.index = index
        self.content = ""
        self.reasoning = ""
        self.calls: list[CallDelta] = []
        self.result: Result | None = None
        self._parser = parser

    def feed(self, event: Event) -> list[str | ReasoningPart | CallDelta]:
        """Take an event, and return what is new: text, thoughts or a whole call."""
        if isinstance(event, TextDelta):
            parts: Sequence[Part] = self._parser.feed(event.text) if self._parser else [ContentPart(event.text)]
            return [self._add(part) for part in parts]
        if isinstance(event, GenerationFinished):
            parts = self._parser.finish() if self._parser else []
            self.result = event.result
            return [self._add(part) for part in parts]
        return []

    def _add(self, part: Part) -> str | ReasoningPart | CallDelta:
        if isinstance(part, ReasoningPart):
            self.reasoning += part.text
            return part
        if isinstance(part, ToolCall):
            self.calls.append(_call(part, len(self.calls)))
            return self.calls[-1]
        text = f"{CALL_BEGIN}\n{part.arguments}\n{CALL_END}" if isinstance(part, InvalidToolCall) else part.text
        self.content += text
        return text

    @property
    def finish_reason(self) -> FinishWord | None:
        """OpenAI's word for the end, or None before it."""
        if self.result is None:
            return None
        if self.result.finish_reason == "length":
            return "length"  # calls before one that was cut off are not all that was wanted
        return "tool_calls" if self.calls else "stop"


def _call(call: ToolCall, index: int) -> CallDelta:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return CallDelta(
        index=index, id=call.id, type="function", function=CalledFunction(name=call.name, arguments=arguments)
    )


# ---------------------------------------------------------------------- several at once


async def together(makes: Sequence[Make]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of several answers as they come, each with the number of its answer.

    Each is driven by a thread of its own; the ensemble decodes them in one batch. The first failure ends all of them.
    Leaving cancels what still runs.
    """
    news: asyncio.Queue[tuple[int, Event] | _End] = asyncio.Queue(maxsize=len(makes))
    pumps = [asyncio.create_task(_pump(number, make, news)) for number, make in enumerate(makes)]
    left = len(pumps)
    try:
        while left:
            item = await news.get()
            if not isinstance(item, _End):
                yield item
                continue
            left -= 1
            if item.error is not None:
                raise item.error
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class _End:
    """One answer is over."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _pump(number: int, make: Make, news: asyncio.Queue[tuple[int, Event] | _End]) -> None:
    error = None
    try:
        async with aclosing(iterate_in_thread(make)) as events:
            async for event in events:
                await news.put((number, event))
    except Exception as failure:
        error = failure
    await news.put(_End(error))

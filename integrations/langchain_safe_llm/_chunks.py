"""One streamed answer: the engine's events as message chunks that LangChain can merge.

What merges how decides the form: text and lists are concatenated, but two unequal numbers are an error and two equal
names become one long name. So each ensemble point travels in a list on its own chunk, and everything else on the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk, GenerationChunk

from langchain_safe_llm._messages import arguments_of
from safe_llm.events import EnsemblePoint, Event, GenerationFinished, Result, TextDelta
from safe_llm.record import point_record
from safe_llm.tool_calling import AnswerParser, ContentPart, Part, ReasoningPart
from safe_llm.types import ToolCall

__all__ = ["ChatChunks", "TextChunks"]

PointRecords = list[dict[str, Any]]


class _Points:
    """Ensemble points on their way to a chunk: each goes with the first text that shows its token."""

    def __init__(self) -> None:
        self._waiting: list[EnsemblePoint] = []
        self._num_sent = 0
        self._num_bytes = 0

    def add(self, point: EnsemblePoint) -> None:
        """Hold a point until its token is visible: a stop string may still cut it off."""
        self._waiting.append(point)

    def shown(self, text: str) -> PointRecords:
        """Return the points whose tokens begin in the answer up to and including `text`."""
        self._num_bytes += len(text.encode())
        ready = [point for point in self._waiting if point.byte_offset < self._num_bytes]
        self._waiting = self._waiting[len(ready) :]
        self._num_sent += len(ready)
        return [point_record(point) for point in ready]

    def rest(self, result: Result) -> PointRecords:
        """Return the points of the whole answer that no text has carried."""
        return [point_record(point) for point in result.points[self._num_sent :]]


class TextChunks:
    """Folds events into chunks of a text model."""

    def __init__(self, last: Callable[[Result], Mapping[str, Any]]) -> None:
        self._points = _Points()
        self._last = last

    def feed(self, event: Event) -> Iterator[GenerationChunk]:
        """Yield the chunks that an event makes."""
        if isinstance(event, EnsemblePoint):
            self._points.add(event)
        elif isinstance(event, TextDelta):
            points = self._points.shown(event.text)
            yield GenerationChunk(text=event.text, generation_info={"safe_points": points} if points else None)
        elif isinstance(event, GenerationFinished):
            info = {**self._last(event.result), "safe_points": self._points.rest(event.result)}
            yield GenerationChunk(text="", generation_info=info)


class ChatChunks:
    """Folds events into chunks of a chat model."""

    def __init__(
        self,
        *,
        tools: bool,
        last: Callable[[Result, bool], Mapping[str, Any]],
        usage: Callable[[Result], UsageMetadata],
        repeat_points: bool,
    ) -> None:
        """Begin an answer.

        Args:
            tools: Whether tool calls are looked for.
            last: Metadata of the last chunk, from the result and whether there were calls.
            usage: Token counts, for the last chunk.
            repeat_points: Put all points on the last chunk: LangChain's v3 events keep only the last of a key.
        """
        self._parser = AnswerParser(tools=tools)
        self._points = _Points()
        self._last = last
        self._usage = usage
        self._all: PointRecords | None = [] if repeat_points else None
        self._num_calls = 0
        self._has_calls = False

    def feed(self, event: Event) -> Iterator[ChatGenerationChunk]:
        """Yield the chunks that an event makes."""
        if isinstance(event, EnsemblePoint):
            self._points.add(event)
        elif isinstance(event, TextDelta):
            yield from self._chunks(self._parser.feed(event.text), self._points.shown(event.text))
        elif isinstance(event, GenerationFinished):
            yield from self._chunks(self._parser.finish(), [])
            yield self._end(event.result)

    def _chunks(self, parts: Sequence[Part], points: PointRecords) -> Iterator[ChatGenerationChunk]:
        if self._all is not None:
            self._all += points
        messages = [self._message(part) for part in parts]
        if points and not messages:
            messages = [AIMessageChunk(content="")]  # the text is held back, the news is not
        for number, message in enumerate(messages):
            if points and number == 0:
                message.response_metadata = {"safe_points": points}
            yield ChatGenerationChunk(message=message)

    def _end(self, result: Result) -> ChatGenerationChunk:
        points = self._points.rest(result)
        if self._all is not None:
            points = self._all + points
        message = AIMessageChunk(
            content="",
            usage_metadata=self._usage(result),
            response_metadata={**self._last(result, self._has_calls), "safe_points": points},
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def _message(self, part: Part) -> AIMessageChunk:
        if isinstance(part, ContentPart):
            return AIMessageChunk(content=part.text)
        if isinstance(part, ReasoningPart):
            return AIMessageChunk(content="", additional_kwargs={"reasoning_content": part.text})
        self._has_calls = self._has_calls or isinstance(part, ToolCall)
        self._num_calls += 1
        call = tool_call_chunk(name=part.name, args=arguments_of(part), id=part.id, index=self._num_calls - 1)
        return AIMessageChunk(content="", tool_call_chunks=[call])

"""One answer while it is written: the engine's events as LlamaIndex's responses.

A response's text is all of the answer so far and its delta what is new. Whatever is not text stands on the last
response only: handlers and tracers take a call's numbers from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from safe_llm.events import Event, GenerationFinished, Result, TextDelta
from safe_llm.tool_calling import (
    CALL_BEGIN,
    CALL_END,
    AnswerParser,
    ContentPart,
    InvalidToolCall,
    Part,
    ReasoningPart,
)
from safe_llm.types import TokenLogprob, ToolCall

__all__ = ["Reader", "Step", "chat_response", "completion_response"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one response adds to the one before it."""

    text: str = ""
    thinking: str = ""


class Reader:
    """Takes an answer apart while it is written.

    Attributes:
        text: The answer so far, without thoughts and calls. A block that is no valid call is text: nobody may run it,
            and whoever reads the answer should see it.
        thinking: The thoughts so far.
        calls: Calls so far.
        invalid_calls: Blocks so far that are no valid calls.
        result: The engine's result, once the answer is finished.
    """

    def __init__(self, parser: AnswerParser | None) -> None:
        """Begin an answer; without a parser all of it is text."""
        self.text = ""
        self.thinking = ""
        self.calls: list[ToolCall] = []
        self.invalid_calls: list[InvalidToolCall] = []
        self.result: Result | None = None
        self._parser = parser

    def feed(self, event: Event) -> Iterator[Step]:
        """Yield a step for every change that an event makes, and one when the answer is finished."""
        if isinstance(event, TextDelta):
            yield from map(self._add, self._parser.feed(event.text) if self._parser else [ContentPart(event.text)])
        elif isinstance(event, GenerationFinished):
            yield from map(self._add, self._parser.finish() if self._parser else [])
            self.result = event.result
            yield Step()

    def _add(self, part: Part) -> Step:
        step = Step()
        if isinstance(part, ContentPart):
            step = Step(text=part.text)
        elif isinstance(part, ReasoningPart):
            step = Step(thinking=part.text)
        elif isinstance(part, ToolCall):
            self.calls.append(part)
        else:
            self.invalid_calls.append(part)
            step = Step(text=f"{CALL_BEGIN}\n{part.arguments}\n{CALL_END}")
        self.text += step.text
        self.thinking += step.thinking
        return step


def chat_response(reader: Reader, step: Step, raw: dict[str, Any] | None) -> ChatResponse:
    """Return the response of a chat call at one step."""
    blocks: list[ContentBlock] = []
    if reader.thinking:
        blocks.append(ThinkingBlock(content=reader.thinking))
    if reader.text or not (reader.thinking or reader.calls):
        blocks.append(TextBlock(text=reader.text))
    blocks += [ToolCallBlock(tool_call_id=c.id, tool_name=c.name, tool_kwargs=dict(c.arguments)) for c in reader.calls]
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=_call_records(reader)),
        delta=step.text,
        raw=raw,
        logprobs=_logprobs(reader.result),
        additional_kwargs={"thinking_delta": step.thinking} if step.thinking else {},
    )


def completion_response(reader: Reader, step: Step, raw: dict[str, Any] | None) -> CompletionResponse:
    """Return the response of a completion call at one step."""
    additional = {"thinking": reader.thinking} if reader.thinking else {}
    if step.thinking:
        additional["thinking_delta"] = step.thinking
    return CompletionResponse(
        text=reader.text, delta=step.text, raw=raw, logprobs=_logprobs(reader.result), additional_kwargs=additional
    )


def _call_records(reader: Reader) -> dict[str, Any]:
    """Calls in OpenAI's form, where LlamaIndex's structured programs, memories and tracers still look for them."""
    records: dict[str, Any] = {}
    if reader.calls:
        records["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in reader.calls
        ]
    if reader.invalid_calls:
        records["invalid_tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments, "error": call.error}
            for call in reader.invalid_calls
        ]
    return records


def _logprobs(result: Result | None) -> list[list[LogProb]] | None:
    if result is None or result.logprobs is None:
        return None
    return [_alternatives(token) for token in result.logprobs]


def _alternatives(token: TokenLogprob) -> list[LogProb]:
    """The token itself, then the drafter's other best ones; NaN where the drafter was not asked for it."""
    first = (token.token, float("nan") if token.logprob is None else token.logprob)
    pairs: Sequence[tuple[bytes, float]] = [first, *(pair for pair in token.top if pair[0] != token.token)]
    return [LogProb(token=t.decode("utf-8", errors="replace"), logprob=p, bytes=list(t)) for t, p in pairs]

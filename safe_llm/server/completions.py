"""Choices as OpenAI's objects: whole bodies, and the chunks of streams."""

from __future__ import annotations

import codecs
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from safe_llm.ensemble import Ensemble
from safe_llm.events import Result
from safe_llm.record import logprob_records
from safe_llm.server.answers import Choice
from safe_llm.server.jobs import Job
from safe_llm.server.replies import (
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptDetails,
    Reply,
    UsageReply,
)
from safe_llm.tool_calling import ReasoningPart
from safe_llm.types import FinishDetail, TokenLogprob

__all__ = ["ChatWriter", "CompletionWriter", "Writer", "usage_of"]

UNKNOWN_LOGPROB = -9999.0
"""OpenAI's number for a log-probability that is not known: the drafter was not asked for the token."""

New = str | ReasoningPart | CallDelta


class Writer(Protocol):
    """Writes the replies of one request."""

    def whole(self, choices: Sequence[Choice]) -> Reply:
        """Return the body of finished answers."""
        ...

    def begin(self, index: int, /) -> Iterator[Reply]:
        """Yield what a stream says of an answer before its first text."""
        ...

    def chunk(self, choice: Choice, new: New) -> Reply:
        """Return the event with a new piece of an answer."""
        ...

    def end(self, choice: Choice) -> Reply:
        """Return the event that ends an answer."""
        ...

    def usage(self, choices: Sequence[Choice]) -> Reply:
        """Return the event with the usage of all answers."""
        ...


def usage_of(results: Sequence[Result], n: int) -> UsageReply:
    """Return the tokens of all answers of a request, `n` to a prompt, whose prompts count once."""
    prompt = sum(result.usage.prompt_tokens for result in results[::n])
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results[::n])
    return UsageReply(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
    )


class _Frame:
    """What all replies to one request have in common."""

    def __init__(self, job: Job, ensemble: Ensemble, prefix: str) -> None:
        self._job = job
        self._ensemble = ensemble
        self._facts: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": f"fp_{ensemble.fingerprint}",
        }

    def _usage(self, choices: Sequence[Choice]) -> UsageReply:
        return usage_of([choice.result for choice in choices if choice.result is not None], self._job.n)

    def _records(self, *choices: Choice) -> list[dict[str, Any]]:
        return [self._ensemble.record(choice.result) for choice in choices if choice.result is not None]

    def _streamed(self) -> dict[str, Any]:
        """Further fields of a chunk: where the usage is wanted, each but the last says that it has none."""
        return {**self._facts, "usage": None} if self._job.includes_usage else self._facts


class ChatWriter(_Frame):
    """Writes chats."""

    def __init__(self, job: Job, ensemble: Ensemble) -> None:
        super().__init__(job, ensemble, "chatcmpl")

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        """Return the body of finished answers."""
        return ChatCompletion(
            **self._facts,
            object="chat.completion",
            choices=[_chat_choice(choice) for choice in choices],
            usage=self._usage(choices),
            safe_llm=self._records(*choices),
        )

    def begin(self, index: int, /) -> Iterator[ChatChunk]:
        """Yield the event that names the role."""
        yield self._chunk(index, Delta(role="assistant", content=""))

    def chunk(self, choice: Choice, new: New) -> ChatChunk:
        """Return the event with a new piece of an answer."""
        if isinstance(new, CallDelta):
            return self._chunk(choice.index, Delta(tool_calls=[new]))
        if isinstance(new, ReasoningPart):
            return self._chunk(choice.index, Delta(reasoning_content=new.text))
        return self._chunk(choice.index, Delta(content=new))

    def end(self, choice: Choice) -> ChatChunk:
        """Return the event that ends an answer; it has the log-probabilities of all tokens."""
        last = ChunkChoice(
            index=choice.index,
            delta=Delta(),
            logprobs=_chat_logprobs(choice.result),
            finish_reason=choice.finish_reason,
        )
        return ChatChunk(
            **self._streamed(), object="chat.completion.chunk", choices=[last], safe_llm=self._records(choice)
        )

    def usage(self, choices: Sequence[Choice]) -> ChatChunk:
        """Return the event with the usage of all answers."""
        return ChatChunk(**{**self._facts, "usage": self._usage(choices)}, object="chat.completion.chunk", choices=[])

    def _chunk(self, index: int, delta: Delta) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return ChatChunk(**self._streamed(), object="chat.completion.chunk", choices=[choice])


class CompletionWriter(_Frame):
    """Writes completions."""

    def __init__(self, job: Job, ensemble: Ensemble) -> None:
        super().__init__(job, ensemble, "cmpl")

    def whole(self, choices: Sequence[Choice]) -> Completion:
        """Return the body of finished answers."""
        return Completion(
            **self._facts,
            object="text_completion",
            choices=[self._choice(choice, choice.content) for choice in choices],
            usage=self._usage(choices),
            safe_llm=self._records(*choices),
        )

    def begin(self, _index: int, /) -> Iterator[Completion]:
        """Yield nothing: a completion has no role."""
        yield from ()

    def chunk(self, choice: Choice, new: New) -> Completion:
        """Return the event with a new piece of an answer."""
        text = CompletionChoice(index=choice.index, text=str(new), logprobs=None, finish_reason=None)
        return Completion(**self._streamed(), object="text_completion", choices=[text])

    def end(self, choice: Choice) -> Completion:
        """Return the event that ends an answer; it has the log-probabilities of all tokens."""
        return Completion(
            **self._streamed(),
            object="text_completion",
            choices=[self._choice(choice, "")],
            safe_llm=self._records(choice),
        )

    def usage(self, choices: Sequence[Choice]) -> Completion:
        """Return the event with the usage of all answers."""
        return Completion(**{**self._facts, "usage": self._usage(choices)}, object="text_completion", choices=[])

    def _choice(self, choice: Choice, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=_completion_logprobs(choice.result),
            finish_reason=choice.finish_reason,
        )


def _chat_choice(choice: Choice) -> ChatChoice:
    said: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        said["reasoning_content"] = choice.reasoning
    if choice.calls:
        said["content"] = choice.content or None
        # OpenAI numbers the calls of streams only
        said["tool_calls"] = [CallDelta(id=c.id, type=c.type, function=c.function) for c in choice.calls]
    return ChatChoice(
        index=choice.index,
        message=AnswerMessage(**said),
        logprobs=_chat_logprobs(choice.result),
        finish_reason=choice.finish_reason or "stop",
    )


def _chat_logprobs(result: Result | None) -> ChatLogprobs | None:
    if result is None or result.logprobs is None:
        return None
    records = logprob_records(_visible(result, result.logprobs))
    for record in records:
        record["logprob"] = _known(record["logprob"])
    return ChatLogprobs(content=records, refusal=None)


def _completion_logprobs(result: Result | None) -> CompletionLogprobs | None:
    if result is None or result.logprobs is None:
        return None
    tokens = _visible(result, result.logprobs)
    return CompletionLogprobs(
        tokens=[_text(token.token) for token in tokens],
        token_logprobs=[_known(token.logprob) for token in tokens],
        top_logprobs=[{_text(other): value for other, value in token.top} for token in tokens],
        text_offset=list(_offsets(tokens)),
    )


def _visible(result: Result, tokens: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """The tokens of the text: without END, and without those that a stop string cut off."""
    ends = itertools.accumulate(len(token.token) for token in tokens)
    starts = [0, *ends]
    limit = len(result.text.encode()) if result.finish_detail is FinishDetail.STOP_STRING else starts[-1]
    return [token for token, start in zip(tokens, starts, strict=False) if token.token and start < limit]


def _offsets(tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """Where each token begins in the text, in characters; in the middle of one it is that one's end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    for token in tokens:
        yield offset
        offset += len(decoder.decode(token.token))


def _known(logprob: float | None) -> float:
    return UNKNOWN_LOGPROB if logprob is None else logprob


def _text(token: bytes) -> str:
    return token.decode("utf-8", errors="replace")

"""What answers look like: OpenAI's objects, field by field, with ours beside them (`safe_llm`, `reasoning_content`).

Fields that are set are sent, null or not: strict clients want `finish_reason: null`, not its absence. What OpenAI
leaves out where there is none (`tool_calls`) is not set.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AnswerMessage",
    "CallDelta",
    "CalledFunction",
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprobs",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "ErrorReply",
    "FinishWord",
    "Health",
    "ModelCard",
    "ModelList",
    "PromptDetails",
    "UsageReply",
]

FinishWord = Literal["stop", "length", "tool_calls"]
Records = list[dict[str, Any]]


class Reply(BaseModel):
    """Base of all that is sent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class PromptDetails(Reply):
    """Of the prompt's tokens: how many were not computed, since another request had them in the cache."""

    cached_tokens: int


class UsageReply(Reply):
    """Tokens, in the drafter's tokens; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(Reply):
    """A tool's name and its arguments, JSON as text."""

    name: str
    arguments: str


class CallDelta(Reply):
    """One whole call; `index` in streams only."""

    index: int = 0
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(Reply):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = Field(default_factory=list)


class ChatLogprobs(Reply):
    """Per token; `safe_llm.record.logprob_records` describes it."""

    content: list[dict[str, Any]] | None
    refusal: list[dict[str, Any]] | None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(Reply):
    """Reply of `/v1/chat/completions`. `safe_llm` has one record per choice: what the ensemble did."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str
    safe_llm: Records


class Delta(Reply):
    """What is new."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = Field(default_factory=list)


class ChunkChoice(Reply):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None


class ChatChunk(Reply):
    """One event of a streamed chat. `safe_llm` stands on the chunk that ends a choice, with that choice's record."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageReply | None = None
    system_fingerprint: str
    safe_llm: Records = Field(default_factory=list)


class CompletionLogprobs(Reply):
    """Per token, in OpenAI's old form."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None


class Completion(Reply):
    """Reply of `/v1/completions`, and one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | None = None
    system_fingerprint: str
    safe_llm: Records = Field(default_factory=list)


class ModelCard(Reply):
    """One name that requests may use. `max_model_len` is the smallest context window."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    members: list[str]


class ModelList(Reply):
    """Reply of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Reply):
    """Reply of `/health`; `status` is `ok`, `failing` (the last answers all failed) or `closing`."""

    status: Literal["ok", "failing", "closing"]
    running: int
    waiting: int
    consecutive_failures: int


class ErrorBody(Reply):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """Reply of every request that failed."""

    error: ErrorBody

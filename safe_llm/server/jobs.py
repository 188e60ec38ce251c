"""A checked request as the engine takes it: prompts and parameters, within the server's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_llm.ensemble import Ensemble
from safe_llm.server.problems import ApiError
from safe_llm.server.schema import ChatMessage, ChatRequest, CompletionRequest, GenerationBody
from safe_llm.server.settings import ServerSettings
from safe_llm.types import Message, Prompt, Role, SamplingParams

__all__ = ["Job", "chat_job", "completion_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one request asks for.

    Attributes:
        model: The name it used.
        prompts: What to answer.
        n: How many answers each prompt gets. Answer `i` is of prompt `i // n`.
        params: Parameters of the engine.
        prompt_field: Where the prompt stands in the request, for errors.
        calls_tools: Whether tool calls are looked for.
        streams: Whether the answer is sent as it comes.
        includes_usage: Whether a stream ends with the usage.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int
    params: Mapping[str, Any]
    prompt_field: str
    calls_tools: bool
    streams: bool
    includes_usage: bool

    @property
    def size(self) -> int:
        """How many answers it takes."""
        return len(self.prompts) * self.n

    def params_of(self, index: int) -> dict[str, Any]:
        """Return the parameters of one answer: seeds count on from the given one, or all answers would be alike."""
        seed = self.params["seed"]
        return {**self.params, "seed": None if seed is None else seed + index}


def chat_job(asked: ChatRequest, settings: ServerSettings, ensemble: Ensemble) -> Job:
    """Return the job of a chat request.

    Raises:
        ApiError: An unknown model (404), a value over the server's limits, fields that contradict each other.
        PromptError: A message or a tool that is not usable.
    """
    if None not in (asked.max_tokens, asked.max_completion_tokens):
        raise _refusal("give max_completion_tokens or max_tokens, not both", "max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise _refusal("top_logprobs needs logprobs: true", "top_logprobs")
    max_tokens = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    choice = asked.tool_choice
    form = {
        "tools": [tool.model_dump(exclude_unset=True) for tool in asked.tools or ()] or None,
        "tool_choice": choice if choice is None or isinstance(choice, str) else choice.function.name,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "response_format": asked.response_format
        and asked.response_format.model_dump(by_alias=True, exclude_unset=True),
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    return _job(
        asked,
        [_conversation(asked.messages)],
        _decoding(asked, max_tokens, settings, ensemble) | form,
        settings,
        prompt_field="messages",
        calls_tools=bool(asked.tools) and choice != "none",
    )


def completion_job(asked: CompletionRequest, settings: ServerSettings, ensemble: Ensemble) -> Job:
    """Return the job of a completion request; raises as `chat_job`."""
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    params = _decoding(asked, asked.max_tokens, settings, ensemble) | {"logprobs": asked.logprobs}
    return _job(asked, prompts, params, settings, prompt_field="prompt", calls_tools=False)


def _job(
    asked: GenerationBody,
    prompts: Sequence[Prompt],
    params: Mapping[str, Any],
    settings: ServerSettings,
    *,
    prompt_field: str,
    calls_tools: bool,
) -> Job:
    if asked.model not in settings.model_names:
        known = ", ".join(settings.model_names)
        raise ApiError(404, f"no such model here; served are: {known}", param="model", code="model_not_found")
    job = Job(
        model=asked.model,
        prompts=tuple(prompts),
        n=asked.n or 1,
        params=params,
        prompt_field=prompt_field,
        calls_tools=calls_tools,
        streams=bool(asked.stream),
        includes_usage=bool(asked.stream_options and asked.stream_options.include_usage),
    )
    if asked.stream_options is not None and not asked.stream:
        raise _refusal("stream_options needs stream: true", "stream_options")
    if job.size > settings.max_n:
        raise _refusal(f"{job.size} answers in one request, at most {settings.max_n} are allowed", "n")
    num_chars = sum(map(_num_chars, prompts))
    if num_chars > settings.max_prompt_chars:
        message = f"the prompt has {num_chars} characters, at most {settings.max_prompt_chars} are allowed"
        raise ApiError(400, message, param=prompt_field, code="prompt_too_long")
    return job


def _within(max_tokens: int | None, settings: ServerSettings, ensemble: Ensemble) -> int:
    """Return the limit of an answer: what is asked for, or the default as far as it is allowed."""
    limit = settings.max_tokens_limit or ensemble.max_context
    if max_tokens is None:
        return min(SamplingParams.of(ensemble.sampling).max_tokens, limit)
    if max_tokens > limit:
        raise _refusal(f"max_tokens is {max_tokens}, at most {limit} are allowed", "max_tokens")
    return max_tokens


def _decoding(
    asked: GenerationBody, max_tokens: int | None, settings: ServerSettings, ensemble: Ensemble
) -> dict[str, Any]:
    is_greedy = asked.top_p == 0.0  # the smallest nucleus is the best token
    return {
        "max_tokens": _within(max_tokens, settings, ensemble),
        "min_tokens": asked.min_tokens,
        "temperature": 0.0 if is_greedy else asked.temperature,
        "top_p": None if is_greedy else asked.top_p,
        "seed": ensemble.sampling.get("seed") if asked.seed is None else asked.seed % 2**64,
        "stop": asked.stop,
    }


def _refusal(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _conversation(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages as members read them; a tool's result gets the name of the call that it answers."""
    names: dict[str, str] = {}
    read = []
    for message in messages:
        role: Role = "system" if message.role == "developer" else message.role
        values = message.model_dump(include={"content", "name", "tool_calls", "tool_call_id"}, exclude_unset=True)
        if role == "tool" and message.name is None:
            values["name"] = names.get(message.tool_call_id or "")
        read.append(Message.of({"role": role, **values}))
        names |= {call.id: call.name for call in read[-1].tool_calls}
    return read


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    messages = map(Message.of, prompt)
    return sum(len(m.content) + sum(len(str(call.arguments)) for call in m.tool_calls) for m in messages)

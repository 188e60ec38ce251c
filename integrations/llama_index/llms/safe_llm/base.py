"""`SafeLLM`: an ensemble as a LlamaIndex model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llama_index.core.base.llms.generic_utils import messages_to_prompt as default_messages_to_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    ToolCallBlock,
)
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools.types import BaseTool
from pydantic import ConfigDict, Field, PrivateAttr

from llama_index.llms.safe_llm._calls import Call, R
from llama_index.llms.safe_llm._errors import NoToolCallError
from llama_index.llms.safe_llm._messages import as_messages
from llama_index.llms.safe_llm._params import as_tools, call_params, checked_names
from llama_index.llms.safe_llm._responses import Reader, chat_response, completion_response
from llama_index.llms.safe_llm._structured import StructuredPrograms
from safe_llm.concurrency import run_in_thread
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, PromptError
from safe_llm.requests import DECODING
from safe_llm.sharing import LazyEnsemble
from safe_llm.tool_calling import AnswerParser
from safe_llm.types import Message, Prompt, SamplingParams

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["SafeLLM"]

Member = str | MemberConfig | dict[str, Any]


class SafeLLM(StructuredPrograms, FunctionCallingLLM, CustomLLM):
    """Several models that decode one answer together, as one function-calling model.

    Nothing is loaded before the first call (or the first look at `metadata`); objects that describe the same ensemble
    share it. Besides these keywords there are LlamaIndex's own: `system_prompt`, `messages_to_prompt`,
    `completion_to_prompt`, `pydantic_program_mode`, `callback_manager`, `rate_limiter`.

    Attributes:
        ensemble: A loaded `safe_llm.Ensemble`; or one of the next two.
        preset: Name of a ready ensemble (`demo`), path of a `.toml` file, or an `EnsembleSpec`.
        drafter: The best model: hub id, local folder, `.gguf` file, demo name, or a `MemberConfig`.
        verifiers: The others, with `drafter`.
        ensemble_config: How they decide: fields of `EnsembleConfig`.
        max_tokens: Most tokens of an answer; also `max_new_tokens`. Default 256.
        temperature: 0 (the default) is greedy.
        top_p: Nucleus mass.
        seed: Makes sampling reproducible.
        stop: Strings that end the answer; a call's own replace them.
        min_tokens: No end before this many tokens.
        logprobs: How many alternatives of the drafter to report per token, in the last response's `logprobs`.
        timeout: Seconds after which a call is given up with a `TimeoutError`, within one round.
        is_chat_model: Whether `complete` and queries go through the members' chat templates. By default they do if any
            member has one.
        is_function_calling_model: Whether agents and programs may rely on tools. False makes `AgentWorkflow` take a
            ReAct agent.
        show_progress: Show progress bars while weights are fetched and loaded.

    Example:
        >>> from llama_index.llms.safe_llm import SafeLLM
        >>> llm = SafeLLM(preset="demo", max_tokens=64)  # doctest: +SKIP
        >>> response = llm.complete("What is the capital of France?")  # doctest: +SKIP
        >>> response.text, response.raw["usage"], response.raw["safe"]["n_points"]  # doctest: +SKIP
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    ensemble: Any = Field(default=None, exclude=True, repr=False)
    preset: str | EnsembleSpec | None = None
    drafter: Member | None = None
    verifiers: tuple[Member, ...] = ()
    ensemble_config: EnsembleConfig | dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    timeout: float | None = None
    is_chat_model: bool | None = None
    is_function_calling_model: bool = True
    show_progress: bool = True

    _lazy: LazyEnsemble | None = PrivateAttr(default=None)

    def __init__(self, **values: Any) -> None:
        values = checked_names(values, type(self).model_fields)
        sampling = SamplingParams.of({name: values.get(name) for name in DECODING})
        if values.get("stop") is not None:
            values["stop"] = list(sampling.stop)
        super().__init__(**_plain(values))
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"timeout must be more than 0 seconds, got {self.timeout}")
        self._handle()

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialized objects."""
        return "Safe_llm"

    # ------------------------------------------------------------------ the ensemble

    def _handle(self) -> LazyEnsemble:
        self._lazy = LazyEnsemble.of(
            ensemble=self.ensemble,
            preset=self.preset,
            drafter=self.drafter,
            verifiers=self.verifiers,
            config=self.ensemble_config,
            progress=self.show_progress,
            previous=self._lazy,
        )
        return self._lazy

    def load(self) -> Ensemble:
        """Return the ensemble, loading it if this is its first use."""
        return self._handle().get()

    async def aload(self) -> Ensemble:
        """As `load`, without holding up the event loop."""
        handle = self._handle()
        return handle.get() if handle.is_loaded else await run_in_thread(lambda _: handle.get())

    @property
    def model_name(self) -> str:
        """The members' names, the drafter's first, joined by `+`."""
        return "+".join(self._handle().names)

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts with. Loads the ensemble: only then are windows and templates known."""
        return LLMMetadata(
            context_window=self.load().max_context,
            num_output=self._num_output,
            is_chat_model=self._is_chat,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe the model for events and traces.

        The base class reads `metadata`, which would load the weights on the event loop, before an async call begins.
        """
        if self._handle().is_loaded:
            known = self.metadata.model_dump()
        else:
            known = {"model_name": self.model_name, "num_output": self._num_output}
        return {"class_name": self.class_name(), **known, **self._defaults, "ensemble": self._handle().key}

    @property
    def _defaults(self) -> dict[str, Any]:
        return {name: value for name in DECODING if (value := getattr(self, name)) is not None}

    @property
    def _num_output(self) -> int:
        return SamplingParams.of({**self._handle().sampling, **self._defaults}).max_tokens

    @property
    def _is_chat(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return any(member.prompter.template is not None for member in self.load().members)

    def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids, for `Settings.tokenizer`. Loads the ensemble.

        They are those of the member with the smallest context window, in whose tokens `metadata.context_window` counts.
        """
        ensemble = self.load()
        member = next(m for m in ensemble.members if m.backend.max_context == ensemble.max_context)
        return member.vocabulary.encode_prompt(text)

    def __getstate__(self) -> dict[str, Any]:
        if self.ensemble is not None:  # the base class would leave it out, and the copy could never answer
            _refuse_pickling()
        return super().__getstate__()

    # ------------------------------------------------------------------ calls

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation.

        Args:
            messages: The conversation; it is not changed.
            **kwargs: Parameters of this call: those of the constructor, `json_schema`, `response_format`, `regex`,
                `grammar`, `tools`, `tool_choice`, `parallel_tool_calls`.
        """
        return self._chat(messages, kwargs).run()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`."""
        await self.aload()
        return await self._chat(messages, kwargs).arun()

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """As `chat`, in pieces: each response has all of the answer so far, and `delta` is what is new."""
        call = self._chat(messages, kwargs)
        return call.reported_stream(llm_chat_callback(), self, messages, **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """As `stream_chat`."""
        await self.aload()
        call = self._chat(messages, kwargs)
        return await call.reported_astream(llm_chat_callback(), self, messages, **kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; of a chat model, as the one message of a user.

        Args:
            prompt: The prompt.
            formatted: It is what the members shall read, to the letter: without a template and a system prompt.
            **kwargs: As for `chat`.
        """
        return self._completion(prompt, formatted, kwargs).run()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`."""
        await self.aload()
        return await self._completion(prompt, formatted, kwargs).arun()

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """As `complete`, in pieces: each response has all of the answer so far, and `delta` is what is new."""
        call = self._completion(prompt, formatted, kwargs)
        return call.reported_stream(llm_completion_callback(), self, prompt, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """As `stream_complete`."""
        await self.aload()
        call = self._completion(prompt, formatted, kwargs)
        return await call.reported_astream(llm_completion_callback(), self, prompt, **kwargs)

    def _chat(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Call[ChatResponse]:
        params = call_params(self._defaults, kwargs)
        tools = bool(params.get("tools")) and params.get("tool_choice") != "none"
        prompt: Prompt = self._with_system(as_messages(messages))
        if self.messages_to_prompt is not default_messages_to_prompt and self.messages_to_prompt is not None:
            prompt = self.messages_to_prompt(messages)
        return self._call(prompt, params, Reader(AnswerParser(tools=tools)), chat_response)

    def _completion(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Call[CompletionResponse]:
        params = call_params(self._defaults, kwargs)
        if not prompt:
            raise PromptError("the prompt is empty", hint="give at least one character")
        own = self.completion_to_prompt
        is_custom = own is not None and own is not default_completion_to_prompt
        if self._is_chat and not formatted and not is_custom:
            messages = self._with_system([Message(role="user", content=prompt)])
            return self._call(messages, params, Reader(AnswerParser(tools=False)), completion_response)
        if not formatted:
            prompt = self._extend_prompt(own(prompt) if own is not None else prompt)
        return self._call(prompt, params, Reader(None), completion_response)

    def _call(self, prompt: Prompt, params: Mapping[str, Any], reader: Reader, respond: Callable[..., R]) -> Call[R]:
        return Call(
            ensemble=self.load(),
            prompt=prompt,
            params=params,
            reader=reader,
            respond=respond,
            timeout=self.timeout,
            span_id=active_span_id.get(),
        )

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if not messages or not self.system_prompt:
            return messages
        return [Message(role="system", content=self.system_prompt), *messages]

    def _extend_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Leave messages as they are: `chat` adds the system prompt, whoever calls it."""
        return messages

    # ------------------------------------------------------------------ tools

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002 - nothing is printed
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | Mapping[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(role="user", content=user_msg) if isinstance(user_msg, str) else user_msg)
        return {
            "messages": messages,
            "tools": as_tools(tools),
            "tool_choice": tool_choice or ("required" if tool_required else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **kwargs: Any,  # noqa: ARG002 - the base class's signature
    ) -> list[ToolSelection]:
        """Return the calls of an answer.

        Args:
            response: The answer.
            error_on_no_tool_call: Raise if it has none; otherwise return an empty list.
            **kwargs: Not used.

        Raises:
            NoToolCallError: It has none, or none that is valid.
        """
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if error_on_no_tool_call and not blocks:
            invalid = response.message.additional_kwargs.get("invalid_tool_calls")
            if not invalid:
                raise NoToolCallError("the answer has no tool call", hint="tool_required=True enforces one")
            raise NoToolCallError(
                f"the answer has no valid tool call: {invalid[0]['error']}",
                hint="raise max_tokens if the answer was cut off",
            )
        return [
            ToolSelection(tool_id=b.tool_call_id or "", tool_name=b.tool_name, tool_kwargs=b.tool_kwargs)  # type: ignore[arg-type]
            for b in blocks
        ]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor keywords with paths as text and a serialized spec as a spec, so that JSON brings them back."""
    plain: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
    if isinstance(plain.get("preset"), dict):
        plain["preset"] = EnsembleSpec.from_mapping(plain["preset"])
    if isinstance(plain.get("verifiers"), (list, tuple)):
        plain["verifiers"] = tuple(str(v) if isinstance(v, Path) else v for v in plain["verifiers"])
    return plain


def _refuse_pickling() -> NoReturn:
    raise TypeError("an LLM made of a loaded ensemble cannot be pickled; make it with preset= or drafter=")

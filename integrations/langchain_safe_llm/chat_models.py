"""`ChatSafeLLM`: an ensemble as a LangChain chat model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough
from langchain_core.runnables.config import get_config_list
from langchain_core.tools import BaseTool

from langchain_safe_llm._base import EnsembleModel
from langchain_safe_llm._chunks import ChatChunks
from langchain_safe_llm._messages import (
    as_ai_message,
    as_json_schema,
    as_messages,
    as_tool,
    as_tools,
)
from langchain_safe_llm._parsers import call_parser, text_parser
from langchain_safe_llm._watch import Watch, usage_of
from safe_llm.concurrency import iterate_in_thread
from safe_llm.errors import ConfigError
from safe_llm.events import Result
from safe_llm.requests import AnswerForm, schema_of, tool_choice_of
from safe_llm.tool_calling import parse_answer

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["ChatSafeLLM"]


class ChatSafeLLM(EnsembleModel, BaseChatModel):
    """Several models that decode one answer together, as one chat model.

    Setup:
        `pip install "safe-llm-ensemble[langchain]"`. No account and no key: the models run here.

    Key init args, the ensemble (one of three):
        preset: A ready ensemble, for instance `"demo"`.
        drafter, verifiers: Your own models.
        ensemble: A loaded `safe_llm.Ensemble`.

    Key init args, decoding:
        max_tokens, temperature, top_p, seed, stop, min_tokens, logprobs. A call may give each of them anew.

    Key init args, other:
        timeout: Seconds after which a call is given up.
        streaming: True streams where the whole answer is asked for too, so that handlers see its tokens; False never
            streams.

    Nothing is loaded before the first call; objects that describe the same ensemble share it.

    Instantiate and invoke:
        >>> from langchain_safe_llm import ChatSafeLLM
        >>> model = ChatSafeLLM(preset="demo", max_tokens=64)  # doctest: +SKIP
        >>> message = model.invoke("What is the capital of France?")  # doctest: +SKIP
        >>> message.content, message.usage_metadata  # doctest: +SKIP

    Stream and async:
        `stream`, `astream`, `ainvoke`, `batch`, `abatch`; concurrent calls share the engine's batches, and a cancelled
        one stops within a round.

    Tool calling:
        `bind_tools`; the calls a model writes are valid JSON of the tool's arguments, since nothing else can be
        decoded. A call that `max_tokens` cuts off goes to `invalid_tool_calls`.

    Structured output:
        `with_structured_output(schema, method="function_calling" | "json_schema" | "json_mode")`.

    Token usage:
        `message.usage_metadata`, in the drafter's tokens.

    Response metadata:
        `model_name`, `finish_reason`, `safe` (members, counts, rates, `latency_s` per phase) and `safe_points` (where
        the ensemble acted, with each member's probabilities). docs/langchain.md describes them.
    """

    streaming: bool | None = None

    @property
    def _llm_type(self) -> str:
        return "safe-llm-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params("chat", stop, kwargs)

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            temperature=True,
        )
        handle = self._handle()
        if handle.is_loaded:  # before that nobody knows, and constructing must not load
            profile["max_input_tokens"] = handle.get().max_context
        return profile

    def load(self) -> Ensemble:
        """As `EnsembleModel.load`; from then on `profile` has `max_input_tokens`, the smallest context window."""
        ensemble = super().load()
        if self.profile is not None and "max_input_tokens" not in self.profile:
            self.profile = {**self.profile, "max_input_tokens": ensemble.max_context}
        return ensemble

    # ------------------------------------------------------------------ calls

    def _call_of(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The conversation and the parameters of one call, as the engine takes them."""
        return list(as_messages(messages)), self._params(stop, kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, params = self._call_of(messages, stop, kwargs)
        return self._chat_result(self._result(prompt, params, Watch(run_manager, self.trace_phases)), params)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        prompt, params = self._call_of(messages, stop, kwargs)
        try:
            result = await self._aresult(prompt, params, Watch(run_manager, self.trace_phases))
        except asyncio.CancelledError as error:
            if run_manager is not None:  # core does not end a cancelled run
                await run_manager.on_llm_error(error, response=LLMResult(generations=[]))
            raise
        return self._chat_result(result, params)

    def _chat_result(self, result: Result, params: Mapping[str, Any]) -> ChatResult:
        answer = parse_answer(result.text, tools=_calls_tools(params))
        message = as_ai_message(
            answer,
            usage_metadata=usage_of(result),
            response_metadata=self._metadata(result, has_calls=bool(answer.tool_calls)) | self._points(result),
        )
        info = {"finish_reason": message.response_metadata["finish_reason"]}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        prompt, params = self._call_of(messages, stop, kwargs)
        watch, chunks = Watch(run_manager, self.trace_phases), self._chunks(params, run_manager)
        with closing(self._events(prompt, params)) as events:
            for event in events:
                watch.see(event)
                for chunk in chunks.feed(event):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        prompt, params = self._call_of(messages, stop, kwargs)
        watch, chunks = Watch(run_manager, self.trace_phases), self._chunks(params, run_manager)
        async with aclosing(iterate_in_thread(lambda cancel: self._events(prompt, params, cancel))) as events:
            async for event in events:
                await watch.asee(event)
                for chunk in chunks.feed(event):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                    yield chunk

    def _chunks(self, params: Mapping[str, Any], run_manager: object) -> ChatChunks:
        return ChatChunks(
            tools=_calls_tools(params),
            last=lambda result, has_calls: self._metadata(result, has_calls=has_calls),
            usage=usage_of,
            repeat_points=run_manager is not None,  # only the v3 path passes one
        )

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several conversations; they share the engine's batches, `max_batch_size` at a time.

        The base class runs few at once, as many as there are cores to wait with; a batch costs no thread more here.
        """
        size = self.load().config.max_batch_size
        configs = [
            RunnableConfig(**{**c, "max_concurrency": c.get("max_concurrency") or size})
            for c in get_config_list(config, len(inputs))
        ]
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    # ------------------------------------------------------------------ tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Return the drafter's token ids of `text`. Loads the ensemble."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._token_ids(text)

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Return how many tokens the drafter reads: its template around the messages and tools. Loads the ensemble."""
        shown = AnswerForm(tools=as_tools(tools or ())).shown_tools
        return len(self.load().members[0].prompter.encode(as_messages(messages), shown))

    # ------------------------------------------------------------------ tools and schemas

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Give the model tools.

        Args:
            tools: Functions, pydantic classes, LangChain tools, or OpenAI's mappings.
            tool_choice: `"auto"`; `"any"`, `"required"` or True for at least one call; a tool's name; `"none"`.
            parallel_tool_calls: Allow several calls in one answer; default True.
            **kwargs: Bound as they are. `strict` changes nothing: arguments are always enforced.

        Raises:
            ConfigError: A tool that JSON Schema cannot describe, or a choice that is not among them.
        """
        described = as_tools(tools)
        form: dict[str, Any] = {"tools": described, "tool_choice": tool_choice_of(tool_choice)}
        if parallel_tool_calls is not None:
            form["parallel_tool_calls"] = parallel_tool_calls
        AnswerForm(**form).compiled()  # what cannot be enforced is said here, not in the middle of an agent
        return super().bind(**form, **{key: value for key, value in kwargs.items() if key != "strict"})

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,  # noqa: ARG002 - schemas are always enforced
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answer in a form that is enforced while decoding.

        Args:
            schema: A pydantic class, a TypedDict, a JSON Schema or an OpenAI tool. None with `json_mode` only.
            method: `"function_calling"` shows the schema to the members as a tool that must be called;
                `"json_schema"` enforces it on the answer's text and shows it to nobody: say in the prompt what you
                want; `"json_mode"` enforces any JSON object.
            include_raw: Return `{"raw", "parsed", "parsing_error"}` instead of what was parsed.
            strict: Changes nothing: schemas are always enforced.
            **kwargs: None are known.

        Raises:
            ConfigError: An unknown method or keyword, or a schema that cannot be enforced.
        """
        if kwargs:
            raise ConfigError(f"with_structured_output got unknown arguments: {', '.join(kwargs)}")
        if method not in ("function_calling", "json_schema", "json_mode"):
            raise ConfigError(
                f"unknown method {method!r}", hint="methods are function_calling, json_schema and json_mode"
            )
        if schema is None and method != "json_mode":
            raise ConfigError(f"method {method!r} needs a schema", hint="give one, or use method='json_mode'")
        traced = {"kwargs": {"method": method}, "schema": schema}
        if method == "function_calling":
            model, parser = self._through_a_tool(cast("dict[str, Any] | type", schema), traced)
        else:
            form = {"type": "json_object"} if method == "json_mode" else _response_format(schema)
            AnswerForm(json_schema=schema_of(form)).compiled()
            model = super().bind(response_format=form, ls_structured_output_format=traced)
            parser = text_parser(schema)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def _through_a_tool(
        self, schema: dict[str, Any] | type, traced: dict[str, Any]
    ) -> tuple[Runnable[LanguageModelInput, AIMessage], BaseOutputParser[Any]]:
        name = as_tool(schema)["function"]["name"]
        model = self.bind_tools(
            [schema], tool_choice=name, parallel_tool_calls=False, ls_structured_output_format=traced
        )
        return model, call_parser(schema, name)


def _calls_tools(params: Mapping[str, Any]) -> bool:
    return bool(params.get("tools")) and params.get("tool_choice") != "none"


def _response_format(schema: Any) -> dict[str, Any]:
    try:
        described = as_json_schema(schema)
    except Exception as error:  # pydantic and LangChain raise whatever the type provokes
        raise ConfigError(
            f"the schema cannot be described in JSON Schema: {type(error).__name__}",
            hint="give a pydantic class, a TypedDict, or a JSON Schema with a title",
        ) from error
    return {"type": "json_schema", "json_schema": {"name": described.get("title", "answer"), "schema": described}}

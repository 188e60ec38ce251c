"""`SafeLLM`: an ensemble as a LangChain text model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import PrivateAttr

from langchain_safe_llm._base import EnsembleModel, cache_names, call_params
from langchain_safe_llm._chunks import TextChunks
from langchain_safe_llm._watch import Watch, usage_of
from safe_llm.concurrency import iterate_in_thread, run_in_thread
from safe_llm.events import GenerationFinished, Result
from safe_llm.requests import PARAMETERS

__all__ = ["SafeLLM"]


class SafeLLM(EnsembleModel, BaseLLM):
    """Several models that continue one text together, as one text model. For chat models use `ChatSafeLLM`.

    Setup:
        `pip install "safe-llm-ensemble[langchain]"`. No account and no key: the models run here.

    Key init args:
        Those of `ChatSafeLLM`.

    Instantiate and invoke:
        >>> from langchain_safe_llm import SafeLLM
        >>> llm = SafeLLM(preset="demo", max_tokens=32)  # doctest: +SKIP
        >>> llm.invoke("The capital of France is")  # doctest: +SKIP

    `batch` and `generate` decode all prompts as one batch of the engine. What happened is in each generation's
    `generation_info`: `finish_reason`, `usage`, `safe`, `safe_points`.
    """

    _call: dict[str, Any] = PrivateAttr(default_factory=dict)
    _runs: tuple[Any, ...] = PrivateAttr(default=())  # of this call's prompts; core passes the first one's only

    @property
    def _llm_type(self) -> str:
        return "safe-llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self._identity | cache_names(self._call)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params("llm", stop, self._call | kwargs)

    def _params(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return super()._params(stop, {**self._call, **kwargs})

    # ------------------------------------------------------------------ the cache's key

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As `BaseLLM.generate`; a call's parameters are part of the cache's key, which the base class forgets."""
        model, rest = self._with_call(kwargs)
        return super(SafeLLM, model).generate(prompts, stop, callbacks, **rest)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] = None,
        **kwargs: Any,
    ) -> LLMResult:
        """As `generate`."""
        model, rest = self._with_call(kwargs)
        return await super(SafeLLM, model).agenerate(prompts, stop, callbacks, **rest)

    def _with_call(self, kwargs: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Return a model that has a call's parameters for its own, and the other keywords."""
        given = call_params(kwargs)
        model = self.model_copy()
        model._call = self._call | {key: value for key, value in given.items() if key in PARAMETERS}
        return model, {key: value for key, value in given.items() if key not in PARAMETERS}

    def _generate_helper(self, prompts: list[str], stop: Any, run_managers: Any, **kwargs: Any) -> LLMResult:
        self._runs = tuple(run_managers)  # `self` is the copy that `generate` made for this call
        return super()._generate_helper(prompts, stop, run_managers, **kwargs)

    async def _agenerate_helper(self, prompts: list[str], stop: Any, run_managers: Any, **kwargs: Any) -> LLMResult:
        self._runs = tuple(run_managers)
        return await super()._agenerate_helper(prompts, stop, run_managers, **kwargs)

    # ------------------------------------------------------------------ calls

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params, watch = self._params(stop, kwargs), self._watch(run_manager)
        if self._is_one_run(prompts, watch):
            return self._llm_result([self._result(prompts[0], params, watch)])
        watches = [self._watch(run) for run in self._runs]
        results = self._generated(prompts, params)
        for one, result in zip(watches, results, strict=False):
            for point in result.points:
                one.see(point)
            one.see(GenerationFinished(index=0, result=result))
        return self._llm_result(results)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params, watch = self._params(stop, kwargs), self._watch(run_manager)
        if self._is_one_run(prompts, watch):
            return self._llm_result([await self._aresult(prompts[0], params, watch)])
        watches = [self._watch(run) for run in self._runs]
        results = await run_in_thread(lambda cancel: self._generated(prompts, params, cancel))
        for one, result in zip(watches, results, strict=False):
            for point in result.points:
                await one.asee(point)
            await one.asee(GenerationFinished(index=0, result=result))
        return self._llm_result(results)

    @staticmethod
    def _is_one_run(prompts: list[str], watch: Watch) -> bool:
        # of several prompts core passes the first one's run only: what the others do must not be reported there
        return len(prompts) == 1 and not watch.is_idle

    def _watch(self, run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> Watch:
        return Watch(run_manager, self.trace_phases, report_usage=True)

    def _llm_result(self, results: list[Result]) -> LLMResult:
        generations = [[Generation(text=result.text, generation_info=self._info(result))] for result in results]
        prompt_tokens = sum(result.usage.prompt_tokens for result in results)
        completion_tokens = sum(result.usage.completion_tokens for result in results)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return LLMResult(generations=generations, llm_output={"token_usage": usage, "model_name": self.model_name})

    def _info(self, result: Result) -> dict[str, Any]:
        return self._metadata(result) | {"usage": usage_of(result)} | self._points(result)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        params, chunks = self._params(stop, kwargs), TextChunks(self._last)
        watch = self._watch(run_manager)
        with closing(self._events(prompt, params)) as events:
            for event in events:
                watch.see(event)
                for chunk in chunks.feed(event):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        params, chunks = self._params(stop, kwargs), TextChunks(self._last)
        watch = self._watch(run_manager)
        async with aclosing(iterate_in_thread(lambda cancel: self._events(prompt, params, cancel))) as events:
            async for event in events:
                await watch.asee(event)
                for chunk in chunks.feed(event):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _last(self, result: Result) -> dict[str, Any]:
        return self._metadata(result) | {"usage": usage_of(result)}

    # ------------------------------------------------------------------ tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Return the drafter's token ids of `text`. Loads the ensemble."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._token_ids(text)

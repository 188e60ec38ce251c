"""What the two model classes share: which ensemble, decoding parameters, one call."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from langchain_core.language_models.base import LangSmithParams
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from langchain_safe_llm._errors import translated
from langchain_safe_llm._version import __version__
from langchain_safe_llm._watch import Watch
from safe_llm.concurrency import iterate_in_thread, run_in_thread
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.errors import Cancelled, UnknownNameError
from safe_llm.events import Event, GenerationFinished, Result
from safe_llm.record import logprob_records, point_record
from safe_llm.requests import DECODING, named
from safe_llm.sharing import LazyEnsemble
from safe_llm.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["EnsembleModel", "cache_names", "call_params"]

_IGNORED = frozenset(("stream", "strict"))  # of core, and of tools, whose arguments are always enforced

Member = str | Path | MemberConfig | dict[str, Any]


class EnsembleModel(BaseModel):
    """Fields and calls of `SafeLLM` and `ChatSafeLLM`.

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
        logprobs: How many alternatives of the drafter to report per token, in `response_metadata["logprobs"]`.
        timeout: Seconds after which a call is given up with a `TimeoutError`, within one round.
        trace_phases: Report what each phase took as child runs of the model's run: `"summary"` one per phase,
            `"blocks"` several.
        show_progress: Show progress bars while weights are fetched and loaded.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    ensemble: Any = Field(default=None, exclude=True, repr=False)
    preset: str | Path | EnsembleSpec | None = None
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
    timeout: float | None = Field(default=None, gt=0)
    trace_phases: Literal["summary", "blocks"] | None = None
    show_progress: bool = True

    _lazy: LazyEnsemble | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = named(values)
        known = {name for field, info in cls.model_fields.items() for name in (field, info.alias) if name}
        for key in values:
            if key not in known:
                raise UnknownNameError("parameter", key, known)
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        return values

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._handle()
        SamplingParams.of({name: getattr(self, name) for name in DECODING})
        self._add_version("langchain-safe-llm", __version__)  # type: ignore[attr-defined]
        return self

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
        """Return the ensemble, loading it if this is its first use. Objects that describe the same one share it."""
        return self._handle().get()

    @property
    def model_name(self) -> str:
        """The members' names, the drafter's first, joined by `+`."""
        return "+".join(self._handle().names)

    @property
    def _identity(self) -> dict[str, Any]:
        """What decides the answers; for cache keys and traces."""
        handle = self._handle()
        return {
            "model_name": self.model_name,
            "ensemble": handle.key,
            **cache_names({name: getattr(self, name) for name in DECODING}),
        }

    def _tracing_params(
        self, kind: Literal["chat", "llm"], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> LangSmithParams:
        params = asdict(SamplingParams()) | self._handle().sampling | self._params(stop, kwargs)
        name, temperature, stops = kwargs.get("model"), params["temperature"], params["stop"]
        traced = LangSmithParams(
            ls_provider="safe_llm",
            ls_model_type=kind,
            ls_model_name=name if isinstance(name, str) else self.model_name,
            ls_max_tokens=params["max_tokens"],
        )
        if isinstance(temperature, (int, float)):  # what is not valid is said where the call is made
            traced["ls_temperature"] = float(temperature)
        if stops and isinstance(stops, (str, list, tuple)):
            traced["ls_stop"] = [stops] if isinstance(stops, str) else list(stops)
        return traced

    # ------------------------------------------------------------------ one call

    def _params(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the object's parameters with a call's, which win; None is as if it was not given."""
        params: dict[str, Any] = {}
        for given in ({name: getattr(self, name) for name in DECODING}, call_params(kwargs), {"stop": stop}):
            params |= {key: value for key, value in given.items() if value is not None}
        return params

    def _generated(
        self, prompts: Sequence[Prompt], params: Mapping[str, Any], cancel: threading.Event | None = None
    ) -> list[Result]:
        """Decode prompts as one batch of the engine."""
        with translated():
            return self.load().generate(list(prompts), cancel=cancel, timeout=self.timeout, **params)

    def _events(
        self, prompt: Prompt, params: Mapping[str, Any], cancel: threading.Event | None = None
    ) -> Generator[Event, None, None]:
        """Decode one prompt; closing the iterator stops decoding."""
        with translated():
            yield from self.load().stream(
                prompt, events=True, detailed=False, cancel=cancel, timeout=self.timeout, **params
            )

    def _result(self, prompt: Prompt, params: Mapping[str, Any], watch: Watch) -> Result:
        """Decode one prompt and show every event to `watch`."""
        if watch.is_idle:
            return self._generated([prompt], params)[0]
        with closing(self._events(prompt, params)) as events:
            for event in events:
                watch.see(event)
                if isinstance(event, GenerationFinished):
                    return event.result
        raise Cancelled("the request ended without a result")

    async def _aresult(self, prompt: Prompt, params: Mapping[str, Any], watch: Watch) -> Result:
        """As `_result`; stops within a round when nobody waits for it any more."""
        if watch.is_idle:
            return (await run_in_thread(lambda cancel: self._generated([prompt], params, cancel)))[0]
        async with aclosing(iterate_in_thread(lambda cancel: self._events(prompt, params, cancel))) as events:
            async for event in events:
                await watch.asee(event)
                if isinstance(event, GenerationFinished):
                    return event.result
        raise Cancelled("the request ended without a result")

    def _metadata(self, result: Result, *, has_calls: bool = False) -> dict[str, Any]:
        """What the last chunk, or the whole answer, carries besides its text; without the points."""
        is_whole = result.finish_reason == "stop"  # calls before one that was cut off are not all that was wanted
        metadata: dict[str, Any] = {
            "model_name": self.model_name,
            "model_provider": "safe_llm",
            "finish_reason": "tool_calls" if has_calls and is_whole else str(result.finish_reason),
            "safe": self.load().record(result),
        }
        if result.logprobs is not None:
            metadata["logprobs"] = {"content": logprob_records(result.logprobs)}
        return metadata

    @staticmethod
    def _points(result: Result) -> dict[str, Any]:
        return {"safe_points": [point_record(point) for point in result.points]}

    # ------------------------------------------------------------------ tokens

    def _token_ids(self, text: str) -> list[int]:
        """The drafter's ids of a text, without BOS."""
        return self.load().members[0].vocabulary.encode_prompt(text)


def cache_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as a cache's key has them: core writes a call's own `stop` over one of that name."""
    return {"stop_sequences" if key == "stop" else key: value for key, value in params.items()}


def call_params(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's keywords by their own names, without those that mean nothing here."""
    return named({key: value for key, value in kwargs.items() if key not in _IGNORED})

"""The public API: several models, used like one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, overload

from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig, check_names, preset
from safe_llm.engine import Engine
from safe_llm.errors import ConfigError, GenerationError, PromptError, SafeLLMError
from safe_llm.events import Event, GenerationFinished, Result, TextDelta
from safe_llm.member import Member
from safe_llm.methods.base import Method
from safe_llm.record import safe_record
from safe_llm.requests import make_requests
from safe_llm.row import Row
from safe_llm.scheduler import Scheduler
from safe_llm.types import GenerationRequest, Prompt, SamplingParams

__all__ = ["Ensemble", "load_members"]


class Ensemble:
    """Several language models that decode one answer together.

    Safe to use from many threads; as a context manager it closes itself.

    Example:
        >>> ensemble = Ensemble.from_preset("demo")  # doctest: +SKIP
        >>> ensemble.generate("The capital of France is").text  # doctest: +SKIP
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: EnsembleConfig | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        method: Method | None = None,
    ) -> None:
        """Build an ensemble of loaded members.

        Args:
            members: The drafter first, then the verifiers.
            config: How they decide; default: `EnsembleConfig()`.
            sampling: Defaults for the decoding parameters of every request.
            method: A method of your own instead of the one that `config` names.

        Raises:
            ConfigError: No members, two of one name, weights that do not fit, or a method that a member cannot serve.
        """
        if not members:
            raise ConfigError("an ensemble needs at least one member")
        check_names([member.name for member in members])
        has_dense_scores = all(member.backend.has_dense_scores for member in members)
        self.config = (config or EnsembleConfig()).resolved(has_dense_scores=has_dense_scores)
        self.sampling = dict(sampling or {})
        SamplingParams.of(self.sampling)
        self._all_members = tuple(members)
        self._engine = Engine(members, self.config, method=method)
        self._scheduler = Scheduler(self._engine, self.config.max_batch_size)

    # ------------------------------------------------------------------ construction

    @classmethod
    def from_preset(cls, name: str, *, progress: bool = True, **options: Any) -> Self:
        """Load a ready ensemble; weights are fetched on first use.

        Args:
            name: `demo` or `demo3`.
            progress: Show progress bars on a terminal.
            **options: Fields of `EnsembleConfig` to change.
        """
        return cls.from_spec(preset(name), progress=progress, **options)

    @classmethod
    def from_pretrained(
        cls,
        drafter: str | Path | MemberConfig,
        verifiers: Sequence[str | Path | MemberConfig] = (),
        *,
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Load an ensemble of your own models.

        Args:
            drafter: The best model: demo name, local folder, `.gguf` file, hub id, or a MemberConfig.
            verifiers: The others.
            progress: Show progress bars on a terminal.
            **options: Fields of `EnsembleConfig`: `weights`, `method`, `lookahead`, ...
        """
        spec = EnsembleSpec(drafter=_member_config(drafter), verifiers=tuple(map(_member_config, verifiers)))
        return cls.from_spec(spec, progress=progress, **options)

    @classmethod
    def from_spec(cls, spec: EnsembleSpec, *, progress: bool = True, **options: Any) -> Self:
        """Load what a spec (a preset, a TOML file) describes, with fields of `EnsembleConfig` changed by `options`."""
        config = spec.ensemble.updated(options)
        config.normalized_weights(len(spec.members))  # before minutes of loading, not after
        SamplingParams.of(spec.sampling)
        return cls(load_members(spec.members, progress=progress), config, sampling=spec.sampling)

    # ------------------------------------------------------------------ facts

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, the drafter first."""
        return self._all_members

    @property
    def method(self) -> Method:
        """How distributions are merged."""
        return self._engine.method

    @property
    def max_context(self) -> int:
        """The smallest context window of the members that take part, in that member's tokens."""
        return min(member.backend.max_context for member in self._engine.members)

    @property
    def fingerprint(self) -> str:
        """Identity of all that decides answers (weights, templates, settings), for cache keys: 16 hex digits."""
        identity = {
            "members": [(m.fingerprint, m.prompter.fingerprint, m.backend.max_context) for m in self._all_members],
            "config": self.config.model_dump(),
            "method": repr(self._engine.method),
            "sampling": self.sampling,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def is_closed(self) -> bool:
        """Whether it refuses new requests."""
        return self._scheduler.is_closed

    @property
    def occupancy(self) -> tuple[int, int]:
        """Requests in the running batch, and requests that wait for a place in it."""
        return self._scheduler.occupancy

    def record(self, result: Result) -> dict[str, Any]:
        """Return what an answer of this ensemble did, as JSON values without its text (`safe_llm.record`)."""
        return safe_record(
            result,
            members=[member.name for member in self._all_members],
            mode=self.config.mode,
            method=self.config.method,
            fingerprint=self.fingerprint,
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # frameworks copy the objects that hold it; the weights stay one

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ensemble of loaded members cannot be pickled; give the other process its preset or its models' names"
        )

    def __repr__(self) -> str:
        names = ", ".join(member.name for member in self._all_members)
        return f"<Ensemble of {names}; {self.config.mode}, {self.config.method}>"

    # ------------------------------------------------------------------ generation

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **params: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
        **params: Any,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        return_exceptions: Literal[True],
        **params: Any,
    ) -> list[Result | SafeLLMError]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **params: Any,
    ) -> Any:
        """Decode one prompt, or several as one batch.

        Args:
            prompt: A text, a conversation (list of messages), or a list of these.
            cancel: Set it from another thread to stop within one round.
            timeout: Seconds after which it is given up, within one round.
            return_exceptions: For a list: put a failed prompt's error in its place instead of raising the first.
            **params: Fields of `SamplingParams` and of `safe_llm.requests.AnswerForm` (schema, tools).

        Returns:
            A Result, or for a list a list of Results in its order.

        Raises:
            PromptError: A prompt is not usable.
            ConfigError: A parameter is not valid.
            GenerationError: A member failed while decoding.
            GenerationTimeoutError: `timeout` has passed.
            Cancelled: `cancel` was set.
        """
        prompts = _as_batch(prompt)
        requests = self._requests([prompt] if prompts is None else prompts, params)  # type: ignore[list-item]
        outcomes: dict[int, Result | BaseException] = {}
        for item in self._scheduler.run(requests, cancel, timeout=_checked_timeout(timeout)):
            if isinstance(item, Row):
                outcomes[item.index] = item.error or GenerationError("the request was dropped")
            elif isinstance(item, GenerationFinished):
                outcomes[item.index] = item.result
        ordered = [outcomes[i] for i in range(len(requests))]
        if not return_exceptions or prompts is None:
            for outcome in ordered:
                if isinstance(outcome, BaseException):
                    raise outcome
        return ordered[0] if prompts is None else ordered

    @overload
    def stream(
        self,
        prompt: Prompt,
        *,
        events: Literal[False] = False,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Generator[str, None, None]: ...

    @overload
    def stream(
        self,
        prompt: Prompt,
        *,
        events: Literal[True],
        detailed: bool = True,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Generator[Event, None, None]: ...

    def stream(
        self,
        prompt: Prompt,
        *,
        events: bool = False,
        detailed: bool = True,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Generator[str, None, None] | Generator[Event, None, None]:
        """Decode one prompt and yield the answer as it becomes final.

        Arguments are checked at once; decoding begins with the first `next()`. Closing the iterator stops decoding.

        Args:
            prompt: A text or a conversation.
            events: Yield typed events instead of text.
            detailed: With events: fill in each member's probability and best tokens at every decision, needed or not.
            cancel: Set it from another thread to stop within one round.
            timeout: Seconds after which it is given up, within one round.
            **params: Fields of `SamplingParams` and of `safe_llm.requests.AnswerForm` (schema, tools).
        """
        if _as_batch(prompt) is not None:
            raise PromptError("stream() takes one prompt", hint="use generate() for a list, or one stream per prompt")
        requests = self._requests([prompt], params)
        found = self._events(requests, cancel, detailed=events and detailed, timeout=_checked_timeout(timeout))
        return found if events else _texts(found)

    def _events(
        self,
        requests: Sequence[GenerationRequest],
        cancel: threading.Event | None,
        *,
        detailed: bool,
        timeout: float | None,
    ) -> Generator[Event, None, None]:
        with contextlib.closing(self._scheduler.run(requests, cancel, detailed=detailed, timeout=timeout)) as items:
            for item in items:
                if isinstance(item, Row):
                    raise item.error or GenerationError("the request was dropped")
                yield item

    def _requests(self, prompts: Sequence[Prompt], params: Mapping[str, Any]) -> list[GenerationRequest]:
        if self._scheduler.is_closed:
            raise SafeLLMError("the ensemble is closed")
        return make_requests(prompts, params, self.sampling)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Refuse new requests and end those under way with `Cancelled`. Weights are freed with the last reference."""
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _texts(events: Generator[Event, None, None]) -> Generator[str, None, None]:
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, TextDelta):
                yield event.text


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0):
        raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return timeout


def load_members(configs: Sequence[MemberConfig], *, progress: bool = True) -> list[Member]:
    """Load the members of an ensemble, one per GPU where there are several.

    Raises:
        ConfigError: Two members have the same name.
        ModelError: One cannot be had or used.
    """
    check_names([config.display_name for config in configs])
    from safe_llm.backends.loading import place

    return [
        Member.load(config, device=device, progress=progress)
        for config, device in zip(configs, place(configs), strict=True)
    ]


def result_as_dict(result: Result) -> dict[str, Any]:
    """Return a result as plain JSON values; bytes become text, with U+FFFD where they are not UTF-8."""
    plain = asdict(result)
    plain["counters"] |= {
        rate: getattr(result.counters, rate)
        for rate in ("acceptance_rate", "mean_acceptance_length", "ensemble_rate", "replacement_rate")
    }
    plain["timings"]["tpot_s"] = result.timings.tpot_s
    plain["usage"]["total_tokens"] = result.usage.total_tokens
    readable: dict[str, Any] = _readable(plain)
    return readable


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, Mapping):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in value]
    return value


def _member_config(member: str | Path | MemberConfig) -> MemberConfig:
    return member if isinstance(member, MemberConfig) else MemberConfig(model=str(member))


def _as_batch(prompt: Any) -> list[Prompt] | None:
    """Return the prompts of a batch, or None for a single prompt."""
    if isinstance(prompt, (str, bytes, Mapping)) or not isinstance(prompt, Sequence) or not prompt:
        return None
    return list(prompt) if isinstance(prompt[0], (str, list, tuple)) else None

"""Writing a trace while the ensemble answers: a line per event, flushed, so that a crash keeps what was there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import threading
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from safe_llm._version import __version__
from safe_llm.errors import SafeLLMError, TraceError
from safe_llm.events import EnsemblePoint, Event, GenerationFinished, Result, RoundFinished
from safe_llm.trace.lines import FORMAT, SCHEMA_VERSION, dumps, plain, result_fields
from safe_llm.trace.values import PromptRecord, Trace, TracedMember, TracedRequest, TraceHeader
from safe_llm.types import GenerationRequest, Message, Prompt

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["TraceWriter", "write_trace"]


class TraceWriter:
    """Answers through an ensemble and writes down what happens. One file may hold many requests, also of many threads.

    Example:
        >>> with TraceWriter("answer.jsonl", ensemble) as trace:  # doctest: +SKIP
        ...     trace.generate("The capital of France is").text
    """

    def __init__(self, target: str | Path | TextIO, ensemble: Ensemble, *, include_prompt: bool = False) -> None:
        """Begin a trace.

        Args:
            target: The file to write (one that exists is replaced), or an open text file, which stays open.
            ensemble: Who answers.
            include_prompt: Write the prompts' texts too, not only their lengths and hashes.

        Raises:
            TraceError: The file cannot be written.
        """
        self._ensemble = ensemble
        self._include_prompt = include_prompt
        self._lock = threading.Lock()
        self._num_requests = 0
        header = _header_of(ensemble)
        self._lines = _Lines(target)
        self._lines.write("header", _header_fields(header))

    # ------------------------------------------------------------------ answering

    def stream(
        self,
        prompt: Prompt,
        *,
        cancel: threading.Event | None = None,
        timeout: float | None = None,
        **params: Any,
    ) -> Generator[Event, None, None]:
        """Decode one prompt as `Ensemble.stream` does, and yield its events once they are written down.

        Args:
            prompt: A text or a conversation.
            cancel: Set it from another thread to stop within one round.
            timeout: Seconds after which it is given up, within one round.
            **params: As of `Ensemble.stream`.
        """
        from safe_llm.requests import make_requests

        events = self._ensemble.stream(prompt, events=True, detailed=True, cancel=cancel, timeout=timeout, **params)
        [request] = make_requests([prompt], params, self._ensemble.sampling)
        return self._recorded(events, request)

    def generate(self, prompt: Prompt, **params: Any) -> Result:
        """Decode one prompt and return its result; parameters as of `stream`."""
        events = self.stream(prompt, **params)
        [result] = [event.result for event in events if isinstance(event, GenerationFinished)]
        return result

    def _recorded(
        self, events: Generator[Event, None, None], request: GenerationRequest
    ) -> Generator[Event, None, None]:
        number = self._begin(request)
        generated = bytearray()
        has_ended = False
        try:
            with contextlib.closing(events):
                for event in events:
                    if isinstance(event, RoundFinished):
                        generated += event.committed
                    has_ended = isinstance(event, GenerationFinished)
                    self._write(number, event, generated)
                    yield event
        except BaseException as error:
            if not has_ended and not isinstance(error, TraceError):
                self._lines.write("error", {"request": number, "error": _error_text(error)})
            raise

    def _begin(self, request: GenerationRequest) -> int:
        record = TracedRequest(
            started=_now(),
            prompt=self._prompt_record(request),
            sampling=plain(request.sampling),
            num_tools=len(request.tools),
            constrained=request.grammar is not None,
        )
        with self._lock:
            number = self._num_requests
            self._num_requests += 1
            self._lines.write("request", _request_fields(record, number))
        return number

    def _prompt_record(self, request: GenerationRequest) -> PromptRecord:
        prompt = request.prompt
        canonical = prompt
        if not isinstance(prompt, str):
            canonical = json.dumps(list(map(_message_fields, prompt)), sort_keys=True, separators=(",", ":"))
        return PromptRecord(
            kind="text" if isinstance(prompt, str) else "conversation",
            num_tokens=len(self._ensemble.members[0].prompter.encode(prompt, request.tools)),
            sha256=hashlib.sha256(str(canonical).encode()).hexdigest(),
            content=prompt if self._include_prompt else None,
        )

    def _write(self, number: int, event: Event, generated: bytearray) -> None:
        if isinstance(event, (RoundFinished, EnsemblePoint)):
            self._lines.write(*_event_line(event, number))
        elif isinstance(event, GenerationFinished):
            ends = {m.name: m.vocabulary.encode(generated).ends for m in self._ensemble.members}
            exact = {name: tuple(end if end >= 0 else None for end in found) for name, found in ends.items()}
            self._lines.write("result", _result_fields(event.result, exact, number))

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Close the file, if this writer opened it."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace that was read or merged to a file.

    Raises:
        TraceError: It cannot be written.
    """
    lines = _Lines(path)
    with contextlib.closing(lines):
        lines.write("header", _header_fields(trace.header))
        for number, request in enumerate(trace.requests):
            lines.write("request", _request_fields(request, number))
            for event in request.events:
                lines.write(*_event_line(event, number))
            if request.result is not None:
                lines.write("result", _result_fields(request.result, request.tokenizations, number))
            elif request.error is not None:
                lines.write("error", {"request": number, "error": request.error})


# ---------------------------------------------------------------------- lines


class _Lines:
    """A file that takes whole lines, also from several threads."""

    def __init__(self, target: str | Path | TextIO) -> None:
        self._lock = threading.Lock()
        self._is_own = isinstance(target, (str, Path))
        self._name = target if isinstance(target, (str, Path)) else getattr(target, "name", "an open file")
        try:
            self._file = (
                open(target, "w", encoding="ascii", newline="\n")  # noqa: SIM115 - stays open
                if isinstance(target, (str, Path))
                else target
            )
        except OSError as error:
            raise self._failure(error) from None

    def write(self, kind: str, values: dict[str, Any]) -> None:
        line = dumps(kind, values)
        try:
            with self._lock:
                self._file.write(line)
                self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries once more to write what could not be written
                self.close()
            raise self._failure(error) from None

    def close(self) -> None:
        if self._is_own:
            self._file.close()

    def _failure(self, error: OSError) -> TraceError:
        return TraceError(f"cannot write the trace {str(self._name)!r}: {error.strerror}")


def _header_fields(header: TraceHeader) -> dict[str, Any]:
    return {"format": FORMAT, "schema_version": SCHEMA_VERSION, **plain(header)}


def _request_fields(request: TracedRequest, number: int) -> dict[str, Any]:
    values = plain(request)
    what_came_later = ("events", "result", "tokenizations", "error")
    return {"request": number} | {key: value for key, value in values.items() if key not in what_came_later}


def _event_line(event: RoundFinished | EnsemblePoint, number: int) -> tuple[str, dict[str, Any]]:
    values = plain(event)
    del values["index"]
    return "round" if isinstance(event, RoundFinished) else "point", {"request": number, **values}


def _result_fields(result: Result, tokenizations: Any, number: int) -> dict[str, Any]:
    return {"request": number, **result_fields(result), "tokenizations": plain(tokenizations)}


def _message_fields(message: Message) -> dict[str, Any]:
    return {key: value for key, value in plain(message).items() if key in ("role", "content") or value}


def _error_text(error: BaseException) -> str:
    """Name what ended a request; only our own errors promise to hold no text of prompts and answers."""
    if isinstance(error, GeneratorExit):
        return "Stopped: whoever read the answer stopped reading"
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, SafeLLMError) else name


# ---------------------------------------------------------------------- the header


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _header_of(ensemble: Ensemble) -> TraceHeader:
    weights = ensemble.config.normalized_weights(len(ensemble.members))
    packages = ("torch", "transformers", "tokenizers")
    return TraceHeader(
        created=_now(),
        versions={
            "safe_llm": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        members=tuple(
            TracedMember(
                name=member.name,
                fingerprint=member.fingerprint,
                vocabulary=member.vocabulary.kind,
                num_tokens=member.vocabulary.width,
                max_context=member.backend.max_context,
                weight=weight,
                licence=member.licence,
                dtype=member.dtype,
                device=member.device,
            )
            for member, weight in zip(ensemble.members, weights, strict=True)
        ),
        config=ensemble.config.model_dump(mode="json"),
        method=repr(ensemble.method),
        sampling=plain(ensemble.sampling),
        fingerprint=ensemble.fingerprint,
    )

"""Reading a trace: everything is checked, and what is wrong is named by line and field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safe_llm.errors import TraceError
from safe_llm.events import EnsemblePoint, Outcome, Result, RoundFinished
from safe_llm.trace.lines import FORMAT, SCHEMA_VERSION, parsed, validated
from safe_llm.trace.values import Trace, TracedRequest, TraceHeader

__all__ = ["read_trace"]

_NOT_OURS = "write one with `safe-llm generate --trace FILE` or safe_llm.trace.TraceWriter"


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    A last line that is cut off (the writer crashed, or still writes) is left out and named in `Trace.problem`; so is a
    request without an end.

    Raises:
        TraceError: It cannot be read, is no trace, is of a newer schema version, or a line is not as it must be.
    """
    try:
        with open(path, "rb") as file:
            reading = _Reading(file)
            reading.read()
            return reading.trace()
    except OSError as error:
        raise TraceError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    except TraceError as error:
        raise TraceError(f"{str(path)!r}: {error.args[0]}", hint=error.hint) from None


@dataclass(frozen=True, slots=True)
class _ResultExtras:
    """What a result's line has beside the fields of `Result`."""

    num_points: int
    tokenizations: Mapping[str, tuple[int | None, ...]]


class _Reading:
    """A trace file while it is read."""

    def __init__(self, file: Iterable[bytes]) -> None:
        self._file = file
        self._header: TraceHeader | None = None
        self._requests: list[TracedRequest] = []
        self._events: list[list[RoundFinished | EnsemblePoint]] = []
        self._num_bytes: list[int] = []
        self._problem = ""

    def trace(self) -> Trace:
        if self._header is None:
            raise TraceError("it is empty", hint=_NOT_OURS)
        unfinished = [number for number, request in enumerate(self._requests) if not request.has_ended]
        if unfinished and not self._problem:
            self._problem = f"request {unfinished[0]} has no end"
        requests = (
            replace(request, events=tuple(events)) for request, events in zip(self._requests, self._events, strict=True)
        )
        return Trace(header=self._header, requests=tuple(requests), problem=self._problem)

    def read(self) -> None:
        for number, values in self._objects():
            try:
                self._take(values)
            except TraceError as error:
                raise TraceError(f"line {number}: {error.args[0]}", hint=error.hint) from None

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(self._file, 1):
            try:
                yield number, parsed(line.decode("utf-8"))
            except ValueError as error:
                if number == 1:
                    raise TraceError("it is no trace: line 1 is no JSON object", hint=_NOT_OURS) from None
                if line.endswith(b"\n"):
                    raise TraceError(f"line {number} is no JSON object: {_reason(error)}") from None
                self._problem = f"line {number}, the last one, is cut off"

    def _take(self, values: dict[str, Any]) -> None:
        if self._header is None:
            _check_format(values)
            self._header = validated(TraceHeader, values)
            if not self._header.members:
                raise TraceError("field members: there is none")
            return
        kind = values.get("type")
        take = {
            "request": self._request,
            "round": self._round,
            "point": self._point,
            "result": self._result,
            "error": self._error,
        }.get(kind if isinstance(kind, str) else "")
        if take is None:
            raise TraceError("field type: expected request, round, point, result or error")
        number = values.get("request")
        begun = len(self._requests)
        if type(number) is not int or not (number == begun if kind == "request" else 0 <= number < begun):
            raise TraceError("field request: there is no such request")
        if kind != "request" and self._requests[number].has_ended:
            raise TraceError(f"field request: request {number} has ended before")
        take(number, values)

    # ------------------------------------------------------------------ lines by type

    def _request(self, number: int, values: Mapping[str, Any]) -> None:
        later = ("events", "result", "tokenizations", "error")
        now = {key: value for key, value in values.items() if key not in later}
        self._requests.insert(number, validated(TracedRequest, now))
        self._events.append([])
        self._num_bytes.append(0)

    def _round(self, number: int, values: Mapping[str, Any]) -> None:
        done = validated(RoundFinished, {**values, "index": number})
        self._num_bytes[number] = _checked_end(done, self._num_bytes[number])
        self._events[number].append(done)

    def _point(self, number: int, values: Mapping[str, Any]) -> None:
        self._events[number].append(validated(EnsemblePoint, {**values, "index": number}))

    def _result(self, number: int, values: Mapping[str, Any]) -> None:
        extras = validated(_ResultExtras, values)
        for name, ends in extras.tokenizations.items():
            known = [end for end in ends if end is not None]
            if known != sorted(set(known)) or any(not 0 < end <= self._num_bytes[number] for end in known):
                raise TraceError(f"field tokenizations.{name}: offsets must ascend within the generated bytes")
        points = [event for event in self._events[number] if isinstance(event, EnsemblePoint)]
        self._requests[number] = replace(
            self._requests[number],
            result=validated(Result, {**values, "points": points[: extras.num_points]}),
            tokenizations=extras.tokenizations,
        )

    def _error(self, number: int, values: Mapping[str, Any]) -> None:
        if not isinstance(values.get("error"), str):
            raise TraceError("field error: it must be a string")
        self._requests[number] = replace(self._requests[number], error=values["error"])


def _reason(error: ValueError) -> str:
    """What json says, without the position in the whole text, which is the line's."""
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).partition(": line ")[0]


def _check_format(values: Mapping[str, Any]) -> None:
    if values.get("type") != "header" or values.get("format") != FORMAT:
        raise TraceError("it is no trace: there is no header", hint=_NOT_OURS)
    version = values.get("schema_version")
    if type(version) is not int or version < 1:
        raise TraceError("field schema_version: it must be a whole number from 1")
    if version > SCHEMA_VERSION:
        raise TraceError(
            f"schema version {version} is newer than this safe-llm reads ({SCHEMA_VERSION})",
            hint="install a newer safe-llm-ensemble",
        )


def _checked_end(done: RoundFinished, start: int) -> int:
    """Return where a round's bytes end, after checking that its decisions say the same as its bytes."""
    at, end = start, start + len(done.committed)
    for number, decision in enumerate(done.decisions):
        if decision.byte_offset != at:
            raise TraceError(f"field decisions.{number}.byte_offset: expected {at}, got {decision.byte_offset}")
        is_last = number + 1 == len(done.decisions)
        if decision.outcome is Outcome.REPLACED and not is_last:
            raise TraceError(f"field decisions.{number}.outcome: a replacement ends a round, and others follow")
        at = max(at, end) if decision.outcome.is_ensembled and is_last else at + len(decision.token)
    if at != end:
        raise TraceError(f"field committed: it has {len(done.committed)} bytes, its decisions have {at - start}")
    return end

"""One line of a trace: values as JSON, and back with the field named where something is not as it must be.

Bytes are a string where they are UTF-8, else `{"hex": "..."}`, so nothing is lost and most of it can be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from safe_llm.errors import TraceError
from safe_llm.events import EnsemblePoint, Result, RoundFinished
from safe_llm.types import TokenLogprob

__all__ = ["FORMAT", "SCHEMA_VERSION", "dumps", "parsed", "plain", "result_fields", "validated"]

FORMAT = "safe-llm trace"
SCHEMA_VERSION = 1

T = TypeVar("T")
_RATES = ("acceptance_rate", "mean_acceptance_length", "ensemble_rate", "replacement_rate")


# ---------------------------------------------------------------------- values -> JSON


def dumps(kind: str, values: Mapping[str, Any]) -> str:
    """Return one line: ASCII, so that no text in it can break the line or drive a terminal."""
    return json.dumps({"type": kind, **values}, allow_nan=False, separators=(",", ":")) + "\n"


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses by their fields, bytes as text or hexadecimal."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, bytes):
        return _text_or_hex(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _text_or_hex(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": data.hex()}


def result_fields(result: Result) -> dict[str, Any]:
    """Return a result as JSON: without its points, which have lines of their own, and with the derived rates."""
    logprobs = result.logprobs and tuple(map(_possible, result.logprobs))
    values: dict[str, Any] = plain(replace(result, points=(), logprobs=logprobs))
    del values["points"]
    values["num_points"] = len(result.points)
    values["counters"] |= {rate: getattr(result.counters, rate) for rate in _RATES}
    values["timings"]["tpot_s"] = result.timings.tpot_s
    return values


def _possible(token: TokenLogprob) -> TokenLogprob:
    """Leave out the alternatives that a grammar left no probability: JSON has no infinity."""
    return replace(token, top=tuple(item for item in token.top if math.isfinite(item[1])))


# ---------------------------------------------------------------------- JSON -> values


def parsed(line: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: It is none.
    """
    try:
        values = json.loads(line, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is no object but {type(values).__name__}")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def validated(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a value of a dataclass from JSON values; keys that it does not know are ignored.

    Raises:
        TraceError: A field is missing or of a wrong type; names the field and holds none of its content.
    """
    try:
        if kind not in _ADAPTERS:
            _ADAPTERS[kind] = TypeAdapter(kind)
        value: T = _ADAPTERS[kind].validate_python(_with_bytes(values) if kind in _WITH_BYTES else values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] == "missing" else f", got {type(first['input']).__name__}"
        message = "is missing" if first["type"] == "missing" else first["msg"]
        raise TraceError(f"field {where}: {message}{got}") from None
    return value


_WITH_BYTES = (RoundFinished, EnsemblePoint, Result)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _with_bytes(value: Any) -> Any:
    """Undo `_text_or_hex` where it was hexadecimal; text becomes bytes by itself where a field wants them."""
    if isinstance(value, dict):
        if value.keys() == {"hex"} and isinstance(value["hex"], str):
            return _from_hex(value["hex"])
        return {key: _with_bytes(item) for key, item in value.items()}
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise TraceError("field hex: it is not hexadecimal") from None

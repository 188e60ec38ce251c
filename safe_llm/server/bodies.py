"""From the bytes of a request to values that are what `safe_llm.server.schema` says; nothing else passes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from safe_llm.server.problems import ApiError
from safe_llm.server.schema import GenerationBody

__all__ = ["checked", "decoded", "read_body"]

B = TypeVar("B", bound=GenerationBody)

MAX_DEPTH = 64
_DISCARDED = 16
"""How many times the limit is read of a body that is too long: a client that still writes does not read the refusal."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: It is longer than `limit` bytes (413), or not said to be JSON (415), which keeps web pages of other
            origins out.
        starlette.requests.ClientDisconnect: The client left before the end.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    body, length = bytearray(), 0
    async for chunk in request.stream():
        length += len(chunk)
        if length <= limit:
            body += chunk
        elif length > _DISCARDED * limit:
            break
    if length > limit:
        headers = {"Connection": "close"}  # or the rest would be read and dropped, however much there is
        raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large", headers=headers)
    return bytes(body)


def decoded(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without its nulls.

    Raises:
        ApiError: It is not JSON, or JSON that nobody could work with: not finite numbers, lone surrogates, too deep.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        at = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is not valid JSON{at}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    _check_values(value, ())
    return {key: item for key, item in value.items() if item is not None}


def checked(model: type[B], values: dict[str, Any]) -> B:
    """Return the values as a `model`.

    Raises:
        ApiError: A field is unknown, missing or not valid (400); `param` says where.
    """
    try:
        return model.model_validate(_without_nulls(values))
    except ValidationError as error:
        found = [(_walked(values, item["loc"], item["type"]), item) for item in error.errors(include_url=False)]
    top = found[0][0][:1]  # a field of several types has an error for each; the one that got furthest knows most
    where, item = max(
        (pair for pair in found if pair[0][:1] == top), key=lambda pair: (len(pair[0]), _is_late(pair[1]))
    )
    same = [other["msg"] for path, other in found if path == where and _is_late(other) == _is_late(item)]
    raise ApiError(400, _message(where, item["type"], same), param=_param(where), code=_code(item["type"]))


def _is_late(item: ErrorDetails) -> bool:
    """Whether the value had the right type."""
    return not item["type"].endswith("_type")


def _message(where: Sequence[str | int], kind: str, texts: Sequence[str]) -> str:
    name = _param(where)
    if kind == "extra_forbidden":
        return f"unknown parameter: {name!r}"
    if kind == "missing":
        return f"missing required parameter: {name!r}"
    if kind == "unsupported_parameter":
        return f"{name!r} {texts[0]}"
    return f"invalid value for {name!r}: {' or '.join(dict.fromkeys(text[:1].lower() + text[1:] for text in texts))}"


def _code(kind: str) -> str:
    codes = {
        "extra_forbidden": "unknown_parameter",
        "missing": "missing_required_parameter",
        "unsupported_parameter": "unsupported_parameter",
    }
    return codes.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _walked(values: Any, loc: Sequence[str | int], kind: str) -> tuple[str | int, ...]:
    """The part of a pydantic location that leads through the values; names of union members do not."""
    path: list[str | int] = []
    for part in loc:
        inside = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        if inside:
            path.append(part)
            values = values[part]
    return (*path, loc[-1]) if kind == "missing" else tuple(path)


def _param(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    messages = values.get("messages")
    if not isinstance(messages, list):
        return values
    plain = [{k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m for m in messages]
    return {**values, "messages": plain}


# ---------------------------------------------------------------------- JSON


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"{name} is not JSON; numbers must be finite", code="invalid_value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ApiError(400, "a number of the body is too large; numbers must be finite", code="invalid_value")
    return value


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_value")


def _check_values(value: Any, path: tuple[str | int, ...]) -> None:
    """Refuse lone surrogates, which are no text, wherever they are, and nesting that no recursion would survive."""
    if len(path) > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, str):
        _check_text(value, path)
        return
    for key, item in _items(value):
        if isinstance(key, str):
            _check_text(key, path)
        _check_values(item, (*path, key))


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _check_text(text: str, path: tuple[str | int, ...]) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = _param(path) or "the body"
        raise ApiError(
            400,
            f"{where} has a lone surrogate at character {error.start}",
            param=_param(path) or None,
            code="invalid_text",
        ) from None

"""How JSON is written while it is enforced: like Python's `json.dumps`, and nothing that its schema does not name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["JSON_LAYOUT", "closed"]

JSON_LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance. With free white space a weak model could write it for ever."""

_OPENING = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if")
)
"""Keywords beside `properties` that say, or may say, what else an object can have."""


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` with its objects limited to the properties that they name.

    JSON Schema lets an object have any others. Nobody who names some wants a model to invent more, and a tool that is
    called with an argument it does not know fails. An object that says what else it allows keeps that.
    """
    out: dict[str, Any] = dict(schema)
    for key in ("properties", "$defs", "definitions", "dependentSchemas"):
        if isinstance(out.get(key), Mapping):
            out[key] = {name: _closed(part) for name, part in out[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(out.get(key), list):
            out[key] = [_closed(part) for part in out[key]]
    for key in ("items", "additionalProperties"):
        out |= {key: _closed(out[key])} if key in out else {}
    if "properties" in out and not out.keys() & _OPENING:
        out["additionalProperties"] = False
    return out


def _closed(part: Any) -> Any:
    return closed(part) if isinstance(part, Mapping) else part

"""An ensemble written down, ready to use: as a command line and as a configuration file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from safe_llm.config import EnsembleSpec

__all__ = ["command_line", "toml_text"]


def command_line(spec: EnsembleSpec) -> str:
    """Return the `safe-llm generate` that runs `spec`.

    Flags can say models, one device and one dtype for all, and the ensemble's settings; a member's other fields need
    the configuration file.
    """
    parts = ["safe-llm", "generate", "--drafter", spec.drafter.model]
    for verifier in spec.verifiers:
        parts += ["--verifier", verifier.model]
    changed = spec.drafter.model_dump(include={"device", "dtype"}, exclude_defaults=True)
    changed |= spec.ensemble.model_dump(exclude_defaults=True)
    for name, value in changed.items():
        text = ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)
        parts += [f"--{name.replace('_', '-')}", text]
    return f"{shlex.join(parts)} PROMPT"


def toml_text(spec: EnsembleSpec) -> str:
    """Return the configuration file that holds `spec`, defaults left out."""
    tables = [("[drafter]", spec.drafter.model_dump(exclude_defaults=True))]
    tables += [("[[verifiers]]", verifier.model_dump(exclude_defaults=True)) for verifier in spec.verifiers]
    tables += [("[ensemble]", spec.ensemble.model_dump(exclude_defaults=True)), ("[sampling]", spec.sampling)]
    return "\n\n".join("\n".join((title, *_assignments(values))) for title, values in tables if values) + "\n"


def _assignments(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name if re.fullmatch('[A-Za-z0-9_-]+', name) else _toml(name)} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_assignments(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)  # TOML writes strings, numbers, true and false as JSON does,
    return text.replace("\x7f", "\\u007f")  # but for this one

"""The files of an evaluation's results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.results import Results

__all__ = ["RESULTS_VERSION", "make_folder", "write_json", "write_text"]

RESULTS_VERSION = 1


def make_folder(path: Path) -> None:
    """Make a folder for results, unless it is there.

    Raises:
        EvaluationError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot make the folder {str(path)!r}: {error.strerror}", hint="name another") from None


def write_json(results: Results, path: Path) -> None:
    """Write `results.json`.

    Raises:
        EvaluationError: It cannot be written.
    """
    values = {"format": "safe-llm evaluation", "schema_version": RESULTS_VERSION, **asdict(results)}
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file of the evaluation.

    Raises:
        EvaluationError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None

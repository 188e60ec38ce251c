"""The functions that the task files name: items as the harness's documents, their prompts and their scores."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.tasks import TASKS, open_task, task_named

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["DATA_VARIABLE", "load", "prompt", "score", "target"]

DATA_VARIABLE = "SAFE_LLM_EVAL_DATA"
"""Environment variable: the folder of the data files."""

_logger = logging.getLogger(__name__)
_ITEM_FIELDS = tuple(field.name for field in fields(Item))


def load(*, safe_task: str, data: str | None = None, **_: Any) -> dict[str, Dataset]:
    """Return the documents of a task; the harness passes all its metadata, most of it meant for others.

    Args:
        safe_task: Name of the task.
        data: A data file, or the folder of the data files; by default what `SAFE_LLM_EVAL_DATA` names.

    Raises:
        EvaluationError: No data is named, or it cannot be used.
    """
    from datasets import Dataset

    path = _data_path(data, TASKS[safe_task].file_name)
    opened = open_task(safe_task, path)
    if opened.left_out:
        total = len(opened.left_out) + len(opened.items)
        _logger.warning("%s: %d of %d items are left out: no choices", safe_task, len(opened.left_out), total)
    documents = [{**asdict(item), "task": safe_task, "prompt": opened.task.prompt(item)} for item in opened.items]
    return {"test": Dataset.from_list(documents)}


def prompt(document: Mapping[str, Any]) -> str:
    """Return the user's message."""
    text: str = document["prompt"]
    return text


def target(document: Mapping[str, Any]) -> str:
    """Return the gold answer."""
    answer: str = document["answer"]
    return answer


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return what an answer is worth, by metric."""
    values = {name: document[name] for name in _ITEM_FIELDS}
    item = Item(**{**values, "choices": tuple(values["choices"])})
    worth = task_named(document["task"]).score(results[0], item)
    return {"strict": float(worth.strict), "flexible": float(worth.flexible)}


def _data_path(data: str | None, file_name: str) -> Path:
    named = data or os.environ.get(DATA_VARIABLE)
    if not named:
        raise EvaluationError(
            "no data is named",
            hint=f"set {DATA_VARIABLE} to the folder of the data files, or metadata's `data` to a file",
        )
    path = Path(named)
    return path / file_name if path.is_dir() else path

"""What is decoded in a benchmark: conversations, shipped with the package or read from a file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from safe_llm.errors import EvaluationError, PromptError, UnknownNameError
from safe_llm.evaluation.items import load_items
from safe_llm.evaluation.tasks import TASKS, task_for
from safe_llm.trace.lines import parsed
from safe_llm.types import GenerationRequest, Message, SamplingParams

__all__ = ["WORKLOADS", "Conversation", "Workload", "chosen_prompts", "read_workload", "shipped_workload"]

WORKLOADS: Mapping[str, str] = {
    "maths": "word problems, answered step by step",
    "rag": "a text of about 600 tokens and a question whose answer quotes it",
    "chat": "everyday requests",
}
"""The shipped workloads: what each holds."""

Conversation = tuple[Message, ...]

_FIELDS = ("messages", "prompt")
_FORMAT = (
    'a line is {"messages": [{"role": "user", "content": "..."}]}, {"prompt": "..."}, '
    "or an item with question and answer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        name: As results call it.
        prompts: Conversations.
    """

    name: str
    prompts: tuple[Conversation, ...]


def shipped_workload(name: str) -> Workload:
    """Return a workload that comes with the package.

    Raises:
        UnknownNameError: There is none of this name; names the nearest.
    """
    if name not in WORKLOADS:
        raise UnknownNameError("workload", name, WORKLOADS)
    file = resources.files("safe_llm.bench") / "workloads" / f"{name}.jsonl"
    return Workload(name=name, prompts=tuple(_prompts(file.read_bytes())))


def read_workload(path: str | Path) -> Workload:
    """Read a file of prompts: JSON Lines, either `messages` or `prompt` (one user message), or items of an evaluation.

    Items are asked as `safe-llm eval` asks them.

    Raises:
        EvaluationError: It cannot be read, holds nothing, or a line is not as it must be; names the file and line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise EvaluationError(f"cannot read the data file {str(path)!r}: {error.strerror}") from None
    try:
        first = next(_objects(data), None)
        if first is not None and "question" in first[1]:
            return Workload(name=Path(path).stem, prompts=tuple(_asked(path)))
        prompts = tuple(_prompts(data))
    except EvaluationError as error:
        raise EvaluationError(f"{str(path)!r}: {error.args[0]}", hint=error.hint) from None
    if not prompts:
        raise EvaluationError(f"{str(path)!r}: it has no prompts", hint=_FORMAT)
    return Workload(name=Path(path).stem, prompts=prompts)


def chosen_prompts(workload: Workload, count: int, *, seed: int) -> tuple[Conversation, ...]:
    """Return `count` prompts in a random order, from the first one again where there are fewer."""
    order = np.random.default_rng(seed).permutation(len(workload.prompts))
    return tuple(workload.prompts[order[place % len(order)]] for place in range(count))


def _asked(path: str | Path) -> Iterator[Conversation]:
    items = [item for item in load_items(path) if item.is_answerable]
    known = (task for task in TASKS.values() if task.file_name == Path(path).name)
    task = (next(known, None) or task_for(path, items)).beside(path)
    for item in items:
        yield (Message(role="user", content=task.prompt(item)),)


def _prompts(data: bytes) -> Iterator[Conversation]:
    for number, values in _objects(data):
        try:
            yield _conversation(values)
        except (EvaluationError, PromptError, UnknownNameError) as error:
            raise EvaluationError(f"line {number}: {error.args[0]}", hint=error.hint) from None


def _objects(data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line.decode("utf-8-sig"))
        except ValueError:  # json's and Unicode's errors, which repeat what the line holds
            raise EvaluationError(f"line {number}: it is no JSON object in UTF-8", hint=_FORMAT) from None


def _conversation(values: Mapping[str, Any]) -> Conversation:
    for name in values:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            raise EvaluationError(
                f"field {name!r} is not known", hint=f"did you mean {near[0]!r}?" if near else _FORMAT
            )
    if len(values) != 1:
        raise EvaluationError("expected either messages or prompt", hint=_FORMAT)
    messages: Sequence[Any] = values.get("messages") or [{"role": "user", "content": values.get("prompt")}]
    prompt = GenerationRequest.of(messages, SamplingParams()).prompt
    if isinstance(prompt, str):
        raise EvaluationError("messages must be a list of messages, got str", hint=_FORMAT)
    return prompt

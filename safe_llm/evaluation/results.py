"""What an evaluation found: figures per task and contender, comparisons, and everything needed to read them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from safe_llm._version import __version__
from safe_llm.evaluation.items import items_fingerprint
from safe_llm.evaluation.runs import Answers, Contender
from safe_llm.evaluation.statistics import Comparison, Interval, accuracy_interval, compare
from safe_llm.evaluation.store import Answer
from safe_llm.evaluation.tasks import Score, TaskData
from safe_llm.events import Outcome
from safe_llm.record import ratio

__all__ = [
    "METRICS",
    "ContenderResult",
    "Results",
    "Scores",
    "TaskComparison",
    "TaskResult",
    "describe_contender",
    "machine",
    "now",
    "task_result",
    "versions",
]

Metric = Literal["flexible", "strict"]
METRICS: tuple[Metric, ...] = ("flexible", "strict")
"""Flexible: the right answer, however it is put. Strict: in the form that the prompt asks for."""

Scores = Mapping[tuple[str, str], Score]
"""By task and item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """What one contender did on one task.

    Attributes:
        name: The contender.
        is_alone: Whether it is one member without the others.
        accuracy: By metric.
        num_items: Questions.
        num_failed: Questions without an answer (counted as wrong).
        failures: How often each error occurred.
        finish_details: How often each kind of end occurred.
        num_tokens: Tokens decoded.
        seconds: Wall-clock time of the batches.
        tokens_per_s: Tokens over seconds, prompts' passes included.
        ensemble_rate: Ensemble points over tokens.
        replacement_rate: Replaced over tokens.
        acceptance_rate: Accepted over drafted tokens.
        unaligned_rate: Share of the decided tokens that were kept unchecked, because a verifier has no token boundary
            before them or cannot represent the text.
    """

    name: str
    is_alone: bool
    accuracy: Mapping[Metric, Interval]
    num_items: int
    num_failed: int
    failures: Mapping[str, int]
    finish_details: Mapping[str, int]
    num_tokens: int
    seconds: float
    tokens_per_s: float
    ensemble_rate: float
    replacement_rate: float
    acceptance_rate: float
    unaligned_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One contender against another on one task."""

    one: str
    other: str
    metric: Metric
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What all contenders did on one task.

    Attributes:
        name: The task.
        title: For people.
        data: Name of the data file.
        items_fingerprint: Of the items that were asked.
        num_left_out: Items of the data file that cannot be answered (they lost their choices) and were not asked.
        params: Decoding parameters.
        contenders: Members alone first.
        best_member: The member that is best alone, by the flexible metric; None if none ran alone.
        comparisons: Of the ensembles with the best member and with the drafter, and with each other.
    """

    name: str
    title: str
    data: str
    items_fingerprint: str
    num_left_out: int
    params: Mapping[str, Any]
    contenders: tuple[ContenderResult, ...]
    best_member: str | None
    comparisons: tuple[TaskComparison, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that `results.json` holds.

    Attributes:
        created: UTC, ISO 8601.
        versions: Of the libraries that decide answers and scores.
        machine: What it ran on.
        members: The drafter first.
        contenders: Who answered, with fingerprint and configuration.
        settings: Flags that change scores.
        tasks: In the order in which they were asked for.
    """

    created: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    members: Sequence[Mapping[str, Any]]
    contenders: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    tasks: tuple[TaskResult, ...]


def task_result(
    data: TaskData,
    contenders: Sequence[Contender],
    answers: Mapping[str, Answers],
    scores: Mapping[str, Scores],
    *,
    seed: int,
) -> TaskResult:
    """Sum up one task.

    Args:
        data: The task with its items; answers and scores of other tasks are left out.
        contenders: Who answered.
        answers: By contender.
        scores: By contender.
        seed: Of the resampling.

    Raises:
        EvaluationError: Contenders were asked different items.
    """
    name = data.task.name
    right = {
        contender: {metric: _of_task(name, found, metric) for metric in METRICS} for contender, found in scores.items()
    }
    own = {contender: [a for (task, _), a in found.items() if task == name] for contender, found in answers.items()}
    results = tuple(
        _contender_result(c, own[c.plan.name], right[c.plan.name], seed=seed) for c in contenders if own[c.plan.name]
    )
    alone = [result for result in results if result.is_alone]
    best = max(alone, key=lambda result: result.accuracy["flexible"].value).name if alone else None
    drafter = next((c.plan.name for c in contenders if c.plan.is_alone and c.plan.members == (0,)), None)
    first = next((answer for found in own.values() for answer in found), None)
    return TaskResult(
        name=name,
        title=data.task.title,
        data=data.task.file_name,
        items_fingerprint=items_fingerprint(data.items),
        num_left_out=len(data.left_out),
        params={} if first is None else first.params,
        contenders=results,
        best_member=best,
        comparisons=_comparisons(right, best, drafter, seed=seed),
    )


def _of_task(name: str, scores: Scores, metric: Metric) -> dict[str, bool]:
    return {item: bool(getattr(score, metric)) for (task, item), score in scores.items() if task == name}


def _contender_result(
    contender: Contender, answers: Sequence[Answer], right: Mapping[Metric, Mapping[str, bool]], *, seed: int
) -> ContenderResult:
    outcomes: Counter[str] = Counter()
    for answer in answers:
        outcomes.update(answer.outcomes)
    tokens, seconds = sum(a.num_tokens for a in answers), sum(a.seconds for a in answers)
    unaligned = outcomes[Outcome.OOV_LIKE] + outcomes[Outcome.UNREPRESENTABLE]
    failures = Counter(answer.error for answer in answers if answer.error is not None)
    return ContenderResult(
        name=contender.plan.name,
        is_alone=contender.plan.is_alone,
        accuracy={metric: accuracy_interval(list(right[metric].values()), seed=seed) for metric in METRICS},
        num_items=len(answers),
        num_failed=failures.total(),
        failures=dict(failures),
        finish_details=dict(Counter(a.finish_detail for a in answers if a.finish_detail is not None)),
        num_tokens=tokens,
        seconds=seconds,
        tokens_per_s=ratio(tokens, seconds),
        ensemble_rate=ratio(sum(a.num_ensembled for a in answers), tokens),
        replacement_rate=ratio(sum(a.num_replaced for a in answers), tokens),
        acceptance_rate=ratio(sum(a.num_accepted_tokens for a in answers), sum(a.num_draft_tokens for a in answers)),
        unaligned_rate=ratio(unaligned, outcomes.total()),
    )


def _others(name: str, best: str | None, drafter: str | None) -> tuple[str | None, ...]:
    """Return whom a contender is compared with; members alone with nobody."""
    mode, _, method = name.partition(":")
    if mode == "every-token":
        return (best,)
    if mode != "safe":
        return ()
    return best, drafter, name.replace("safe", "every-token", 1), *(("safe",) if method else ())


def _comparisons(
    right: Mapping[str, Mapping[Metric, Mapping[str, bool]]], best: str | None, drafter: str | None, *, seed: int
) -> tuple[TaskComparison, ...]:
    safe_first = sorted(right, key=lambda name: not name.startswith("safe"))
    pairs = [(one, other) for one in safe_first for other in _others(one, best, drafter)]
    return tuple(
        TaskComparison(
            one=one, other=other, metric=metric, comparison=compare(right[one][metric], right[other][metric], seed=seed)
        )
        for one, other in dict.fromkeys(pairs)
        if other is not None and one in right and other in right
        for metric in METRICS
    )


# ---------------------------------------------------------------------- circumstances


def versions() -> dict[str, str]:
    """Return the versions of what decides answers and scores."""
    names = ("torch", "transformers", "tokenizers", "lm_eval", "math_verify")
    return {
        "safe_llm": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def machine() -> dict[str, Any]:
    """Return what the figures per second were measured on."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor()),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())],
    }


def describe_contender(contender: Contender) -> dict[str, Any]:
    """Return who a contender is."""
    return {
        "name": contender.plan.name,
        "members": [member.name for member in contender.ensemble.members],
        "fingerprint": contender.ensemble.fingerprint,
        "config": contender.ensemble.config.model_dump(mode="json"),
    }


def now() -> str:
    """Return the time, as results have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")

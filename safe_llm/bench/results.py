"""What a benchmark found, with everything needed to read it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safe_llm._version import __version__
from safe_llm.bench.ceiling import Ceiling
from safe_llm.bench.figures import BatchFigures, ContenderFigures
from safe_llm.bench.replay import OwnTime
from safe_llm.bench.running import BatchTrial
from safe_llm.bench.trials import Trial
from safe_llm.errors import EvaluationError
from safe_llm.member import Member

__all__ = ["Results", "WorkloadResult", "describe_members", "results_as_dict", "versions", "write_json"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """All contenders on one workload.

    Attributes:
        name: The workload.
        reference: The contender that ratios are to.
        contenders: Their figures.
        left_out: Contenders that do not apply here, with the reason.
    """

    name: str
    reference: str
    contenders: tuple[ContenderFigures, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything.

    Attributes:
        created: When.
        versions: Of what decides speed.
        machine: What it ran on.
        members: The models, the drafter first.
        settings: What was asked for, the contenders' configurations included.
        memory: What peaks are counted of.
        ceiling: What the machine allows; None if only the own time was measured, and so on below.
        workloads: By workload.
        batches: By size.
        own_time: Of the engine.
        trials: Single answers, in the order in which they ran.
        batch_trials: Batches, in the order in which they ran.
    """

    created: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    members: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    memory: str | None = None
    ceiling: Ceiling | None = None
    workloads: tuple[WorkloadResult, ...] = ()
    batches: tuple[BatchFigures, ...] = ()
    own_time: OwnTime | None = None
    trials: tuple[Trial, ...] = ()
    batch_trials: tuple[BatchTrial, ...] = ()


def results_as_dict(results: Results) -> dict[str, Any]:
    """Return results as plain JSON values, with the figures that follow from others."""
    plain = {"format": "safe-llm benchmark", "schema_version": SCHEMA_VERSION, **asdict(results)}
    if results.ceiling is not None:
        for cost, values in zip(results.ceiling.members, plain["ceiling"]["members"], strict=True):
            values["roofline"] = cost.roofline
    plain["trials"] = [_trial(trial) for trial in results.trials]
    for trial, values in zip(results.batch_trials, plain["batch_trials"], strict=True):
        values["tokens_per_s"] = trial.tokens_per_s
    return plain


def _trial(trial: Trial) -> dict[str, Any]:
    run = trial.run
    values = asdict(trial)
    values |= values.pop("run")
    values |= {"tokens_per_s": run.tokens_per_s, "ttft_s": run.ttft_s, "tpot_s": run.tpot_s}
    values["steps"] = [[step.num_tokens, round(step.seconds, 6)] for step in run.steps]
    return values


def write_json(results: Results, path: str | Path) -> None:
    """Write the results to a file.

    Raises:
        EvaluationError: It cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(results_as_dict(results), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None


def versions() -> dict[str, str]:
    """Return the versions of what decides speed."""
    names = ("torch", "transformers", "tokenizers")
    return {
        "safe_llm": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def describe_members(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Return who took part."""
    return [
        {
            "name": m.name,
            "dtype": m.dtype,
            "device": m.device,
            "fingerprint": m.fingerprint,
            "width": m.vocabulary.width,
        }
        for m in members
    ]

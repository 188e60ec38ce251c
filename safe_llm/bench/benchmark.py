"""A benchmark: checked before weights are read, then run on loaded members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_llm.bench.ceiling import Ceiling, measure_ceiling
from safe_llm.bench.figures import batch_figures, contender_figures, reference_of
from safe_llm.bench.planning import Plan, default_contenders, plan_contender
from safe_llm.bench.replay import measure_own_time
from safe_llm.bench.results import Results, WorkloadResult, describe_members, versions
from safe_llm.bench.running import BatchTrial, Progress, Race, race, race_batches
from safe_llm.bench.trials import Contender, PeakMemory, Unavailable
from safe_llm.bench.workloads import Workload, chosen_prompts, read_workload, shipped_workload
from safe_llm.config import EnsembleConfig, EnsembleSpec
from safe_llm.errors import ConfigError
from safe_llm.evaluation.results import machine, now
from safe_llm.member import Member

__all__ = ["Prepared", "Settings", "bench", "bench_ceiling", "bench_own_time", "prepare"]

_DEFAULT_WORKLOAD = "maths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be measured.

    Attributes:
        spec: The members, and how they decide.
        contenders: Who takes part; None takes all that have a meaning for these members.
        workloads: Names of shipped ones; none takes `maths`, or only the file of `data` where there is one.
        data: File of further prompts.
        rounds: Trials of each contender on each workload.
        tokens: Most tokens of an answer.
        batch: Sizes of batches to measure, on the first workload.
        seed: Of the choice of prompts and of the intervals.
    """

    spec: EnsembleSpec
    contenders: tuple[str, ...] | None = None
    workloads: tuple[str, ...] = ()
    data: str | None = None
    rounds: int = 5
    tokens: int = 64
    batch: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Settings that are valid.

    Attributes:
        settings: As given.
        plans: Who takes part.
        workloads: What is asked.
    """

    settings: Settings
    plans: tuple[Plan, ...]
    workloads: tuple[Workload, ...] = field(default=())


def prepare(settings: Settings) -> Prepared:
    """Check everything that can be checked without weights.

    Raises:
        ConfigError: A setting is not valid; an unknown name is an error that suggests the nearest.
        EvaluationError: The data cannot be used.
    """
    for name, value in (
        ("rounds", settings.rounds),
        ("tokens", settings.tokens),
        *(("batch", n) for n in settings.batch),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if settings.seed < 0:
        raise ConfigError(f"seed must be at least 0, got {settings.seed}")
    if settings.spec.sampling.get("temperature"):
        raise ConfigError("a benchmark decodes greedily, and the configuration sets a temperature", hint="leave it out")
    names = default_contenders(settings.spec) if settings.contenders is None else settings.contenders
    if not names:
        raise ConfigError("nobody takes part", hint="name a contender, or leave --contenders out")
    plans = tuple(plan_contender(name, settings.spec) for name in dict.fromkeys(names))
    workloads = [shipped_workload(name) for name in dict.fromkeys(settings.workloads)]
    if settings.data is not None:
        workloads.append(read_workload(settings.data))
    if not workloads:
        workloads.append(shipped_workload(_DEFAULT_WORKLOAD))
    return Prepared(settings=settings, plans=plans, workloads=tuple(workloads))


def bench(
    prepared: Prepared,
    members: Sequence[Member],
    *,
    ceiling: Ceiling | None = None,
    progress: Progress = lambda *_: None,
) -> Results:
    """Let the contenders race, then batches.

    Args:
        prepared: What is to be done.
        members: Loaded, the drafter first.
        ceiling: Of these members; by default it is measured first.
        progress: Told how far each workload is.

    Raises:
        ConfigError: A contender needs a transformers model, and a member is none.
        SafeLLMError: A member failed.
    """
    settings = prepared.settings
    memory = PeakMemory([member.device or "cpu" for member in members])
    contenders, left_out = _contenders(prepared.plans, members)
    ceiling = ceiling or bench_ceiling(prepared, members)
    races = {
        workload.name: race(
            workload.name,
            contenders,
            chosen_prompts(workload, settings.rounds, seed=settings.seed),
            max_tokens=settings.tokens,
            memory=memory,
            progress=progress,
        )
        for workload in prepared.workloads
    }
    batches = _batches(prepared, members, progress)
    return Results(
        **_circumstances(prepared, members),
        memory=memory.kind,
        ceiling=ceiling,
        workloads=tuple(_workload_result(name, done, left_out, settings.seed) for name, done in races.items()),
        batches=batch_figures(batches, seed=settings.seed),
        trials=tuple(trial for done in races.values() for trial in done.trials),
        batch_trials=batches,
    )


def bench_ceiling(prepared: Prepared, members: Sequence[Member]) -> Ceiling:
    """Measure what the machine allows these members."""
    return measure_ceiling(members, prepared.workloads[0].prompts[0])


def bench_own_time(prepared: Prepared, members: Sequence[Member]) -> Results:
    """Measure the engine's own time per round instead, with the members' vocabularies and without their models."""
    own_time = measure_own_time(members, _safe(prepared.settings.spec))
    return Results(**_circumstances(prepared, members), own_time=own_time)


def _contenders(plans: Sequence[Plan], members: Sequence[Member]) -> tuple[list[Contender], dict[str, str]]:
    """Build all contenders; those that do not apply come back with the reason."""
    contenders, left_out = list[Contender](), dict[str, str]()
    for plan in plans:
        try:
            contenders.append(plan.build(members))
        except Unavailable as reason:
            left_out[plan.name] = str(reason)
    if not contenders:
        raise ConfigError(f"no contender applies here: {'; '.join(left_out.values())}", hint="name others")
    return contenders, left_out


def _workload_result(name: str, done: Race, left_out: dict[str, str], seed: int) -> WorkloadResult:
    figures = contender_figures(done.trials, seed=seed)
    return WorkloadResult(
        name=name,
        reference=reference_of(contender.name for contender in figures),
        contenders=figures,
        left_out=left_out | done.left_out,
    )


def _batches(prepared: Prepared, members: Sequence[Member], progress: Progress) -> tuple[BatchTrial, ...]:
    settings = prepared.settings
    if not settings.batch:
        return ()
    workload = prepared.workloads[0]
    prompts = chosen_prompts(workload, max(*settings.batch, len(workload.prompts)), seed=settings.seed)
    return race_batches(
        members,
        _safe(settings.spec),
        prompts,
        tuple(dict.fromkeys(settings.batch)),
        rounds=settings.rounds,
        max_tokens=settings.tokens,
        progress=progress,
    )


def _safe(spec: EnsembleSpec) -> EnsembleConfig:
    """Return the configuration of the contender `safe`."""
    return spec.ensemble.updated({"mode": "safe", "prefix_caching": False})


def _circumstances(prepared: Prepared, members: Sequence[Member]) -> dict[str, Any]:
    settings = prepared.settings
    return {
        "created": now(),
        "versions": versions(),
        "machine": machine(),
        "members": describe_members(members),
        "settings": {
            "rounds": settings.rounds,
            "tokens": settings.tokens,
            "batch": list(settings.batch),
            "seed": settings.seed,
            "data": settings.data,
            "workloads": [workload.name for workload in prepared.workloads],
            "ensemble": settings.spec.ensemble.model_dump(mode="json"),
            "contenders": {
                plan.name: None if plan.config is None else plan.config.model_dump(mode="json")
                for plan in prepared.plans
            },
        },
    }

"""What `safe-llm eval` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.cli import loading, terminal
from safe_llm.cli.eval_options import EvaluationFlags
from safe_llm.cli.options import EnsembleFlags, MemberFlags, PlacementFlags, SamplingFlags
from safe_llm.config import EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError

if TYPE_CHECKING:
    from safe_llm.evaluation.evaluate import Settings
    from safe_llm.evaluation.paper import PaperEnsemble
    from safe_llm.member import Member

__all__ = ["PAPER", "run"]

PAPER = "paper"
DEFAULT_OUTPUT = "safe-llm-eval"


def run(tasks: Sequence[str], members: MemberFlags, placement: PlacementFlags, flags: EvaluationFlags) -> int:
    """Evaluate, or say what the paper's table takes.

    Raises:
        ConfigError: Flags that are not valid or exclude each other.
        EvaluationError: Data, answers or folders that cannot be used.
    """
    if PAPER in tasks:
        return _run_paper(tasks, members, placement, flags)
    if flags.dry_run or flags.pairs is not None:
        raise ConfigError(f"{'--dry-run' if flags.dry_run else '--pairs'} belongs to `safe-llm eval paper`")
    return _evaluate(_spec(members, placement, flags), tasks, flags, Path(flags.output or DEFAULT_OUTPUT))


def _spec(
    members: MemberFlags, placement: PlacementFlags, flags: EvaluationFlags, base: EnsembleFlags | None = None
) -> EnsembleSpec:
    base = base or EnsembleFlags()
    ensemble = replace(
        base,
        method=base.method if flags.method is None else flags.method,
        lookahead=base.lookahead if flags.lookahead is None else flags.lookahead,
        sharpening=base.sharpening if flags.sharpening is None else flags.sharpening,
        weights=flags.weights,
        max_batch_size=base.max_batch_size if flags.batch_size is None else flags.batch_size,
    )
    return loading.spec_of(members, placement, ensemble, SamplingFlags(max_tokens=flags.max_tokens, seed=flags.seed))


def _run_paper(tasks: Sequence[str], members: MemberFlags, placement: PlacementFlags, flags: EvaluationFlags) -> int:
    from safe_llm.evaluation import paper
    from safe_llm.evaluation.paper_view import print_plan

    named = [name for name in ("preset", "drafter", "verifier", "config") if getattr(members, name) is not None]
    if named:
        raise ConfigError(f"--{named[0]} does not go with `paper`, whose models are fixed", hint="use --pairs")
    names = tuple(task for task in tasks if task != PAPER) or paper.TASK_NAMES
    ensembles = paper.ensembles_named(flags.pairs)
    base = EnsembleFlags(**paper.CONFIG.model_dump())
    if flags.dry_run:
        config = _spec(_members(ensembles[0]), placement, flags, base).ensemble
        size = config.max_batch_size
        print_plan(terminal.console(), paper.plan_paper(ensembles, names, batch_size=size, limit=flags.limit))
        return 0
    output = Path(flags.output or DEFAULT_OUTPUT)
    for place, ensemble in enumerate(ensembles):
        for done in ensembles[:place]:
            paper.reuse_answers(output / done.name, output / ensemble.name, ensemble)
        _evaluate(_spec(_members(ensemble), placement, flags, base), names, flags, output / ensemble.name)
    return 0


def _members(ensemble: PaperEnsemble) -> MemberFlags:
    drafter, *verifiers = (model.hub_id for model in ensemble.models)
    return MemberFlags(drafter=drafter, verifier=verifiers)


def _evaluate(spec: EnsembleSpec, tasks: Sequence[str], flags: EvaluationFlags, output: Path) -> int:
    settings = _settings(spec, tasks, flags, output)
    progress = not flags.quiet
    with terminal.waiting("reading the data", shown=progress):
        from safe_llm.evaluation.evaluate import evaluate, prepare

        prepared = prepare(settings)

    def load(configs: Sequence[MemberConfig]) -> Sequence[Member]:
        return load_members(configs, progress=progress)

    try:
        with terminal.progress_bars(enabled=progress) as report:
            results = evaluate(prepared, load=load, report=report)
    except KeyboardInterrupt:
        terminal.say(f"\nthe same command goes on with what is in {terminal.harmless(str(output))}")
        raise
    from safe_llm.evaluation.tables import print_results

    print_results(terminal.console(), results)
    terminal.say(f"results are in {terminal.harmless(str(settings.output))}")
    return 0


def _settings(spec: EnsembleSpec, tasks: Sequence[str], flags: EvaluationFlags, output: Path) -> Settings:
    from safe_llm.evaluation.evaluate import Settings
    from safe_llm.evaluation.runs import DEFAULT_RUNS

    runs = DEFAULT_RUNS if flags.runs is None else tuple(run.strip() for run in flags.runs.split(",") if run.strip())
    return Settings(
        spec=spec,
        tasks=tuple(tasks),
        data=flags.data,
        output=output,
        runs=runs,
        limit=flags.limit,
        seed=flags.seed or 0,
    )


def load_members(configs: Sequence[MemberConfig], *, progress: bool) -> Sequence[Member]:
    """Load members; tests put scripted ones in their place."""
    names = ", ".join(config.display_name for config in configs)
    with terminal.waiting(f"loading {names}", shown=progress):
        from safe_llm.ensemble import load_members as load

        return load(configs, progress=progress)

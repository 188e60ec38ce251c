"""What `safe-llm bench` does: everything is checked before weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_llm.cli import loading, terminal
from safe_llm.cli.answering import json_line
from safe_llm.cli.bench_options import BenchFlags
from safe_llm.cli.options import EnsembleFlags, MemberFlags, PlacementFlags, SamplingFlags
from safe_llm.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from safe_llm.bench.benchmark import Prepared
    from safe_llm.bench.results import Results

__all__ = ["run"]


def run(members: MemberFlags, placement: PlacementFlags, ensemble: EnsembleFlags, flags: BenchFlags) -> int:
    """Measure, print tables, and print one JSON object as the last line.

    Raises:
        ConfigError: Flags that are not valid or exclude each other.
        EvaluationError: Data that cannot be used, or a file that cannot be written.
        SafeLLMError: A member cannot be had, or failed.
    """
    _check(ensemble, flags)
    spec = loading.spec_of(members, placement, ensemble, SamplingFlags())
    with terminal.waiting("reading the data", shown=not flags.quiet):
        from safe_llm.bench.benchmark import Settings, prepare

        prepared = prepare(
            Settings(
                spec=spec,
                contenders=None if flags.contenders is None else tuple(flags.contenders),
                workloads=tuple(flags.workload or ()),
                data=flags.data,
                rounds=flags.rounds,
                tokens=flags.tokens,
                batch=tuple(flags.batch or ()),
                seed=flags.seed,
            )
        )
    results = _measure(prepared, flags)
    _hand_over(results, flags)
    return 0


def _check(ensemble: EnsembleFlags, flags: BenchFlags) -> None:
    """Refuse flags that are wrong by themselves, and files that cannot be written."""
    if ensemble.mode is not None:
        raise ConfigError("--mode does not go with bench, whose contenders are modes", hint="use --contenders")
    if flags.threads is not None and flags.threads < 1:
        raise ConfigError(f"threads must be at least 1, got {flags.threads}")
    if flags.own_time and (flags.plot is not None or flags.batch):
        raise ConfigError(f"give --own-time or {'--batch' if flags.batch else '--plot'}, not both")
    if flags.plot is not None:
        from safe_llm.bench.plot import require_plotting

        require_plotting()
    for path in filter(None, (flags.output, flags.plot)):
        try:
            open(path, "a").close()
        except OSError as error:
            raise EvaluationError(f"cannot write {path!r}: {error.strerror}") from None


def _measure(prepared: Prepared, flags: BenchFlags) -> Results:
    """Load the members, measure, and print the tables, the ceiling first."""
    from safe_llm.bench.benchmark import bench, bench_ceiling, bench_own_time
    from safe_llm.bench.tables import print_ceiling, print_results

    _use_threads(flags.threads)
    progress = not flags.quiet
    members = loading.load_ensemble(prepared.settings.spec, progress=progress).members
    console = terminal.console()
    if flags.own_time:
        with terminal.waiting("measuring", shown=progress):
            results = bench_own_time(prepared, members)
    else:
        with terminal.waiting("measuring the machine", shown=progress):
            ceiling = bench_ceiling(prepared, members)
        print_ceiling(console, ceiling)
        with terminal.progress_bars(enabled=progress) as report:
            results = bench(prepared, members, ceiling=ceiling, progress=report)
    print_results(console, results)
    return results


def _use_threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _hand_over(results: Results, flags: BenchFlags) -> None:
    from safe_llm.bench.results import results_as_dict, write_json

    if flags.output is not None:
        write_json(results, flags.output)
    if flags.plot is not None:
        from safe_llm.bench.plot import write_plot

        write_plot(results, flags.plot)
    terminal.write(json_line(results_as_dict(results)))

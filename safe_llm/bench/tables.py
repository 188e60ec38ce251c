"""Results as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from safe_llm.bench.ceiling import PASS_TOKENS, Ceiling, MemberCost
from safe_llm.bench.figures import BatchFigures, ContenderFigures
from safe_llm.bench.replay import OwnTime
from safe_llm.bench.results import Results, WorkloadResult
from safe_llm.evaluation.statistics import Interval
from safe_llm.visible import harmless

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_ceiling", "print_results"]

_CONTENDER_HEADER = ("", "tokens/s", "ratio (95 %)", "TTFT ms", "TPOT ms", "peak MB")
_COUNT_HEADER = ("per token", "drafter passes", "verifier passes", "drafted", "rounds", "ensembled", "replaced")
_NONE = "-"


def print_ceiling(console: Console, ceiling: Ceiling) -> None:
    """Print what the machine allows."""
    console.print("Ceiling: memory bandwidth over the bytes of a step; passes relative to the drafter's step (c)")
    header = ("", "GB/s", "MB per step", "tokens/s", *(f"c of {count}" for count in PASS_TOKENS))
    _print_table(console, header, map(_ceiling_cells, ceiling.members))


def _ceiling_cells(cost: MemberCost) -> tuple[str, ...]:
    return (
        cost.member,
        _NONE if cost.bandwidth is None else f"{cost.bandwidth / 1e9:.1f}",
        _NONE if cost.bytes_per_step is None else f"{cost.bytes_per_step / 1e6:.0f}",
        _NONE if cost.roofline is None else f"{cost.roofline:.1f}",
        *(f"{cost.relative[count]:.2f}" for count in PASS_TOKENS),
    )


def print_results(console: Console, results: Results) -> None:
    """Print everything but the ceiling."""
    for workload in results.workloads:
        _print_workload(console, workload, results)
    if results.batches:
        console.print(f"\nBatches of safe, {results.settings['workloads'][0]}", soft_wrap=True)
        _print_table(console, ("rows", "tokens/s", "ratio (95 %)"), map(_batch_cells, results.batches))
    if results.own_time is not None:
        _print_own_time(console, results.own_time)


def _print_workload(console: Console, workload: WorkloadResult, results: Results) -> None:
    rounds, tokens = results.settings["rounds"], results.settings["tokens"]
    caption = f"{workload.name}: medians of {rounds} rounds, at most {tokens} tokens; ratio to {workload.reference}"
    console.print(f"\n{harmless(caption)}; peak of {results.memory}", soft_wrap=True)
    _print_table(console, _CONTENDER_HEADER, map(_contender_cells, workload.contenders))
    console.print()
    drafter = results.members[0]["name"]
    _print_table(console, _COUNT_HEADER, (_count_cells(figures, drafter) for figures in workload.contenders))
    for name, reason in workload.left_out.items():
        console.print(harmless(f"{name} is left out: {reason}"), soft_wrap=True)


def _contender_cells(figures: ContenderFigures) -> tuple[str, ...]:
    return (
        figures.name,
        f"{figures.tokens_per_s:.2f}",
        _interval(figures.ratio),
        f"{1e3 * figures.ttft_s:.0f}",
        _NONE if figures.tpot_s is None else f"{1e3 * figures.tpot_s:.1f}",
        f"{figures.peak_bytes / 1e6:.0f}",
    )


def _count_cells(figures: ContenderFigures, drafter: str) -> tuple[str, ...]:
    passes = figures.forwards_per_token
    others = [f"{share:.3f}" for member, share in passes.items() if member != drafter]
    return (
        figures.name,
        f"{passes.get(drafter, 0.0):.3f}",
        " + ".join(others) or _NONE,
        *(
            _NONE if count is None else f"{count:.3f}"
            for count in (
                figures.drafts_per_token,
                figures.rounds_per_token,
                figures.ensemble_rate,
                figures.replacement_rate,
            )
        ),
    )


def _batch_cells(figures: BatchFigures) -> tuple[str, ...]:
    return str(figures.rows), f"{figures.tokens_per_s:.2f}", _interval(figures.ratio)


def _print_own_time(console: Console, own: OwnTime) -> None:
    caption = (
        f"Own time of a round, {' + '.join(own.members)}, {own.num_tokens} tokens, {own.ensemble_rate:.1%} ensembled"
    )
    console.print(harmless(caption), soft_wrap=True)
    rows = [("first 400 tokens", f"{1e3 * own.first_s:.2f}"), ("last 400 tokens", f"{1e3 * own.last_s:.2f}")]
    _print_table(console, ("", "ms"), rows)


def _interval(interval: Interval | None) -> str:
    return "1" if interval is None else f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _print_table(console: Console, header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(header):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(harmless, row))
    console.print(table)

"""Results as tables: one kind for documents, one for terminals, with the same cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.evaluation.files import write_text
from safe_llm.evaluation.results import ContenderResult, Results, TaskComparison, TaskResult
from safe_llm.evaluation.statistics import Interval
from safe_llm.visible import harmless

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_results", "write_markdown"]

_HEADER = ("", "accuracy (95 %)", "strict", "ensembled", "replaced", "unaligned", "tokens", "tokens/s", "cut", "failed")
_COMPARISON_HEADER = ("", "difference (95 %)", "won", "lost", "p", "strict difference (95 %)")


def write_markdown(results: Results, path: Path) -> None:
    """Write `results.md`.

    Raises:
        EvaluationError: It cannot be written.
    """
    write_text(path, "\n".join(_markdown_lines(results)) + "\n")


def print_results(console: Console, results: Results) -> None:
    """Print the tables."""
    from rich.table import Table

    for task in results.tasks:
        console.print(harmless(_caption(task)), soft_wrap=True)
        for header, rows in (
            (_HEADER, [_cells(result) for result in task.contenders]),
            (_COMPARISON_HEADER, _comparison_rows(task)),
        ):
            table = Table(box=None, pad_edge=False)
            for column in header:
                table.add_column(column, justify="right" if column else "left")
            for row in rows:
                table.add_row(*map(harmless, row))
            if rows:
                console.print(table)
        for note in _notes(task):
            console.print(harmless(note), soft_wrap=True)


def _markdown_lines(results: Results) -> Iterator[str]:
    for task in results.tasks:
        yield f"### {_escaped(_caption(task))}"
        yield ""
        yield from _markdown_table(_HEADER, [_cells(result) for result in task.contenders])
        yield ""
        if rows := _comparison_rows(task):
            yield from _markdown_table(_COMPARISON_HEADER, rows)
            yield ""
        for note in _notes(task):
            yield f"- {_escaped(note)}"
        yield ""
    members = (" ".join(str(m[key]) for key in ("name", "dtype", "device") if m[key]) for m in results.members)
    yield f"Members: {_escaped(', '.join(members))}.  "
    machine = results.machine
    yield f"Machine: {_escaped(', '.join([machine['cpu'], *machine['gpus']]))}; {machine['num_threads']} threads.  "
    yield f"{', '.join(f'{name} {version}' for name, version in results.versions.items())}; {results.created}."


def _markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(map(_escaped, row))} |"


def _caption(task: TaskResult) -> str:
    return f"{task.title}, {task.contenders[0].num_items} items of {task.data}"


def _cells(result: ContenderResult) -> tuple[str, ...]:
    flexible, strict = result.accuracy["flexible"], result.accuracy["strict"]
    ensembled = ("-",) * 3 if result.is_alone else tuple(map(_percent, _rates(result)))
    return (
        result.name,
        f"{_percent(flexible.value)} ({_range(flexible)})",
        _percent(strict.value),
        *ensembled,
        f"{result.num_tokens:,}",
        f"{result.tokens_per_s:.1f}",
        str(sum(result.finish_details.get(detail, 0) for detail in ("max_tokens", "context"))),
        str(result.num_failed),
    )


def _rates(result: ContenderResult) -> tuple[float, float, float]:
    return result.ensemble_rate, result.replacement_rate, result.unaligned_rate


def _comparison_rows(task: TaskResult) -> list[tuple[str, ...]]:
    strict = {(c.one, c.other): c.comparison.difference for c in task.comparisons if c.metric == "strict"}
    return [
        _comparison_cells(c, strict[c.one, c.other], is_best=c.other == task.best_member)
        for c in task.comparisons
        if c.metric == "flexible"
    ]


def _comparison_cells(found: TaskComparison, strict: Interval, *, is_best: bool) -> tuple[str, ...]:
    other = f"{found.other} (best member)" if is_best else found.other
    comparison = found.comparison
    return (
        f"{found.one} - {other}",
        _points(comparison.difference),
        str(comparison.wins),
        str(comparison.losses),
        f"{comparison.p_value:.3f}",
        _points(strict),
    )


def _notes(task: TaskResult) -> Iterator[str]:
    for result in task.contenders:
        if result.failures:
            errors = ", ".join(f"{name} {count}" for name, count in result.failures.items())
            yield f"{result.name}: {result.num_failed} items failed and count as wrong ({errors})"
    if task.num_left_out:
        yield f"{task.num_left_out} items of {task.data} cannot be answered (no choices) and were not asked"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _range(interval: Interval) -> str:
    return f"{_percent(interval.low)} to {_percent(interval.high)}"


def _points(difference: Interval) -> str:
    return f"{100 * difference.value:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"


def _escaped(text: str) -> str:
    return harmless(text).replace("|", "\\|").replace("<", "&lt;")

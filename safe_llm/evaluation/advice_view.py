"""Advice on the terminal: the measurements as tables, the recommendation in sentences, the lines to use it."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase
from typing import TYPE_CHECKING

from safe_llm.config import EnsembleSpec
from safe_llm.evaluation.advice import Advice
from safe_llm.evaluation.ready import command_line, toml_text
from safe_llm.evaluation.tokenization import Unspelled
from safe_llm.visible import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["letter", "print_advice"]

_NUM_SPANS = 3
"""Ranges that are shown of what a member cannot represent."""


def print_advice(console: Console, advice: Advice, spec: EnsembleSpec) -> None:
    """Print advice.

    Args:
        console: Takes text literally (no markup).
        advice: What to print.
        spec: The recommended ensemble, with the models as the user named them.
    """
    found = advice.measurements
    letters = {one.member: letter(i) for i, one in enumerate(found.accuracies)}
    for title, table in (
        (f"Each member alone: task {advice.task}, {_num_items(advice)}", _accuracies(advice, letters)),
        (f"Tokenizers, on {found.num_bytes:,} bytes of text", _tokenizers(advice, letters)),
        (
            f"One drafts, one verifies: on {_counted(_num_answers(advice), 'answer')} of the drafter",
            _roles(advice, letters),
        ),
    ):
        console.print(harmless(title), style="bold")
        console.print(table)
        console.print()
    lines = [line for one in found.unspelled if one.spans for line in _gaps(one)]
    for heading, sentences in (
        ("Not representable", lines),
        ("Recommendation", advice.recommendation.reasons),
        ("But", advice.recommendation.warnings),
    ):
        if sentences:
            console.print(heading, style="bold")
            for sentence in sentences:
                console.print(harmless(f"- {sentence}"), soft_wrap=True)
            console.print()
    console.print("To use it", style="bold")
    console.print(harmless(f"{command_line(spec)}\n\nor as a file for --config:\n\n{toml_text(spec)}"), soft_wrap=True)


def letter(index: int) -> str:
    """Return what the tables call a member: A, B, ..., and its number beyond Z."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else f"#{index + 1}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _num_items(advice: Advice) -> str:
    asked = _counted(advice.num_items, "item")
    return f"{asked} ({len(advice.left_out)} left out: nobody can answer them)" if advice.left_out else asked


def _num_answers(advice: Advice) -> int:
    return max(agreement.num_answers for agreement in advice.measurements.agreements)


def _accuracies(advice: Advice, letters: dict[str, str]) -> Table:
    table = _table("", "member", "right", "95 % interval", "as asked", "cut", "tokens/s")
    for one in advice.measurements.accuracies:
        table.add_row(
            letters[one.member],
            harmless(one.member),
            f"{one.num_right} of {one.num_items}  {one.value:.1%}",
            f"{one.interval.low:.1%} to {one.interval.high:.1%}",
            str(one.num_strict),
            str(one.num_cut),
            f"{one.tokens_per_s:.1f}",
        )
    return table


def _tokenizers(advice: Advice, letters: dict[str, str]) -> Table:
    table = _table("pair", "tokens shared", "of the first's", "of the second's", "numbers cut alike")
    for overlap, numbers in zip(advice.measurements.overlaps, advice.measurements.numbers, strict=True):
        table.add_row(
            f"{letters[overlap.first]}, {letters[overlap.second]}",
            f"{overlap.num_shared:,}",
            f"{overlap.part_of_first:.1%}",
            f"{overlap.part_of_second:.1%}",
            f"{numbers.num_alike} of {numbers.num_numbers}",
        )
    return table


def _roles(advice: Advice, letters: dict[str, str]) -> Table:
    columns = ("boundaries shared", "C1", "C2", "would ensemble", "would replace", "unchecked")
    table = _table("drafts", "verifies", *columns)
    for one, boundaries in zip(advice.measurements.agreements, advice.measurements.boundaries, strict=True):
        counts = (one.num_c1, one.num_c2, one.num_ensembled, one.num_replaced, one.num_unchecked)
        table.add_row(
            letters[one.drafter],
            letters[one.verifier],
            f"{boundaries.share:.1%} of {boundaries.num_ends:,}",
            *(f"{one.share(count):.1%}" for count in counts),
        )
    return table


def _gaps(unspelled: Unspelled) -> Iterator[str]:
    shown = ", ".join(f"{start} to {end} of text {text + 1}" for text, start, end in unspelled.spans[:_NUM_SPANS])
    more = len(unspelled.spans) - _NUM_SPANS
    yield f"{unspelled.member}: bytes {shown}" + (f", and {more:,} ranges more" if more > 0 else "")


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, header_style="bold")

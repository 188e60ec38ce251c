"""The report on a terminal: everything that styles show, marks show too where there are no styles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from safe_llm.report.tables import counter_rows, latency_rows
from safe_llm.report.view import Answer, answers
from safe_llm.report.words import Look
from safe_llm.trace import Trace
from safe_llm.visible import harmless, label

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = ["print_report"]


def print_report(console: Console, traces: Sequence[tuple[str, Trace]]) -> None:
    """Print the requests of all traces.

    Args:
        console: Takes text literally (no markup). Styles are used if it is a terminal that has any.
        traces: The traces with their names.
    """
    for source, trace in traces:
        if trace.problem:
            console.print(harmless(f"{source}: incomplete, {trace.problem}"), soft_wrap=True)
    for answer in answers(traces):
        _print_answer(console, answer)


def _print_answer(console: Console, answer: Answer) -> None:
    has_styles = console.is_terminal and not console.is_dumb_terminal
    console.rule(harmless(f"{answer.number}. {answer.source}"), align="left", characters="─", style="")
    for line in _facts(answer):
        console.print(harmless(line), soft_wrap=True)
    console.print()
    console.print(_text(answer, has_styles), soft_wrap=True)
    console.print()
    console.print(_legend(answer, has_styles))
    if answer.request.points:
        console.print()
        console.print(_points(answer))
    if answer.request.result is not None:
        console.print()
        console.print(_counters(answer))
        console.print()
        console.print(_latency(answer))
    console.print()


def _facts(answer: Answer) -> Iterator[str]:
    header, request = answer.header, answer.request
    drafter, *verifiers = (member.name for member in header.members)
    yield f"drafter {drafter}" + "".join(f", verifier {name}" for name in verifiers)
    yield f"mode {header.config.get('mode')}, method {header.config.get('method')}; {request.started}"
    content = request.prompt.content
    if isinstance(content, str):
        yield f"prompt: {content}"
    elif content is not None:
        yield from (f"{message.role}: {message.content}" for message in content)
    if request.error is not None:
        yield f"failed: {request.error}"
    elif request.result is None:
        yield "the trace ends before the answer does"


def _text(answer: Answer, has_styles: bool) -> Text:
    from rich.text import Text

    shown = [(token.look, harmless(token.text[: token.num_kept])) for token in answer.tokens]
    text = Text()
    # neighbours of one look are marked together, but each ensemble point by itself
    for (look, _), group in groupby(enumerate(shown), key=lambda item: (item[1][0], _alone(item[1][0], item[0]))):
        _append(text, "".join(part for _, (_, part) in group), look, has_styles)
    return text


def _alone(look: Look, number: int) -> int:
    return number if look.key in ("replaced", "confirmed") else -1


def _append(text: Text, part: str, look: Look, has_styles: bool) -> None:
    if part and has_styles:
        text.append(part, style=look.style)
    elif part:
        text.append(part.join(look.marks))


def _legend(answer: Answer, has_styles: bool) -> Table:
    from rich.text import Text

    table = _table()
    for look, count in answer.looks:
        sample = Text()
        _append(sample, look.title, look, has_styles)
        table.add_row(sample, str(count), look.meaning)
    return table


def _points(answer: Answer) -> Table:
    names = [member.name for member in answer.header.members]
    table = _table("token", "drafted", "chosen", "why", *(harmless(f"P {name}") for name in names))
    for point in answer.request.points:
        chosen = label(point.chosen) if point.replaced else "the same"
        given = (point.probabilities.get(name) for name in names)
        shown = ["-" if p is None else f"{p:.3f}" for p in given]
        table.add_row(str(point.position), label(point.drafted), chosen, harmless(point.reason), *shown)
    return table


def _counters(answer: Answer) -> Table:
    table = _table("counter", "value")
    for name, value in counter_rows(answer):
        table.add_row(harmless(name), value)
    return table


def _latency(answer: Answer) -> Table:
    table = _table("latency", "time", "share")
    for row in latency_rows(answer):
        table.add_row(*row)
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False, show_header=bool(columns), header_style="bold")

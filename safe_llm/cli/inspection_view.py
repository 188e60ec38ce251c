"""An `Inspection` on the terminal: everything that colours show, characters show too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from safe_llm.cli import terminal
from safe_llm.cli.answering import json_line
from safe_llm.cli.inspection import Inspection, MemberReport

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["print_json", "print_report"]

SHARED, OWN, INEXACT = "\u2551", "\u2502", "\u2248"
_STYLES = ("cyan", "magenta")


def print_json(report: Inspection) -> None:
    """Print the report as one JSON object."""
    terminal.write(json_line(asdict(report)))


def print_report(report: Inspection) -> None:
    """Print the report for people."""
    console = terminal.console()
    shared = frozenset(report.shared_boundaries)
    for member in report.members:
        for line in _facts(member):
            console.print(terminal.harmless(line), soft_wrap=True)
        console.print(_pieces(member, shared), soft_wrap=True)
        if member.chat is not None:
            chat = OWN.join(map(_one_line, member.chat))
            console.print(f"  as a conversation, {len(member.chat)} tokens:\n  {OWN}{chat}{OWN}", soft_wrap=True)
        console.print()
    for line in (*_legend(report), *_unshared(report), *_overlaps(report)):
        console.print(terminal.harmless(line), soft_wrap=True)


def _facts(member: MemberReport) -> Iterator[str]:
    limit = "unknown" if member.max_context is None else f"{member.max_context:,} tokens"
    yield f"{member.role} {member.name} (licence: {member.licence or 'unknown'})"
    yield f"  {member.kind} tokenizer, {member.num_tokens:,} tokens, {member.width:,} logits; context window: {limit}"
    yield f"  END: {' '.join(member.end_tokens) or 'none'}"
    for note in member.notes:
        yield f"  note: {note}"
    for start, end in member.inexact_spans:
        yield f"  cannot represent bytes {start} to {end} exactly: abstains there"


def _pieces(member: MemberReport, shared: frozenset[int]) -> Text:
    from rich.text import Text

    line = Text(f"  {len(member.tokens)} tokens:\n  {SHARED}")
    for i, token in enumerate(member.tokens):
        mark = INEXACT if token.end is None else SHARED if token.end in shared else OWN
        line.append(_one_line(token.text), style=_STYLES[i % 2])
        line.append(mark)
    return line


def _one_line(text: str) -> str:
    return terminal.harmless(text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t"))


def _legend(report: Inspection) -> Iterator[str]:
    count = len(report.shared_boundaries)
    yield f"{SHARED} boundary of all members ({count})"
    yield f"{OWN} not of all   {INEXACT} after a token that does not spell the text"


def _unshared(report: Inspection) -> Iterator[str]:
    starts = {token.start: token.text for token in report.members[0].tokens}
    if report.unshared:
        yield "The drafter's tokens that begin where a member has no boundary, so that nobody checks them:"
    for item in report.unshared:
        token = starts.get(item.byte_offset)
        before = "the next token" if token is None else f"{OWN}{_one_line(token)}{OWN}"
        yield f"  byte {item.byte_offset}, {before}: {item.outcome} for {item.member}"


def _overlaps(report: Inspection) -> Iterator[str]:
    for pair in report.overlaps:
        yield (
            f"Vocabulary overlap of {pair.first} and {pair.second}: {pair.num_shared:,} tokens,"
            f" {pair.part_of_first:.1%} and {pair.part_of_second:.1%} of each"
        )

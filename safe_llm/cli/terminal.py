"""Stdout and stderr: bytes unchanged into a pipe, nothing that could drive a terminal into a terminal."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

from safe_llm.visible import harmless

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "MARKS",
    "abandon_stdout",
    "console",
    "harmless",
    "marked",
    "prepare",
    "progress_bars",
    "say",
    "say_error",
    "write",
]

DEBUG_VARIABLE = "SAFE_LLM_DEBUG"

MARKS = {
    "replaced": ("\x1b[1;7m", "\x1b[0m"),  # bold, reverse video
    "confirmed": ("\x1b[4m", "\x1b[0m"),  # underlined
}
"""How tokens look that the ensemble replaced or confirmed: attributes, no colours, so everybody sees them."""

_PLAIN_MARKS = {"replaced": ("[[", "]]"), "confirmed": ("[", "]")}


def prepare() -> None:
    """Make stdout take any text: UTF-8 without newline translation into a pipe, what it can show on a terminal."""
    if sys.stdout.isatty():
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    else:
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]


def write(text: str, mark: str | None = None) -> None:
    """Write a piece of the answer to stdout at once; on a terminal harmless, and in the style of `mark`."""
    if sys.stdout.isatty():
        text = marked(harmless(text), mark)
    sys.stdout.write(text)
    sys.stdout.flush()


def marked(text: str, mark: str | None) -> str:
    """Put a mark's style around `text`; brackets where the terminal has no styles."""
    if mark is None or not text:
        return text
    marks = _PLAIN_MARKS if os.environ.get("TERM", "dumb") == "dumb" else MARKS
    return text.join(marks[mark])


def say(text: str) -> None:
    """Write one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def say_error(message: str, hint: str = "") -> None:
    """Write one `error:` line, and a `hint:` line if there is one, to stderr."""
    for label, text in (("error", message), ("hint", hint)):
        if text:
            say(f"{label}: {harmless(' '.join(text.split()))}")


def say_interrupted() -> None:
    """Say so, on a line of its own."""
    say("\ninterrupted" if sys.stderr.isatty() else "interrupted")


def say_traceback_if_wanted(error: BaseException) -> None:
    """Write the traceback to stderr if the user asked for it."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)


def abandon_stdout() -> None:
    """Let the interpreter's last flush go nowhere: nobody reads stdout any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[None]:
    """Show on stderr, if it is a terminal, what takes time, and erase it; nothing inside can write to stdout."""
    shown = shown and sys.stderr.isatty()
    if shown:
        _overwrite(sys.stderr, f"{what} ...\r")
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if shown:
            _overwrite(sys.stderr, " " * (len(what) + 4) + "\r")


def _overwrite(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


@contextmanager
def progress_bars(*, enabled: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show on stderr, if it is a terminal, how far things are: yields what takes a name, what is done, and of all."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    places: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (enabled and sys.stderr.isatty()),
    ) as bars:

        def report(name: str, done: int, total: int) -> None:
            if name not in places:
                places[name] = bars.add_task(harmless(name), total=total)
            bars.update(places[name], completed=done)

        yield report


def console() -> Console:
    """Return a rich console on stdout that takes all text literally."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)

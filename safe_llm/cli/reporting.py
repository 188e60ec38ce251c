"""What `safe-llm report` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safe_llm.cli import terminal
from safe_llm.errors import ConfigError, TraceError
from safe_llm.trace import read_trace

__all__ = ["report"]


def report(paths: Sequence[str], html: str | None) -> int:
    """Show traces on the terminal, or write them to an HTML file.

    Raises:
        TraceError: A trace cannot be read, or the file cannot be written.
        ConfigError: The file to write is one of the traces.
    """
    if html is not None and any(_is_same(path, html) for path in paths):
        raise ConfigError(f"--html would overwrite the trace {html!r}", hint="name another file")
    traces = [(path, read_trace(path)) for path in paths]
    if html is None:
        from safe_llm.report import print_report

        print_report(terminal.console(), traces)
        return 0
    from safe_llm.report import render_html

    page = render_html(traces)
    try:
        Path(html).write_text(page, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write the report {html!r}: {error.strerror}") from None
    terminal.say(f"wrote {terminal.harmless(html)}")
    return 0


def _is_same(path: str, other: str) -> bool:
    return Path(path).resolve() == Path(other).resolve()

"""Progress bars on stderr, for people at a terminal only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress_display"]


def progress_display(*, enabled: bool) -> Progress:
    """Return a rich progress display, a context manager; without a terminal on stderr it shows nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    class Amount(DownloadColumn):
        """Bytes done and to do; nothing for a task that only spins."""

        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        Amount(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (enabled and sys.stderr.isatty()),
    )

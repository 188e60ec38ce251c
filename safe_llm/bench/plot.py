"""Results as a picture: speed along the text, where the time goes, speed against batch size."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.bench.figures import BatchFigures, speed_along_text
from safe_llm.bench.results import Results, WorkloadResult
from safe_llm.errors import ConfigError, EvaluationError
from safe_llm.visible import harmless

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["require_plotting", "write_plot"]


def require_plotting() -> None:
    """Raise ConfigError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, not installed", hint='install it with: pip install "safe-llm-ensemble[eval]"'
        )


def write_plot(results: Results, path: str | Path) -> None:
    """Write a picture with a row of panels per workload, and one for batches where they were measured.

    Needs no display and leaves matplotlib's global state alone.

    Raises:
        EvaluationError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(results.workloads) + bool(results.batches)
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, squeeze=False)
    for (left, right), workload in zip(panels, results.workloads, strict=False):
        _draw_speed(left, workload, results)
        _draw_phases(right, workload)
    if results.batches:
        _draw_batches(panels[-1, 0], results.batches)
        panels[-1, 1].set_axis_off()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script; the tables have it
            figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _draw_speed(axes: Axes, workload: WorkloadResult, results: Results) -> None:
    for figures in workload.contenders:
        own = [t for t in results.trials if (t.workload, t.contender) == (workload.name, figures.name)]
        points = speed_along_text(own)
        axes.plot([at for at, _ in points], [speed for _, speed in points], marker=".", label=harmless(figures.name))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the answer")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"{harmless(workload.name)}: speed along the text", parse_math=False)
    axes.grid(alpha=0.3)
    if workload.contenders:
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _draw_phases(axes: Axes, workload: WorkloadResult) -> None:
    shown = [figures for figures in workload.contenders if figures.phases]
    names = dict.fromkeys(phase for figures in shown for phase in figures.phases)
    done = [0.0] * len(shown)
    for phase in names:
        shares = [100 * figures.phases.get(phase, 0.0) for figures in shown]
        axes.barh(range(len(shown)), shares, left=done, label=phase)
        done = [before + share for before, share in zip(done, shares, strict=True)]
    axes.set_yticks(range(len(shown)), [harmless(figures.name) for figures in shown], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("share of the time in %")
    axes.set_title(f"{harmless(workload.name)}: where the time goes", parse_math=False)
    axes.set_xlim(0, 100)
    if shown:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_batches(axes: Axes, batches: tuple[BatchFigures, ...]) -> None:
    rows, speeds = [b.rows for b in batches], [b.tokens_per_s for b in batches]
    axes.plot(rows, speeds, marker="o")
    axes.set_xticks(rows)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.1 * max(speeds))
    axes.set_xlabel("rows")
    axes.set_ylabel("tokens/s, all rows")
    axes.set_title("safe: speed against batch size")
    axes.grid(alpha=0.3)

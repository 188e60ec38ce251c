"""Results as a picture: accuracies with their intervals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.results import Results, TaskResult
from safe_llm.visible import harmless

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_plot"]


def write_plot(results: Results, path: Path) -> None:
    """Write `results.png`: a panel per task, a point per contender, the ensembles in another colour.

    Needs no display and leaves matplotlib's global state alone.

    Raises:
        EvaluationError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = sum(1.1 + 0.35 * len(task.contenders) for task in results.tasks)
    figure = Figure(figsize=(6.4, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results.tasks), 1, squeeze=False)[:, 0]
    for axes, task in zip(panels, results.tasks, strict=True):
        _draw(axes, task)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script; the tables have it
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _draw(axes: Axes, task: TaskResult) -> None:
    for place, result in enumerate(task.contenders):
        accuracy = result.accuracy["flexible"]
        below, above = accuracy.value - accuracy.low, accuracy.high - accuracy.value
        axes.errorbar(
            100 * accuracy.value,
            place,
            xerr=[[100 * max(0.0, below)], [100 * max(0.0, above)]],
            fmt="o",
            capsize=3,
            color="tab:gray" if result.is_alone else "tab:blue",
        )
        axes.annotate(
            f"{100 * accuracy.value:.1f}",
            (100 * accuracy.value, place),
            (0, 6),
            textcoords="offset points",
            ha="center",
        )
    low = min(100 * result.accuracy["flexible"].low for result in task.contenders)
    high = max(100 * result.accuracy["flexible"].high for result in task.contenders)
    axes.set_xlim(max(-2.0, low - 5), min(102.0, high + 5))
    # parse_math off: a model's name is no formula
    axes.set_yticks(range(len(task.contenders)), [harmless(r.name) for r in task.contenders], parse_math=False)
    axes.set_ylim(len(task.contenders) - 0.4, -0.7)
    axes.set_xlabel("accuracy in %, with 95 % interval")
    axes.set_title(harmless(f"{task.title}, {task.contenders[0].num_items} items"), parse_math=False)
    axes.grid(axis="x", alpha=0.3)

"""The recipe of the paper's table, printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safe_llm.evaluation.paper import CONTEXT_TOKENS, PUBLISHED, TASK_NAMES, PaperPlan
from safe_llm.evaluation.tasks import TASKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_plan"]


def print_plan(console: Console, plan: PaperPlan) -> None:
    """Print what the run would download, the memory and the number of answers it takes, and the published figures."""
    console.print(_models(plan))
    console.print(
        f"Download: {_gigabytes(plan.download_bytes)}. Memory of the largest ensemble, over all its devices: "
        f"{_gigabytes(plan.largest_memory_bytes)} and activations (bfloat16 weights, caches of {plan.batch_size} "
        f"answers of {CONTEXT_TOKENS} tokens).",
        soft_wrap=True,
    )
    total = sum(plan.num_generations.values())
    counts = ", ".join(f"{TASKS[name].title} {count:,}" for name, count in plan.num_generations.items())
    console.print(
        f"Answers to decode: about {total:,} ({counts}); members alone, every-token and safe.", soft_wrap=True
    )
    console.print()
    console.print("Published (accuracy in %, arXiv 2510.15346; other machines, other harness):", soft_wrap=True)
    console.print(_published(plan))


def _models(plan: PaperPlan) -> Table:
    table = _table("", "model", "licence", "download", "cache per token", "memory")
    for model in plan.models:
        table.add_row(
            model.letter,
            model.hub_id,
            model.licence,
            _gigabytes(model.weight_bytes),
            f"{model.kv_bytes_per_token / 1024:.0f} KiB",
            _gigabytes(plan.memory_bytes(model)),
        )
    return table


def _published(plan: PaperPlan) -> Table:
    table = _table("", "", *(TASKS[name].title for name in TASK_NAMES), "mean")
    wanted = {model.letter for model in plan.models} | {ensemble.name for ensemble in plan.ensembles}
    for (models, method), figures in PUBLISHED.items():
        if models in wanted:
            table.add_row(models, method, *map(str, figures), f"{sum(figures) / len(figures):.2f}")
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"

"""What `safe-llm models` does."""

from __future__ import annotations

import json
from dataclasses import asdict

from safe_llm.cli import terminal
from safe_llm.config import PRESETS, MemberConfig
from safe_llm.errors import UnknownNameError
from safe_llm.models import DEMO_MODELS, ModelListing, fetch_preset, list_models, remove_model, resolve

__all__ = ["fetch", "remove", "show_models"]


def show_models(*, as_json: bool) -> int:
    """Print the demo models and the cached ones."""
    listings = list_models()
    if as_json:
        values = [asdict(listing) | {"path": listing.path and str(listing.path)} for listing in listings]
        terminal.write(json.dumps(values, ensure_ascii=False, indent=2) + "\n")
        return 0
    from rich.table import Table

    table = Table("name", "kind", "licence", "size", "cached", box=None, pad_edge=False)
    for listing in listings:
        table.add_row(*map(terminal.harmless, _row(listing)))
    console = terminal.console()
    console.print(table)
    for listing in listings:
        if listing.licence_note:
            console.print(f"{listing.name}: {listing.licence_note}", soft_wrap=True)
    for name, spec in PRESETS.items():
        console.print(f"preset {name}: {' + '.join(m.display_name for m in spec.members)}", soft_wrap=True)
    return 0


def _row(listing: ModelListing) -> tuple[str, ...]:
    size = _megabytes(listing.size_bytes) + ("" if listing.is_cached else " to download")
    return listing.name, listing.source, listing.licence or "unknown", size, "yes" if listing.is_cached else "no"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def fetch(name: str, *, progress: bool) -> int:
    """Fetch a preset's models or one model, and print where they are.

    Raises:
        UnknownNameError: Neither a preset nor a model; names the nearest of both.
        ModelError: One cannot be had.
    """
    if name in PRESETS:
        models = fetch_preset(name, progress=progress)
    else:
        try:
            models = [resolve(MemberConfig(model=name), progress=progress)]
        except UnknownNameError:
            raise UnknownNameError("preset or model", name, {*PRESETS, *DEMO_MODELS}) from None
    for model in models:
        terminal.write(f"{terminal.harmless(model.name)}\t{model.path}\n")
    return 0


def remove(name: str) -> int:
    """Delete a cached model and say how much that freed."""
    freed = remove_model(name)
    terminal.write(f"removed {name}, {_megabytes(freed)} freed\n")
    return 0

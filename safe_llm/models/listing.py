"""What is there to use: demo models and cached ones; fetching a preset's, removing one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safe_llm.config import NEEDS, preset
from safe_llm.errors import ModelNotFoundError, UnknownNameError
from safe_llm.models import store
from safe_llm.models.demo import DEMO_MODELS
from safe_llm.models.disk import explain_disk_errors
from safe_llm.models.fetch import ResolvedModel, resolve

__all__ = ["ModelListing", "fetch_preset", "list_models", "remove_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One line of `models list`.

    Attributes:
        name: As `remove_model` takes it, and a configuration where it is a demo model. `NAME.gguf` is what llama.cpp
            needs of the model `NAME`.
        source: `demo` or `gguf`.
        licence: As the model states it, or None.
        licence_note: One sentence about the terms of a demo model, or "".
        size_bytes: On disk where it is cached, else of its download.
        is_cached: It is ready to load.
        path: Its folder, or None.
    """

    name: str
    source: str
    licence: str | None
    licence_note: str
    size_bytes: int
    is_cached: bool
    path: Path | None


def list_models() -> list[ModelListing]:
    """Return every demo model, then every other cached model. Hub models stay in the hub's own cache, unlisted."""
    cached = {model.record.name: model for model in store.iter_cached()}
    names = [*DEMO_MODELS, *(name for name in cached if name not in DEMO_MODELS)]
    return [_listing(name, cached.get(name)) for name in names]


def _listing(name: str, cached: store.CachedModel | None) -> ModelListing:
    demo = DEMO_MODELS.get(name)
    source = cached.record.source if cached else "demo"
    size = cached.size_bytes if cached else demo.download_bytes if demo else 0
    return ModelListing(
        name=name,
        source=source,
        licence=demo.licence if demo else cached.record.licence if cached else None,
        licence_note=demo.licence_note if demo else "",
        size_bytes=size,
        is_cached=cached is not None,
        path=cached.path if cached else None,
    )


def remove_model(name: str) -> int:
    """Delete a cached model and return how many bytes that freed.

    Raises:
        UnknownNameError: Neither a demo model nor a cached one.
        ModelNotFoundError: A demo model that is not cached.
    """
    # Only names that lie in the store are ever joined to its path.
    present = store.folder_names()
    if name not in present:
        if name in DEMO_MODELS:
            raise ModelNotFoundError(f"{name!r} is not in the cache", hint="there is nothing to remove")
        raise UnknownNameError("model", name, {*present, *DEMO_MODELS})
    with explain_disk_errors(store.home(), 0):
        return store.discard(name)


def fetch_preset(name: str, *, progress: bool = True) -> list[ResolvedModel]:
    """Fetch what the members of a preset need, the drafter's first; what is in the cache costs nothing."""
    return [resolve(member, needs=NEEDS[member.backend], progress=progress) for member in preset(name).members]

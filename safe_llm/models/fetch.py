"""A member's `model` becomes a local folder that transformers can load, or a GGUF file with a tokenizer: `resolve`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safe_llm.config import MemberConfig, Needs
from safe_llm.errors import (
    ConfigError,
    ModelAccessError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
)
from safe_llm.models import store
from safe_llm.models.demo import DEMO_MODELS, DemoModel
from safe_llm.models.disk import explain_disk_errors
from safe_llm.models.progress import progress_display

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ResolvedModel", "resolve"]

_BLOCK_BYTES = 1 << 22
_PACKED = ".gguf"
"""Ends the name of a cached folder without converted weights: a tokenizer, and a demo model's GGUF file."""
_DEMO_FILE = "model.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A local folder with a model, and where it comes from.

    Attributes:
        path: The folder: `config.json`, safetensors weights (where they are needed), tokenizer.
        name: Demo name, folder name, name in the cache, or hub id.
        source: Where it was found.
        revision: Commit of a hub model.
        licence: As the model states it, or None.
        fingerprint: Identity of the weights and tokenizer, for caches.
        gguf: The GGUF file, where that is what is needed.
    """

    path: Path
    name: str
    source: Literal["demo", "folder", "gguf", "hub"]
    revision: str | None
    licence: str | None
    fingerprint: str
    gguf: Path | None = None

    @property
    def weights(self) -> Path:
        """What a backend loads: the GGUF file, else the folder."""
        return self.gguf or self.path


def resolve(config: MemberConfig, *, needs: Needs = "safetensors", progress: bool = True) -> ResolvedModel:
    """Return the local folder of a member's model; fetch and convert it first where that is needed.

    A demo model's name comes first, then an existing folder or `.gguf` file, then a hub id. What is in the cache
    costs milliseconds: nothing is hashed or loaded.

    Args:
        config: Which model.
        needs: What of it is needed here: its weights as safetensors, its GGUF file, or only the tokenizer.
        progress: Show progress bars on a terminal.

    Raises:
        UnknownNameError: Neither a demo model nor a path nor a hub id.
        ModelError: It cannot be had, is damaged, or cannot be a member; the subclass and the message say which.
        ConfigError: A revision is given for something that is not on the hub.
    """
    name, kind = config.model, _path_kind(config.model)
    is_local = name in DEMO_MODELS or kind is not None
    if is_local and config.revision is not None:
        raise ConfigError(
            f"revision {config.revision!r} is given for {name!r}, which is not on the hub", hint="leave it out"
        )
    if name in DEMO_MODELS:
        return _resolve_demo(DEMO_MODELS[name], needs, progress)
    if kind == "file":
        return _resolve_file(Path(name).expanduser().resolve(), needs, progress)
    if needs == "gguf" and (kind == "folder" or _is_hub_id(name)):
        raise UnsupportedModelError(
            f"{name!r} is a {kind or 'hub id'}, and llama.cpp reads a .gguf file",
            hint="give the path of a .gguf file or a demo model's name, or take backend 'transformers'",
        )
    if kind == "folder":
        return _resolve_folder(Path(name).expanduser(), needs)
    return _resolve_hub(config, needs, progress)


def _path_kind(text: str) -> Literal["folder", "file"] | None:
    try:
        path = Path(text).expanduser()
        return "folder" if path.is_dir() else "file" if path.is_file() else None
    except PermissionError:
        raise ModelAccessError(f"{text!r} may not be read", hint="check the permissions of the path") from None
    except (OSError, ValueError, RuntimeError):
        # Too long, a NUL in it, or the home of an unknown user: not an existing path.
        return None


def _is_hub_id(text: str) -> bool:
    from safe_llm.models.hub import is_hub_id

    return is_hub_id(text) and not text.endswith(".gguf")


def _looks_like_path(text: str) -> bool:
    return bool(re.search(r"[/\\\0]|^[.~]|\.\.|\.gguf$", text))


def _resolve_demo(model: DemoModel, needs: Needs, progress: bool) -> ResolvedModel:
    hit = _cached(model.name, needs) or _build_demo(model, needs, progress)
    return _resolved(hit, "demo", hit.path / _DEMO_FILE if needs == "gguf" else None)


def _cached(name: str, needs: Needs) -> store.CachedModel | None:
    """Return a cached folder that has what is needed; a tokenizer lies in either."""
    packed = store.cached(name + _PACKED) if needs != "safetensors" else None
    return packed if packed or needs == "gguf" else store.cached(name)


def _build_demo(model: DemoModel, needs: Needs, progress: bool) -> store.CachedModel:
    from safe_llm.models.convert import converter_versions
    from safe_llm.models.download import download_gguf

    with_weights = needs == "safetensors"
    name = model.name if with_weights else model.name + _PACKED

    def build(scratch: Path, target: Path) -> store.ModelRecord:
        gguf = (scratch if with_weights else target) / _DEMO_FILE
        packed = store.cached(model.name + _PACKED)
        if packed is None:
            download_gguf(model, gguf, scratch, display)
        else:
            gguf = packed.path / _DEMO_FILE
        _convert(gguf, target, model.name, display, weights=with_weights)
        return store.ModelRecord(
            name=name,
            source="demo",
            origin=model.name,
            sha256=model.sha256,
            licence=model.licence,
            converter=converter_versions(),
        )

    needed = model.gguf_bytes + with_weights * model.converted_bytes
    with explain_disk_errors(store.home(), needed), progress_display(enabled=progress) as display:
        return store.get_or_build(name, build)


def _convert(gguf: Path, target: Path, name: str, display: Progress, *, weights: bool) -> str | None:
    from safe_llm.models.convert import convert_gguf

    task = display.add_task(f"{name}: converting", total=None)
    converted = convert_gguf(gguf, target, weights=weights)
    display.remove_task(task)
    licence = converted.metadata.get("general.license")
    return str(licence) if licence else None


def _resolve_folder(path: Path, needs: Needs) -> ResolvedModel:
    from safe_llm.models.folder import check_folder, fingerprint_folder

    folder = path.resolve()
    check_folder(folder, weights=needs == "safetensors")
    return ResolvedModel(
        path=folder,
        name=folder.name,
        source="folder",
        revision=None,
        licence=None,
        fingerprint=f"folder:{fingerprint_folder(folder)}",
    )


def _resolve_file(path: Path, needs: Needs, progress: bool) -> ResolvedModel:
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(
            f"{str(path)!r} is not a .gguf file", hint="give a .gguf file, or the folder that holds config.json"
        )
    stat = path.stat()
    stamp = (stat.st_size, stat.st_mtime_ns)
    file = path if needs == "gguf" else None
    for model in store.iter_cached():
        known = model.record.origin == str(path) and model.record.stamp == stamp
        # a folder with weights has a tokenizer too
        if known and (needs != "safetensors" or not model.record.name.endswith(_PACKED)):
            return _resolved(model, "gguf", file)
    return _resolved(_build_gguf(path, stamp, needs, progress), "gguf", file)


def _build_gguf(path: Path, stamp: tuple[int, int], needs: Needs, progress: bool) -> store.CachedModel:
    from safe_llm.models.convert import converter_versions

    with_weights = needs == "safetensors"
    needed = 4 * stamp[0] if with_weights else 0
    with explain_disk_errors(store.home(), needed), progress_display(enabled=progress) as display:
        sha256 = _hash(path, stamp[0], display)
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_") or "model"
        name = f"{stem[:100]}-{sha256[:16]}{'' if with_weights else _PACKED}"

        def build(_scratch: Path, target: Path) -> store.ModelRecord:
            licence = _convert(path, target, path.name, display, weights=with_weights)
            return store.ModelRecord(
                name=name,
                source="gguf",
                origin=str(path),
                sha256=sha256,
                licence=licence,
                stamp=stamp,
                converter=converter_versions(),
            )

        return store.get_or_build(name, build)


def _hash(path: Path, size: int, display: Progress) -> str:
    task = display.add_task(f"{path.name}: hashing", total=size)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            display.advance(task, len(block))
    display.remove_task(task)
    return digest.hexdigest()


def _resolve_hub(config: MemberConfig, needs: Needs, progress: bool) -> ResolvedModel:
    from safe_llm.models.hub import download_snapshot

    name = config.model
    if not _is_hub_id(name):
        if _looks_like_path(name):
            raise ModelNotFoundError(
                f"there is no model at {name!r}", hint="give an existing folder or .gguf file, or a hub id (owner/name)"
            )
        raise UnknownNameError("model", name, DEMO_MODELS)
    path = download_snapshot(
        name,
        revision=config.revision,
        with_code=config.trust_remote_code,
        with_weights=needs == "safetensors",
        progress=progress,
    )
    from safe_llm.models.folder import check_folder

    check_folder(path, weights=needs == "safetensors")
    return ResolvedModel(
        path=path,
        name=name,
        source="hub",
        revision=path.name,
        licence=None,
        fingerprint=f"hub:{name}@{path.name}",
    )


def _resolved(model: store.CachedModel, source: Literal["demo", "gguf"], gguf: Path | None) -> ResolvedModel:
    record = model.record
    return ResolvedModel(
        path=model.path,
        name=record.name.removesuffix(_PACKED),
        source=source,
        revision=None,
        licence=record.licence,
        fingerprint=f"gguf:{record.sha256}:{record.format}",
        gguf=gguf,
    )

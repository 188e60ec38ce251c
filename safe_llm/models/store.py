"""The cache folder of converted models: built aside under a lock, published by one rename.

    <home>/models/<name>/   a complete model; its `safe_llm.json` lists every file with its size
                            (<name>.gguf: what llama.cpp needs of it; only a demo model's file itself lies there too)
    <home>/work/<name>/     a model in the making; whoever holds its lock may delete it
    <home>/locks/<name>.lock

A process that dies leaves at most a work folder, which nobody takes for a model and which the next fetch deletes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import filelock
import platformdirs

from safe_llm.errors import ModelNotFoundError

__all__ = ["CachedModel", "ModelRecord", "cached", "discard", "get_or_build", "home", "iter_cached"]

FORMAT = 1
"""Raised when the conversion changes, so that folders of an earlier conversion are built anew."""

RECORD_FILE = "safe_llm.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """What `safe_llm.json` says about a cached model.

    Attributes:
        name: The folder's name.
        source: `demo` or `gguf`.
        origin: The demo model's name, or the path of the GGUF file at the time.
        sha256: Of the GGUF file.
        licence: As the model states it, or None.
        stamp: Size and modification time (ns) of a GGUF file at `origin`, to know it again without hashing it.
        converter: Versions of the packages that converted it.
        files: Size of every file in the folder, apart from the record itself.
        format: Version of the conversion.
    """

    name: str
    source: str
    origin: str
    sha256: str
    licence: str | None = None
    stamp: tuple[int, int] | None = None
    converter: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A complete model in the cache."""

    path: Path
    record: ModelRecord

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return sum(self.record.files.values())


def home() -> Path:
    """Return the cache folder: `SAFE_LLM_HOME`, else the user's cache folder of the platform."""
    configured = os.environ.get("SAFE_LLM_HOME")
    return Path(configured).expanduser().absolute() if configured else Path(platformdirs.user_cache_dir("safe_llm"))


def model_path(name: str) -> Path:
    """Return where the model `name` lies or would lie; a name that could leave the store is refused."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ModelNotFoundError(f"{name!r} is not a name of a cached model", hint="see `safe-llm models list`")
    return home() / "models" / name


def cached(name: str) -> CachedModel | None:
    """Return the complete model `name`, or None; costs one small read and a stat per file."""
    path = model_path(name)
    record = _read_record(path)
    if record is None or record.format != FORMAT or record.name != name:
        return None
    whole = all(_size(path / file) == size for file, size in record.files.items())
    return CachedModel(path=path, record=record) if whole else None


def iter_cached() -> Iterator[CachedModel]:
    """Yield every complete model, by name."""
    for name in folder_names():
        model = cached(name)
        if model is not None:
            yield model


def folder_names() -> list[str]:
    """Return the names of all folders among the cached models, complete or not, sorted."""
    models = home() / "models"
    if not models.is_dir():
        return []
    return sorted(entry.name for entry in models.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name))


def get_or_build(name: str, build: Callable[[Path, Path], ModelRecord]) -> CachedModel:
    """Return the cached model `name`, building it first where it is missing or incomplete.

    Args:
        name: Its name in the cache.
        build: Gets an empty scratch folder and an empty folder to fill with the model; returns its record, without
            `files`. Only one process or thread runs it at a time for a name; the others wait and take its result.
    """
    model = cached(name)
    if model is not None:
        return model
    with _lock(name):
        model = cached(name)
        if model is not None:
            return model
        _remove_stale_work(except_name=name)
        with _workspace(name) as work:
            scratch, target = work / "scratch", work / "model"
            scratch.mkdir()
            target.mkdir()
            record = build(scratch, target)
            shutil.rmtree(scratch)
            return _publish(target, record)


def discard(name: str) -> int:
    """Delete the folder of `name`, complete or not, and return how many bytes that freed."""
    path = model_path(name)
    with _lock(name), _workspace(name) as work:
        freed = sum(_size(file) or 0 for file in path.rglob("*") if not file.is_dir())
        # Moved away by one rename first, so that nobody ever sees it half deleted.
        os.replace(path, work / "model")
    return freed


def _publish(target: Path, record: ModelRecord) -> CachedModel:
    files = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    whole = replace(record, files=files)
    (target / RECORD_FILE).write_text(json.dumps(asdict(whole), indent=2) + "\n", encoding="utf-8")
    for file in target.iterdir():
        _sync(file)
    path = model_path(record.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or path.is_symlink():
        # What lies there was found incomplete under the lock; a rename cannot replace a folder with files in it.
        os.replace(path, target.parent / "replaced")
    os.replace(target, path)
    return CachedModel(path=path, record=whole)


def _read_record(path: Path) -> ModelRecord | None:
    try:
        values = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or set(values) != {entry.name for entry in fields(ModelRecord)}:
        return None
    stamp = values.pop("stamp")
    if not isinstance(values["files"], dict) or not isinstance(stamp, list | None):
        return None
    return ModelRecord(**values, stamp=tuple(stamp) if stamp else None)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _sync(file: Path) -> None:
    # A rename may reach the disk before the data do; after a power cut that would be a model full of zeros.
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _lock(name: str) -> filelock.BaseFileLock:
    path = home() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path)


@contextmanager
def _workspace(name: str) -> Iterator[Path]:
    work = home() / "work" / name
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        _delete_tree(work)


def _remove_stale_work(except_name: str) -> None:
    """Delete the work folders whose lock is free: the system releases a lock when its process dies, however it dies."""
    work = home() / "work"
    for entry in work.iterdir() if work.is_dir() else ():
        if entry.name == except_name:
            continue
        try:
            with _lock(entry.name).acquire(blocking=False):
                _delete_tree(entry)
        except filelock.Timeout:
            continue


def _delete_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)

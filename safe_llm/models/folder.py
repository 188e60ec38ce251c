"""Checks of a model folder that need no model library: is everything there, whole, and safe to load?"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safe_llm.errors import ModelCorruptError, ModelError, ModelNotFoundError, UnsupportedModelError

__all__ = ["check_folder", "fingerprint_folder"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_IDENTITY = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
_MAX_HEADER_BYTES = 100_000_000


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Check that `folder` holds a configuration, safetensors weights (where needed) and a tokenizer, all whole.

    Reads the headers of the weights, not the weights.

    Raises:
        ModelNotFoundError: There is no `config.json`.
        ModelCorruptError: A file is truncated or not what its name says, or a listed shard is missing.
        UnsupportedModelError: There are no safetensors weights, or no tokenizer.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} has no config.json", hint="give the folder that holds config.json and the weights"
        )
    _read_object(folder / "config.json")
    for file in _weight_files(folder) if weights else ():
        _check_safetensors(file)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UnsupportedModelError(
            f"{str(folder)!r} has no tokenizer", hint="put the model's tokenizer.json into the folder"
        )


def fingerprint_folder(folder: Path) -> str:
    """Return an identity of the folder's contents from the names, sizes and times of its files."""
    files = sorted({file for pattern in _IDENTITY for file in folder.glob(pattern)})
    stats = [(file.name, file.stat()) for file in files]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise _no_weights(folder)
    shards = _read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelCorruptError(f"{str(index)!r} lists no weights", hint="download it again")
    files = [folder / str(name) for name in sorted(set(map(str, shards.values())))]
    for file in files:
        if file.parent != folder or not file.is_file():
            raise ModelCorruptError(
                f"{str(folder)!r} lacks {file.name!r}, which its index lists", hint="download that file again"
            )
    return files


def _no_weights(folder: Path) -> ModelError:
    where = repr(str(folder))
    if (folder / "adapter_model.safetensors").is_file():
        return UnsupportedModelError(f"{where} holds an adapter only", hint="merge it into its base model first")
    if any(folder.glob("*.gguf")):
        return UnsupportedModelError(f"{where} holds GGUF weights", hint="give the path of the .gguf file itself")
    if any(file for pattern in _PICKLES for file in folder.glob(pattern)):
        return UnsupportedModelError(
            f"{where} holds pickled weights only, which can run code when they are loaded",
            hint="convert them to safetensors, or use a version of the model that has them",
        )
    return ModelNotFoundError(f"{where} has no weights", hint="it needs model.safetensors")


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise _damaged(path, "it is a Git LFS pointer", "run `git lfs pull`")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, "it is not a safetensors file, or truncated")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise _damaged(path, "its header is not valid") from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise _damaged(path, f"{size} bytes long, its header says {needed}")


def _damaged(path: Path, what: str, hint: str = "download it again") -> ModelCorruptError:
    return ModelCorruptError(f"{str(path)!r} is damaged: {what}", hint=hint)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _damaged(path, "it is not a JSON object")
    return values

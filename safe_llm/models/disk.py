"""Disk space: checked before work starts, and explained when it runs out nevertheless."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safe_llm.errors import ModelAccessError

__all__ = ["check_space", "explain_disk_errors", "format_bytes", "is_disk_full"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


def format_bytes(count: int) -> str:
    """Return `count` in decimal MB or GB, as disks and downloads are labelled."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def is_disk_full(error: BaseException) -> bool:
    """Say whether `error` means that the disk is full, also where Rust or a subprocess only tells it in words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(sign in str(error) for sign in ("No space left on device", "Disk quota exceeded"))


def disk_full_error(where: Path, needed: int) -> ModelAccessError:
    """Build the error that says how much room is needed, and where."""
    free = shutil.disk_usage(_existing(where)).free
    return ModelAccessError(
        f"the disk is full: {format_bytes(needed)} are needed in {str(where)!r}, {format_bytes(free)} are free",
        hint="make room there, or set SAFE_LLM_HOME to a folder on a larger disk",
    )


def check_space(where: Path, needed: int) -> None:
    """Raise ModelAccessError unless `needed` bytes are free on the disk that holds `where`."""
    if shutil.disk_usage(_existing(where)).free < needed:
        raise disk_full_error(where, needed)


@contextmanager
def explain_disk_errors(where: Path, needed: int) -> Iterator[None]:
    """Turn a full or read-only disk inside the block into a ModelAccessError; let every other error through."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full_error(where, needed) from None
        if error.errno in _READ_ONLY:
            raise ModelAccessError(
                f"no access to {str(error.filename or where)!r}: {error.strerror}",
                hint="check its permissions; SAFE_LLM_HOME can name another cache folder",
            ) from None
        raise


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())

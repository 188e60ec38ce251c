"""Loading of transformers models from a local folder: type, device, attention, and errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, ModelCorruptError, UnsupportedModelError

__all__ = ["end_ids_of", "load_model", "place", "quiet_transformers"]


def load_model(path: Path, *, config: MemberConfig, device: str | None) -> PreTrainedModel:
    """Load a causal language model from a folder with `config.json` and safetensors; reads nothing else.

    Args:
        path: The folder.
        config: Gives dtype, device_map and trust_remote_code.
        device: Where to, unless `config.device_map` says it.

    Raises:
        ConfigError: The device does not exist here.
        ModelCorruptError: A file is missing, damaged, or lacks weights.
        UnsupportedModelError: transformers has no causal language model of this type.
    """
    name = config.display_name
    _check_device(config.device or device)
    if not (path / "config.json").is_file():
        raise ModelCorruptError(f"model {name!r}: there is no config.json in {str(path)!r}")
    with quiet_transformers(), _reading(name, path):
        described = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=described,
            dtype=_dtype(config, device),
            attn_implementation=_attention(described),
            device_map=config.device_map or device or "cpu",
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with their names
        )
    # transformers fills what is missing with random numbers and only warns.
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise ModelCorruptError(
            f"model {name!r}: {len(wrong)} tensors in {str(path)!r} are missing or of another shape than its "
            f"configuration says, {wrong[0]!r} for one",
            hint="download it again",
        )
    loaded: PreTrainedModel = model
    return loaded


def end_ids_of(model: PreTrainedModel) -> list[int]:
    """Return the ids that end an answer according to the model's two configurations, the generation's first."""
    found: list[int] = []
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ends = getattr(config, "eos_token_id", None)
        found += ends if isinstance(ends, list) else [] if ends is None else [ends]
    return list(dict.fromkeys(found))


def _check_device(device: str | None) -> None:
    """Raise ConfigError unless torch has this device."""
    try:
        wanted = torch.device(device or "cpu")
    except RuntimeError:
        raise ConfigError(f"unknown device {device!r}", hint="use 'cpu', 'cuda' or 'cuda:N'") from None
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ConfigError(
            f"device {device!r} does not exist: torch sees {there or 'no'} CUDA device{'s' if there > 1 else ''}",
            hint="use device='cpu', or a build of torch for your GPU",
        )


def place(members: Sequence[MemberConfig]) -> list[str]:
    """Return each member's device: the one it asks for, else the GPUs in turn, one each, else the CPU.

    A member on a server takes no GPU of this machine.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices, taken = [], 0
    for member in members:
        if member.device is not None or member.server is not None or not num_gpus:
            devices.append(member.device or "cpu")
            continue
        devices.append(f"cuda:{taken % num_gpus}")
        taken += 1
    return devices


def _dtype(config: MemberConfig, device: str | None) -> torch.dtype:
    """Resolve `auto`: bfloat16 where the device computes fast in it, else float32."""
    if config.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.dtype)
        return chosen
    on_gpu = torch.cuda.is_available() and (config.device_map is not None or str(device).startswith("cuda"))
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else _cpu_has_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX-BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _attention(config: PreTrainedConfig) -> str:
    """Choose the attention: SDPA, but eager where the logits are capped, which SDPA cannot do."""
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return "eager" if capped is not None else "sdpa"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and advice, and restore them."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _reading(name: str, path: Path) -> Iterator[None]:
    """Turn what transformers raises while it reads a folder into our errors."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelCorruptError(
            f"model {name!r}: the files in {str(path)!r} cannot be read as a model: {error}",
            hint="download it again",
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(f"model {name!r} cannot be loaded by transformers: {error}") from error

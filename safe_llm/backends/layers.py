"""What a model's configuration says about its layers: windows, context length, and whether it can be rolled back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from safe_llm.errors import UnsupportedModelError

__all__ = ["FULL", "SLIDING", "Layers", "Masks", "build_masks", "context_limit", "refuse_unsupported"]

Masks = torch.Tensor | dict[str, torch.Tensor | None] | None
FULL, SLIDING = "full_attention", "sliding_attention"
_ALIBI_MODELS = frozenset({"bloom", "mpt"})
# These rotary embeddings depend on the longest position of the batch beyond the trained length: one row would change
# another row's logits, and keys cached before the switch would not fit those after it.
_LENGTH_DEPENDENT_ROPES = frozenset({"longrope", "dynamic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Which layers attend to a window.

    Attributes:
        is_sliding: One flag per layer.
        window: Size of the window, 0 where no layer has one.
        by_type: Whether the model takes a dict with a mask per attention type, because it mixes them.
    """

    is_sliding: tuple[bool, ...]
    window: int
    by_type: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Layers:
        """Read a text configuration that `refuse_unsupported` let pass."""
        types = _layer_types(config)
        is_sliding = tuple(kind == SLIDING for kind in types)
        return cls(
            is_sliding=is_sliding,
            window=int(config.sliding_window) if any(is_sliding) else 0,
            by_type=len(set(types)) > 1,
        )


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Raise unless the model is a causal decoder whose whole state is keys and values of plain or sliding attention.

    Raises:
        UnsupportedModelError: Says why, naming the model type and its layer types.
    """
    config = model.config.get_text_config(decoder=True)
    kind = f"model {name!r} (type {model.config.model_type!r})"
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is an encoder-decoder, not a decoder-only language model")
    if config.model_type in _ALIBI_MODELS or getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{kind} uses ALiBi, whose biases depend on the padding of the batch")
    types = sorted(set(_layer_types(config)) - {FULL, SLIDING})
    if types or model._is_stateful:
        what = f"layers of type {', '.join(types)}" if types else "a recurrent state"
        raise UnsupportedModelError(
            f"{kind} has {what}, whose state cannot be rolled back",
            hint="only models with full or sliding-window attention in every layer can be members",
        )


def context_limit(config: PreTrainedConfig, name: str, lowered: int | None) -> int:
    """Return the most tokens a row may hold: what the model was built for, or `lowered` if that is less.

    Raises:
        UnsupportedModelError: The configuration has no limit and none is given.
    """
    limits = [lowered] if lowered is not None else []
    limits += [
        int(value) for key in ("max_position_embeddings", "n_positions") if (value := getattr(config, key, None))
    ]
    if not limits:
        raise UnsupportedModelError(
            f"the configuration of model {name!r} has no context length",
            hint="set max_context for this member",
        )
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPES and rope.get("original_max_position_embeddings"):
            limits.append(int(rope["original_max_position_embeddings"]))
    return min(limits)


def build_masks(
    see: torch.Tensor, *, layers: Layers, kv_stop: int, window_start: int, dtype: torch.dtype | None
) -> torch.Tensor | dict[str, torch.Tensor | None]:
    """Return the attention mask(s) [B, 1, T, S]: True where the query may look.

    Args:
        see: Last position that each query sees, int64 [B, T].
        layers: Of the model; mixed attention types get a dict of masks.
        kv_stop: Full layers read positions 0 to `kv_stop`.
        window_start: Sliding layers read positions `window_start` to `kv_stop`.
        dtype: None for boolean masks; a float type makes them additive, as eager attention wants them.
    """
    last = see[:, None, :, None]
    masks: dict[str, torch.Tensor] = {}
    if layers.by_type or not layers.window:
        masks[FULL] = torch.arange(kv_stop, device=see.device) <= last
    if layers.window:
        positions = torch.arange(window_start, kv_stop, device=see.device)
        masks[SLIDING] = (positions <= last) & (positions > last - layers.window)
    if dtype is not None:
        masks = {kind: _additive(mask, dtype) for kind, mask in masks.items()}
    return dict(masks) if layers.by_type else next(iter(masks.values()))


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _layer_types(config: PreTrainedConfig) -> list[str]:
    """Return each layer's type in transformers' words; derived as transformers' own caches do if it is not given."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    if getattr(config, "sliding_window", None) is not None:
        kind = SLIDING
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = FULL
    return [kind] * int(config.num_hidden_layers)


def _rope_parameters(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return the rotary parameters, one mapping per layer type that has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]

"""Attention for passes with few new tokens: grouped-query heads are packed instead of repeated.

transformers' SDPA attention repeats keys and values for each query head of a group as soon as there is a mask, and
without a mask it leaves the groups to a kernel that is slow on CPUs. Here the query heads of a group become queries of
their one key head: the same sums, no copies of the cache. Measured on a CPU in bfloat16, 14 query heads on 2 key heads,
1024 keys: 8 times faster for one new token, twice as fast for six.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["use_packed_attention", "use_plain_attention"]

_NAME = "safe_llm_packed"
# Above it the repeated heads are cheap beside the arithmetic, and the packed queries gain nothing.
_MAX_QUERIES = 16


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model from `sdpa` to the packed variant; models with another attention stay as they are."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, packed_attention_forward)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def use_plain_attention(model: PreTrainedModel) -> None:
    """Undo `use_packed_attention`."""
    if model.config._attn_implementation == _NAME:
        model.set_attn_implementation("sdpa")


def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [B, heads, T, size] over keys and values [B, key heads, S, size] -> [B, T, heads, size]."""
    batch, heads, queries, size = query.shape
    groups = heads // key.shape[1]
    plain = kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    maskable = queries == 1 or (attention_mask is not None and attention_mask.shape[1] == 1)
    if groups == 1 or queries > _MAX_QUERIES or not plain or not maskable:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    mask = attention_mask
    if mask is not None and queries > 1:
        mask = mask.expand(batch, groups, queries, -1).reshape(batch, 1, groups * queries, -1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * queries, size), key, value, mask, dropout, scale=scaling
    )
    return attended.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None

"""GGUF files in float32 for llama.cpp: of a given Llama model, or of a random Gemma 3 with sliding windows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

NORMAL, CONTROL, UNUSED = 1, 3, 5


def write_llama(
    path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, extra: Sequence[tuple[str, object]] = ()
) -> Path:
    """Write `model` as it is; rows that its matrices have beyond the tokenizer become unused tokens."""
    config, weights = model.config, {name: value.detach().numpy() for name, value in model.named_parameters()}
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, part, heads in (
            ("attn_q", "self_attn.q_proj", config.num_attention_heads),
            ("attn_k", "self_attn.k_proj", config.num_key_value_heads),
        ):
            tensors[f"{ours}.{name}.weight"] = interleaved(weights[f"{theirs}.{part}.weight"], heads)
        for name, part in (
            ("attn_norm", "input_layernorm"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            tensors[f"{ours}.{name}.weight"] = weights[f"{theirs}.{part}.weight"]
    return write(
        path,
        "llama",
        {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
            "vocab_size": config.vocab_size,
            **dict(extra),
        },
        tensors,
        tokenizer,
    )


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Put the two halves of each head that rotate together side by side, as llama.cpp wants them."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gemma3(path: Path, tokenizer: Tokenizer, *, window: int, seed: int = 0) -> Path:
    """Write a random model with five sliding layers and a full one."""
    hidden, heads, size, ffn, layers, width = 32, 2, 16, 48, 6, tokenizer.get_vocab_size()
    random = np.random.default_rng(seed)
    tensors = {
        "token_embd.weight": random.normal(size=(width, hidden)) * 0.5,
        "output_norm.weight": np.ones(hidden),
    }
    for layer in range(layers):
        shapes = {
            "attn_norm": (hidden,),
            "attn_q": (heads * size, hidden),
            "attn_k": (size, hidden),
            "attn_v": (size, hidden),
            "attn_output": (hidden, heads * size),
            "attn_q_norm": (size,),
            "attn_k_norm": (size,),
            "post_attention_norm": (hidden,),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
            "post_ffw_norm": (hidden,),
        }
        for name, shape in shapes.items():
            value = np.ones(shape) if len(shape) == 1 else random.normal(size=shape) * 0.3
            tensors[f"blk.{layer}.{name}.weight"] = value
    return write(
        path,
        "gemma3",
        {
            "context_length": 256,
            "embedding_length": hidden,
            "block_count": layers,
            "feed_forward_length": ffn,
            "attention.head_count": heads,
            "attention.head_count_kv": 1,
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.sliding_window": window,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
            "vocab_size": width,
        },
        tensors,
        tokenizer,
    )


def write(
    path: Path,
    architecture: str,
    values: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    for key, value in values.items():
        kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    spec = json.loads(tokenizer.to_str())
    special = {token["id"] for token in spec["added_tokens"]}
    size, width = tokenizer.get_vocab_size(), len(tensors["token_embd.weight"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(tokenizer.id_to_token, range(size)), *(f"[PAD{i}]" for i in range(size, width))])
    writer.add_token_types([CONTROL if i in special else NORMAL if i < size else UNUSED for i in range(width)])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

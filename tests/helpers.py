"""Real tiny models with random weights on toy tokenizers, in fp32."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from safe_llm.backends.hf import HFBackend
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.member import Member
from safe_llm.prompting import Prompter
from safe_llm.testing.tokenizers import byte_level
from safe_llm.vocabulary import Vocabulary

torch.set_num_threads(1)

QUESTION = "In 1850 Leo has 12 apples"


def _tiny_model(architecture: str, vocab_size: int, seed: int, sharpness: float) -> PreTrainedModel:
    torch.manual_seed(seed)
    if architecture == "gpt2":  # absolute positions
        config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        config.bos_token_id = config.eos_token_id = None
        config.tie_word_embeddings = False
        return _sharpened(GPT2LMHeadModel(config).eval(), sharpness)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return _sharpened(LlamaForCausalLM(config).eval(), sharpness)


def _sharpened(model: PreTrainedModel, sharpness: float) -> PreTrainedModel:
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)  # random logits are nearly uniform; make them decide
    return model


def tiny_member(
    name: str,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    sharpness: float = 25.0,
    padding: int = 3,
    end_tokens: tuple[str, ...] = ("<|im_end|>", "</s>"),
    max_context: int | None = None,
    architecture: str = "llama",
) -> Member:
    """A random model whose logits are `padding` columns wider than its tokenizer."""
    ends = [i for text in end_tokens if (i := tokenizer.token_to_id(text)) is not None]
    width = tokenizer.get_vocab_size() + padding
    vocabulary = Vocabulary(tokenizer, width=width, end_ids=ends)
    model = _shared(architecture, width, seed, sharpness)
    backend = HFBackend(model, symbols=vocabulary.symbols, name=name, max_context=max_context, self_check=False)
    member = Member(name, backend, vocabulary, prompter=Prompter(vocabulary))
    member.fresh_model = _pristine(
        architecture, width, seed, sharpness
    )  # for the reference: never touched by the backend
    return member


_shared = functools.cache(_tiny_model)
_pristine = functools.cache(_tiny_model)


def tiny_folder(path: Path, tokenizer: Tokenizer | None = None, *, seed: int = 0, template: str | None = None) -> Path:
    """A local model folder: safetensors, configuration, fast tokenizer."""
    tokenizer = tokenizer or byte_level()
    end = "<|im_end|>" if tokenizer.token_to_id("<|im_end|>") is not None else "</s>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=template)
    wrapped.save_pretrained(path)
    model = _tiny_model("llama", tokenizer.get_vocab_size() + 3, seed, 25.0)
    model.generation_config.eos_token_id = tokenizer.token_to_id(end)
    model.save_pretrained(path)
    return path


def ensemble(*members: Member, **options: object) -> Ensemble:
    return Ensemble(members, EnsembleConfig(**{"lookahead": 5, "method": "unite", **options}))

"""What transformers' reading of a GGUF tokenizer leaves out, put right in the saved files.

Compared with the tokenizers that the models were trained with and with the file's own metadata:

- The pre-tokenizer is named in `tokenizer.ggml.pre`. transformers knows some names and silently splits like GPT-2 for
  all others; `smollm` and its like split every digit off first, the Llama 3 family looks whole words up before merging.
- Placeholder tokens (`[PAD151665]`, type UNUSED) become ordinary vocabulary whose text a model could "say".
- Image markers of Gemma are control tokens, but marked as text.
- `add_space_prefix = false` is not read for SentencePiece vocabularies, so each text would start with a space.
- `tokenizer_class` names a class that rebuilds the tokenizer from its vocabulary at load time: Qwen2Tokenizer then adds
  an NFC normalizer, which changes bytes. The saved `tokenizer.json` is the whole truth instead.
- The end tokens of a chat (`<|im_end|>`, `<|endoftext|>`) are several, a GGUF file names one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safe_llm.errors import UnsupportedModelError
from safe_llm.models.gguf_file import CONTROL, UNUSED, GgufFile

__all__ = ["end_token_ids", "repair_tokenizer"]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS_THEN_GPT2 = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTE_LEVEL, "use_regex": True}],
}
_QWEN2_SPLIT = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {**_BYTE_LEVEL, "use_regex": False},
    ],
}

_SPLITS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_GPT2
    ),
    **dict.fromkeys(("stablelm2", "hunyuan"), _QWEN2_SPLIT),
}
"""Pre-tokenizers that transformers does not know, by `tokenizer.ggml.pre`; the groups are llama.cpp's."""

_GPT2_LIKE = (
    *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
    *("granite-docling", "exaone4"),
)
"""Names for which splitting like GPT-2, transformers' fallback, is right."""

_WHOLE_WORDS_FIRST = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
)
"""Names whose words are looked up whole before they are merged, and whose texts start with BOS unless it is said."""

_MARKED_AS_TEXT = frozenset({"[multimodal]", "<start_of_image>", "<end_of_image>"})

_END_TOKENS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<EOT>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)


def end_token_ids(gguf: GgufFile) -> list[int]:
    """Return the ids that end an answer: the file's own first, then other control tokens known as ends."""
    named = [gguf.tokenizer(f"{kind}_token_id") for kind in ("eos", "eot", "eom")]
    control = gguf.tokens_of_type(CONTROL)
    by_text = [control[token] for token in _END_TOKENS if token in control]
    return list(dict.fromkeys(token for token in (*named, *by_text) if token is not None))


def repair_tokenizer(folder: Path, gguf: GgufFile) -> None:
    """Rewrite `tokenizer.json` and `tokenizer_config.json` in `folder`, as this module's docstring says.

    Raises:
        UnsupportedModelError: The file's pre-tokenizer is not known, so that texts would be split wrongly.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    if gguf.tokenizer("model") == "gpt2":
        _repair_splitting(tokenizer, gguf)
    _repair_control_tokens(tokenizer, gguf)
    _drop_unused_tokens(tokenizer, gguf)
    if gguf.tokenizer("add_space_prefix") is False:
        _drop_space_prefix(tokenizer)
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    _repair_config(folder / "tokenizer_config.json")


def _repair_splitting(tokenizer: dict[str, Any], gguf: GgufFile) -> None:
    name = gguf.tokenizer("pre", "")
    if name in _SPLITS:
        tokenizer["pre_tokenizer"] = _SPLITS[name]
    elif tokenizer["pre_tokenizer"]["type"] == "ByteLevel" and name not in _GPT2_LIKE:
        raise UnsupportedModelError(
            f"{gguf.path.name!r} splits text in a way that is not known (tokenizer.ggml.pre = {name!r})",
            hint="use the model's safetensors version, or a GGUF file made by a recent converter",
        )
    if name in _WHOLE_WORDS_FIRST:
        tokenizer["model"]["ignore_merges"] = True
        if gguf.tokenizer("add_bos_token") is None:
            _start_with_bos(tokenizer, gguf)


def _start_with_bos(tokenizer: dict[str, Any], gguf: GgufFile) -> None:
    index = gguf.tokenizer("bos_token_id")
    if index is None:
        return
    token = gguf.tokenizer("tokens")[index]
    first, second = ({"SpecialToken": {"id": token, "type_id": kind}} for kind in (0, 1))
    text, pair = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second, pair],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _repair_control_tokens(tokenizer: dict[str, Any], gguf: GgufFile) -> None:
    control = gguf.tokens_of_type(CONTROL)
    for token in tokenizer["added_tokens"]:
        if token["content"] in control or token["content"] in _MARKED_AS_TEXT:
            token["special"] = True


def _drop_unused_tokens(tokenizer: dict[str, Any], gguf: GgufFile) -> None:
    unused = gguf.tokens_of_type(UNUSED)
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokenizer["model"]["vocab"] = {token: index for token, index in vocabulary.items() if token not in unused}


def _drop_space_prefix(tokenizer: dict[str, Any]) -> None:
    pre_tokenizer, decoder = tokenizer["pre_tokenizer"], tokenizer["decoder"]
    if pre_tokenizer and pre_tokenizer["type"] == "Metaspace":
        pre_tokenizer["prepend_scheme"] = "never"
        decoder["decoders"] = [step for step in decoder["decoders"] if step["type"] != "Strip"]


def _repair_config(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only", "add_prefix_space"):
        config.pop(key, None)
    config["tokenizer_class"] = "TokenizersBackend"
    config["clean_up_tokenization_spaces"] = False
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

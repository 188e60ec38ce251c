"""GGUF files: reading them, converting them, and what the conversion puts right in the tokenizer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from safe_llm.errors import ModelCorruptError, ModelError, UnsupportedModelError
from safe_llm.models.convert import convert_gguf
from safe_llm.models.gguf_file import CONTROL, GgufFile, read_gguf
from safe_llm.models.gguf_tokenizer import end_token_ids
from test_models_support import HIDDEN, write_tiny_gguf

CHAT = [("<|begin|>", 3), ("<|im_end|>", 3), ("<|endoftext|>", 3), ("<tool>", 4), ("[PAD261]", 5)]


def convert(folder: Path, **options: object) -> Path:
    """Write a tiny GGUF file with `options`, convert it, and return the folder."""
    write_tiny_gguf(folder / "tiny.gguf", **options)
    target = folder / "model"
    target.mkdir()
    convert_gguf(folder / "tiny.gguf", target)
    return target


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def pieces(folder: Path, text: str) -> list[str]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).tokens


# Reading


def test_read_gguf_returns_metadata_and_weights(tmp_path: Path) -> None:
    tensors = write_tiny_gguf(tmp_path / "a.gguf", tokens=CHAT)
    gguf = read_gguf(tmp_path / "a.gguf")
    assert gguf.architecture == "llama"
    assert gguf.metadata["llama.embedding_length"] == HIDDEN
    assert gguf.tokenizer("pre") == "smollm"
    assert gguf.tokenizer("nothing", 7) == 7
    assert len(gguf.tokenizer("tokens")) == 257 + len(CHAT)
    assert gguf.tokens_of_type(CONTROL) == {"<|begin|>": 257, "<|im_end|>": 258, "<|endoftext|>": 259}
    assert gguf.num_weights == sum(tensor.size for tensor in tensors.values())


def test_truncated_gguf_is_corrupt_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    for length in [*range(0, 400), *range(400, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelCorruptError):
            read_gguf(path)


def test_gguf_with_random_damage_raises_model_errors_only(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for position in random.integers(4, 6000, size=3):
            damaged[position] = random.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            read_gguf(path)


@pytest.mark.parametrize("value", [0, "many", [1]])
def test_gguf_with_impossible_alignment_is_corrupt(tmp_path: Path, value: object) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", extra=[("general.alignment", value)])
    with pytest.raises(ModelCorruptError, match="alignment"):
        read_gguf(tmp_path / "a.gguf")


def test_gguf_with_nested_arrays_is_corrupt(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", extra=[("general.nested", [[1], [2]])])
    with pytest.raises(ModelCorruptError, match="array of type 9"):
        read_gguf(tmp_path / "a.gguf")


def test_unsupported_gguf_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path, extra=[("split.count", 3)])
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(64))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        read_gguf(path)


def test_end_tokens_are_the_files_own_then_other_control_tokens() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "<|im_end|>", "<end_of_turn>", "</s>"],
        "tokenizer.ggml.token_type": [1, 3, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
    }
    assert end_token_ids(GgufFile(path=Path("x"), metadata=metadata, num_weights=0)) == [2, 0, 1, 4]


# Converting


def test_conversion_keeps_the_weights(tmp_path: Path) -> None:
    target = convert(tmp_path, tokens=CHAT)
    tensors = write_tiny_gguf(tmp_path / "again.gguf", tokens=CHAT)
    weights = load_file(target / "model.safetensors")
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        assert weights[ours].dtype == torch.bfloat16
        torch.testing.assert_close(weights[ours], torch.from_numpy(tensors[theirs]).bfloat16(), rtol=0, atol=0)


def test_converted_folder_loads_and_runs(tmp_path: Path) -> None:
    target = convert(tmp_path, tokens=CHAT, chat_template="{{ messages[0].content }}")
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    ids = tokenizer("ab 12", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], 262)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|im_end|>")


def test_configs_state_the_files_ids_only(tmp_path: Path) -> None:
    config = convert(tmp_path, tokens=[("<|im_end|>", 3), ("<|endoftext|>", 3)])
    assert read(config / "generation_config.json") == {"eos_token_id": [257, 258]}
    values = read(config / "config.json")
    assert (values["bos_token_id"], values["eos_token_id"], values["pad_token_id"]) == (None, 257, None)
    assert not {"quantization_config", "_model_name_or_path"} & set(values)


def test_conversion_is_silent_and_restores_the_logging(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        convert(tmp_path)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
    assert logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


def test_unknown_architecture_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'strange'"):
        convert(tmp_path, architecture="strange")


def test_file_without_vocabulary_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safe_llm.models.convert as module

    write_tiny_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(module, "read_gguf", lambda path: GgufFile(path=path, metadata={}, num_weights=1))
    with pytest.raises(UnsupportedModelError, match="no vocabulary"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)


def test_unexpected_error_of_the_libraries_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safe_llm.models.convert as module

    def fail(*_: object, weights: bool) -> None:
        raise KeyError("blk.0.attn_q.weight")

    monkeypatch.setattr(module, "_save", fail)
    with pytest.raises(ModelCorruptError, match="cannot be converted: KeyError"):
        convert(tmp_path)


# Tokenizers


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "exaone"])
def test_digits_are_split_off_before_anything_else(tmp_path: Path, pre: str) -> None:
    folder = convert(tmp_path, pre=pre, tokens=[("ĠĠ", 1)], extra=[])
    tokenizer = read(folder / "tokenizer.json")
    assert tokenizer["pre_tokenizer"]["pretokenizers"][0] == {"type": "Digits", "individual_digits": True}
    splits = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in splits] == ["a", "ĠĠ", "1", "2"]


def test_gpt2_like_splitting_is_left_as_it_is(tmp_path: Path) -> None:
    folder = convert(tmp_path, pre="gpt-2")
    splits = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in splits] == ["a", "Ġ", "Ġ12"]


def test_qwen_like_splitting_is_known_under_its_other_names(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    ours, theirs = (convert(tmp_path / str(number), pre=pre) for number, pre in ((1, "stablelm2"), (2, "qwen2")))
    assert read(ours / "tokenizer.json")["pre_tokenizer"] == read(theirs / "tokenizer.json")["pre_tokenizer"]


@pytest.mark.parametrize("pre", ["falcon", "default", None, "from-next-year"])
def test_unknown_splitting_is_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre") as caught:
        convert(tmp_path, pre=pre)
    assert "safetensors" in caught.value.hint


def test_llama3_looks_whole_words_up_first_and_starts_with_bos(tmp_path: Path) -> None:
    folder = convert(tmp_path, pre="llama-bpe", tokens=[*CHAT, ("hello", 1)])
    assert pieces(folder, "hello") == ["hello"]
    assert PreTrainedTokenizerFast.from_pretrained(folder)("hello").input_ids[0] == 257


def test_llama3_without_bos_where_the_file_says_so(tmp_path: Path) -> None:
    folder = convert(tmp_path, pre="llama-bpe", tokens=CHAT, extra=[("tokenizer.ggml.add_bos_token", False)])
    assert 257 not in PreTrainedTokenizerFast.from_pretrained(folder)("hello").input_ids


def test_control_tokens_are_special_text_tokens_are_not_and_placeholders_are_gone(tmp_path: Path) -> None:
    folder = convert(tmp_path, tokens=[*CHAT, ("<start_of_image>", 4)])
    tokenizer = read(folder / "tokenizer.json")
    special = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    assert special == {
        "<|begin|>": True,
        "<|im_end|>": True,
        "<|endoftext|>": True,
        "<tool>": False,
        "<start_of_image>": True,
    }
    assert "[PAD261]" not in tokenizer["model"]["vocab"]
    assert pieces(folder, "a[PAD261]")[1] == "["


@pytest.mark.parametrize(("prefix", "first"), [(None, "▁a"), (True, "▁a"), (False, "a")])
def test_sentencepiece_space_prefix_follows_the_file(tmp_path: Path, prefix: bool | None, first: str) -> None:
    folder = convert(tmp_path, model="llama", pre=None, add_space_prefix=prefix)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tokenizer.encode("a hello é", add_special_tokens=False)
    assert encoding.tokens[0] == first
    assert encoding.tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "a hello é"

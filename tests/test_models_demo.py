"""The real demo models: what was downloaded, and that their converted tokenizers are right.

They lie in `SAFE_LLM_HOME` or in the user's cache folder; the first run downloads them.
"""

from __future__ import annotations

import json
import time

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from safe_llm.config import MemberConfig
from safe_llm.models import DEMO_MODELS, ResolvedModel, fetch_preset, list_models, resolve
from safe_llm.models.folder import check_folder

pytestmark = pytest.mark.demo

QWEN, SMOLLM, GEMMA = DEMO_MODELS


@pytest.fixture(scope="module", params=list(DEMO_MODELS))
def model(request: pytest.FixtureRequest) -> ResolvedModel:
    return resolve(MemberConfig(model=request.param), progress=False)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    models = fetch_preset("demo3", progress=False)
    return {model.name: Tokenizer.from_file(str(model.path / "tokenizer.json")) for model in models}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_demo_model_is_complete_and_listed(model: ResolvedModel) -> None:
    check_folder(model.path)
    demo = DEMO_MODELS[model.name]
    assert (model.source, model.licence) == ("demo", demo.licence)
    assert demo.sha256 in model.fingerprint
    listed = next(entry for entry in list_models() if entry.name == model.name)
    assert listed.is_cached
    assert listed.size_bytes == pytest.approx(demo.converted_bytes, rel=0.05)
    assert "quantization_config" not in json.loads((model.path / "config.json").read_text())


def test_cached_demo_model_resolves_in_milliseconds(model: ResolvedModel) -> None:
    start = time.perf_counter()
    assert resolve(MemberConfig(model=model.name)) == model
    assert time.perf_counter() - start < 0.02


def test_chat_template_is_there_for_chat_models_only(model: ResolvedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    assert bool(tokenizer.chat_template) == DEMO_MODELS[model.name].is_chat
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "bos", "eos", "ends", "prefix"),
    [
        (QWEN, "<|endoftext|>", "<|im_end|>", [151645, 151643], []),
        (SMOLLM, "<|im_start|>", "<|im_end|>", [2, 0], []),
        (GEMMA, "<bos>", "<eos>", [1, 106], [2]),
    ],
)
def test_special_ids_and_ends(name: str, bos: str, eos: str, ends: list[int], prefix: list[int]) -> None:
    path = resolve(MemberConfig(model=name)).path
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (bos, eos)
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == ends
    with_special, without = (tokenizer("hello", add_special_tokens=add).input_ids for add in (True, False))
    assert with_special == prefix + without


@pytest.mark.parametrize(
    ("name", "special", "text"),
    [
        (QWEN, {"<|im_start|>", "<|fim_prefix|>", "<|file_sep|>"}, {"<tool_call>", "</tool_call>"}),
        (SMOLLM, {"<|im_start|>", "<|endoftext|>", "<empty_output>"}, set()),
        (GEMMA, {"<bos>", "<start_of_turn>", "<unused42>", "<start_of_image>"}, {"\n\n", "\t\t", "<table>"}),
    ],
)
def test_control_tokens_are_special(
    name: str, special: set[str], text: set[str], tokenizers: dict[str, Tokenizer]
) -> None:
    added = {token.content: token.special for token in tokenizers[name].get_added_tokens_decoder().values()}
    assert {content for content in special if added[content]} == special
    assert {content for content in text if not added[content]} == text


@pytest.mark.parametrize("name", list(DEMO_MODELS))
@pytest.mark.parametrize(
    "text",
    ["hello world\n  x", " leading", "é café 한국어 🤖\r\n\t\tx", "e\u0301", "<table>\n\n\n</table>", "\x00\x7f"],
)
def test_text_round_trips(name: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_qwen_splits_like_qwen2_and_has_no_placeholders(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[QWEN]
    assert tokenizer.get_vocab_size() == 151665
    assert tokenizer.token_to_id("[PAD151665]") is None
    assert tokenizer.normalizer is None
    assert pieces(tokenizer, "x = 1234\n\n  it's") == ["x", "Ġ=", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġ", "Ġit", "'s"]


def test_smollm_splits_every_digit_before_words(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[SMOLLM]
    assert pieces(tokenizer, "12345 a1b2") == ["1", "2", "3", "4", "5", "Ġa", "1", "b", "2"]
    # Without the digits split off first, the second space would go with the 3.
    assert pieces(tokenizer, "x  3") == ["x", "ĠĠ", "3"]


def test_gemma_has_no_dummy_prefix_and_falls_back_to_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[GEMMA]
    assert pieces(tokenizer, "hello world\n  x") == ["hello", "▁world", "\n", "▁▁", "x"]
    assert pieces(tokenizer, "a\rb") == ["a", "<0x0D>", "b"]
    assert pieces(tokenizer, " " * 31) == ["▁" * 31]
    assert pieces(tokenizer, "\n\n\n<table>") == ["\n\n\n", "<table>"]

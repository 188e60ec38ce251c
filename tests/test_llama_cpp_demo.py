"""The real demo models as the GGUF files that they come as."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from safe_llm.config import MemberConfig, preset
from safe_llm.ensemble import Ensemble
from safe_llm.models import resolve

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def packed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # llama.cpp's threads wait for each other in busy loops
    with Ensemble.from_preset("demo-gguf", progress=False) as ensemble:
        yield ensemble
    torch.set_num_threads(threads)


def test_demo_gguf_answers_and_uses_the_verifier(packed):
    answer = packed.generate([{"role": "user", "content": "What is the capital of France?"}], max_tokens=24)
    assert "Paris" in answer.text
    assert packed.config.method == "prefix-mass"  # full rows of scores
    drafter, verifier = packed.members
    assert (drafter.dtype, verifier.dtype) == ("Q4_K - Medium", "Q4_1")
    assert {member.device for member in packed.members} == {"cpu"}
    assert verifier.backend.num_forwards > 1


def test_demo_gguf_batch_equals_single_prompts_and_shares_what_is_alike(packed):
    start = (
        "Here are some facts. Water boils at 100 degrees. Paris lies in France. Bread is made of flour. Ice is cold. "
    )
    prompts = [f"{start}Question {i}: what is {i} plus {i}?" for i in range(3)]
    alone = [packed.generate(prompt, max_tokens=12) for prompt in prompts]
    together = packed.generate(prompts, max_tokens=12)
    # quantised passes of other shapes round differently, so that a later token may differ; the first ones must not
    assert [answer.text[:4] for answer in together] == [answer.text[:4] for answer in alone]
    assert all(member.backend.num_forwards < 400 for member in packed.members)


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"])
def test_demo_gguf_has_the_vocabulary_and_the_ends_of_the_converted_model(packed, name):
    member = next(member for member in packed.members if member.name == name)
    converted = resolve(MemberConfig(model=name), progress=False)
    ends = json.loads((converted.path / "generation_config.json").read_text())["eos_token_id"]
    assert set(member.vocabulary.symbols.end_ids) == {*([ends] if isinstance(ends, int) else ends)}
    width = json.loads((converted.path / "config.json").read_text())["vocab_size"]
    assert member.backend.width == width
    assert (resolve(MemberConfig(model=name), needs="tokenizer").path / "tokenizer.json").read_bytes() == (
        converted.path / "tokenizer.json"
    ).read_bytes()


def test_demo_gguf_is_the_preset_on_another_backend():
    plain, packed = preset("demo").members, preset("demo-gguf").members
    assert [member.model_copy(update={"backend": "llama-cpp"}) for member in plain] == [*packed]

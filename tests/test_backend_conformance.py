"""The conformance class against our own backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from safe_llm.backends.base import Feed
from safe_llm.backends.hf import HFBackend
from safe_llm.errors import MemberError
from safe_llm.testing import BackendConformance, ScriptedBackend, plain_symbols, scripted

WIDTH = 40
SYMBOLS = plain_symbols(WIDTH, end_ids=(2, 5), unusable=(0, 39))
TINY = {
    "vocab_size": WIDTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads cost more than they give on models this small, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hashed_logits(ids):
    return np.random.default_rng(ids).normal(size=WIDTH)


class TestScriptedBackend(BackendConformance):
    def make_backend(self):
        return ScriptedBackend(hashed_logits, WIDTH, SYMBOLS, max_context=64), SYMBOLS


class TestHFBackendOnLlama(BackendConformance):
    def make_backend(self):
        torch.manual_seed(0)
        return HFBackend(AutoModelForCausalLM.from_config(LlamaConfig(**TINY)), SYMBOLS, "llama"), SYMBOLS


class TestHFBackendOnGemma3(BackendConformance):
    def make_backend(self):
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            **TINY, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        )
        return HFBackend(AutoModelForCausalLM.from_config(config), SYMBOLS, "gemma"), SYMBOLS


def test_scripted_backend_follows_its_script_and_records_calls():
    backend = ScriptedBackend(scripted(8, {(): 3, (3,): 4, (3, 4): {5: 0.5, 6: 0.25}}), 8)
    row = backend.open()
    scores = backend.forward([Feed(row=row, ids=[1, 3, 4], keep=3)])
    assert scores.top1()[0].tolist() == [3, 4, 5]
    np.testing.assert_allclose(np.exp(scores.log_probs([0, 2, 2], [3, 6, 0])), [0.9, 0.25, 0.25 / 6], rtol=1e-6)
    assert backend.calls == [(Feed(row=row, ids=(1, 3, 4), keep=3),)]
    assert backend.ids(row) == (1, 3, 4)


def test_scripted_backend_error_leaves_rows_unchanged():
    def fails_at_three(ids):
        if len(ids) == 3:
            raise RuntimeError("boom")
        return [0.0] * 8

    backend = ScriptedBackend(fails_at_three, 8)
    row = backend.open()
    backend.forward([Feed(row=row, ids=[1, 2])])
    with pytest.raises(MemberError, match="RuntimeError") as caught:
        backend.forward([Feed(row=row, ids=[3])])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert backend.ids(row) == (1, 2)

"""The conformance class against our own backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from safe_llm.backends.base import Feed
from safe_llm.backends.graphs import GraphedPasses
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


def repeated(once):
    """What a CUDA graph does, without one: the same computation on the same tensors, into the same tensor."""
    logits = once().clone()
    return lambda: logits.copy_(once()), logits


def replaying(model, name):
    backend = HFBackend(model, SYMBOLS, name, fixed_shapes=True)
    backend._graphs = GraphedPasses(backend._cache, repeated)
    return backend, SYMBOLS


class TestHFBackendReplayingGraphsOnLlama(BackendConformance):
    def make_backend(self):
        torch.manual_seed(0)
        return replaying(AutoModelForCausalLM.from_config(LlamaConfig(**TINY)), "llama")


class TestHFBackendReplayingGraphsOnGemma3(BackendConformance):
    def make_backend(self):
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            **TINY, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        )
        return replaying(AutoModelForCausalLM.from_config(config), "gemma")


def test_fixed_shapes_are_few_and_their_scores_those_of_free_ones(monkeypatch):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY | {"max_position_embeddings": 600})).eval()
    fixed, _ = replaying(model, "fixed")
    free = HFBackend(model, SYMBOLS, "free")
    shapes, call = set(), fixed._call

    def spy(ids, positions, masks, cache, keep):
        shapes.add((*ids.shape, masks.shape[-1]))
        return call(ids, positions, masks, cache, keep)

    rng = np.random.default_rng(2)
    rows = [(fixed.open(), free.open()) for _ in range(3)]
    for mine, other in rows:  # prompts are not of a fixed shape
        ids = rng.integers(6, 30, 40).tolist()
        for backend, row in ((fixed, mine), (free, other)):
            backend.forward([Feed(row=row, ids=ids)])
    fixed._call = spy
    for _ in range(40):
        some = [pair for pair in rows if rng.random() < 0.7] or rows[:1]
        fed = [rng.integers(6, 30, int(rng.integers(1, 17))).tolist() for _ in some]
        keeps = [int(rng.integers(1, len(ids) + 1)) for ids in fed]
        pairs = list(zip(some, fed, keeps, strict=True))
        found = fixed.forward([Feed(row=mine, ids=ids, keep=keep) for (mine, _), ids, keep in pairs])
        wanted = free.forward([Feed(row=other, ids=ids, keep=keep) for (_, other), ids, keep in pairs])
        torch.testing.assert_close(
            found.dense(range(len(found))), wanted.dense(range(len(wanted))), atol=1e-4, rtol=1e-4
        )
        for mine, other in some:
            length = int(rng.integers(fixed.length(mine) - 3, fixed.length(mine) + 1))
            fixed.rollback(mine, length)
            free.rollback(other, length)
    assert {tokens for _, tokens, _ in shapes} <= {1, 4, 8, 16}
    assert {kv for *_, kv in shapes} <= {256, 512, 632}
    assert max(fixed.length(mine) for mine, _ in rows) > 256, "the cache never grew: the test shows nothing"
    assert 0 < fixed._graphs.num_captured <= len(shapes)
    for mine, _ in rows:
        fixed.close(mine)
    fixed.forward([Feed(row=fixed.open(), ids=[7])])
    assert fixed._graphs.num_captured == 1, "graphs of tensors that are gone were kept"

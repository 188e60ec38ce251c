"""The slot cache against uncached forwards: every family of models that can be a member, tiny and in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import AutoModelForCausalLM

from safe_llm.backends import hf
from safe_llm.backends.base import Feed
from safe_llm.backends.hf import HFBackend
from safe_llm.backends.slots import SlotCache, SlotPass
from safe_llm.errors import MemberError
from safe_llm.testing import plain_symbols

WIDTH = 64
BASE = {
    "vocab_size": WIDTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {"sliding_window": 8}),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": SHORT_ROPE, "original_max_position_embeddings": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "internlm3": ("InternLM3Config", {"head_dim": 16}),
    "exaone-3.5": ("ExaoneConfig", {}),
    "exaone4": ("Exaone4Config", {"sliding_window": 8, "sliding_window_pattern": 2, "head_dim": 8}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {}),
}
NO_BASE = {"gpt2"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads cost more than they give on models this small, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(name):
    kind, extra = CONFIGS[name]
    base = {"vocab_size": WIDTH} if name in NO_BASE else BASE
    config = getattr(transformers, kind)(**{**base, **extra})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if name == "gemma2" else "sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)  # attention that is not nearly uniform, so that a wrong mask shows
    return model


def tiny_backend(name, **options):
    return HFBackend(tiny_model(name), plain_symbols(WIDTH), name, **options)


@torch.inference_mode()
def uncached(model, ids, keep):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -keep:].numpy()


def assert_same(scores, wanted, tolerance=1e-4):
    found = scores.dense(range(len(scores))).numpy()
    np.testing.assert_allclose(found, np.concatenate(wanted), atol=tolerance * np.std(wanted[0]))


@pytest.mark.parametrize("name", CONFIGS)
def test_cache_ragged_rows_with_rollbacks_past_the_window_equal_uncached(name):
    # Cases C01, C03, C04, C08, C09, C11: one token, many, over the window and back, to zero, next to other rows.
    backend = tiny_backend(name)
    model = backend._model
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, WIDTH, size).tolist() for size in (40, 9, 23, 55)]
    rows = [backend.open() for _ in texts]
    held = [37, 1, 20, 11]
    backend.forward([Feed(row=row, ids=text[:n]) for row, text, n in zip(rows, texts, held, strict=True)])
    backend.forward([Feed(row=rows[2], ids=[5, 6, 7]), Feed(row=rows[0], ids=[7])])  # rows 1 and 3 get padding
    held = [30, 0, 15, 11]
    for row, n in zip(rows, held, strict=True):
        backend.rollback(row, n)
    feeds = [Feed(row=rows[i], ids=texts[i][held[i] :], keep=len(texts[i]) - held[i]) for i in (1, 0, 2)]
    assert_same(backend.forward(feeds), [uncached(model, texts[i], len(texts[i]) - held[i]) for i in (1, 0, 2)])
    backend.close(rows[1])  # row 3 moves into its slot
    assert_same(backend.forward([Feed(row=rows[3], ids=texts[3][11:], keep=44)]), [uncached(model, texts[3], 44)])
    for token in (9, 8):
        texts[3].append(token)
        assert_same(backend.forward([Feed(row=rows[3], ids=[token])]), [uncached(model, texts[3], 1)])


@pytest.mark.parametrize("name", CONFIGS)
def test_cache_rows_that_share_a_beginning_equal_uncached(name):
    # past the window; between other rows; after the source has moved into another slot
    backend = tiny_backend(name)
    model = backend._model
    rng = np.random.default_rng(5)
    text, tails = rng.integers(3, WIDTH, 40).tolist(), rng.integers(3, WIDTH, (3, 12)).tolist()
    stranger, source = backend.open(), backend.open()
    backend.forward([Feed(row=stranger, ids=[5, 6, 7]), Feed(row=source, ids=text)])
    takers = [backend.open(), backend.open(), backend.open()]
    assert backend.share(takers[0], source, 30) == 30
    backend.close(stranger)  # the last row moves into its slot
    backend.rollback(source, 35)
    shared = [30, 33, 5]
    for taker, length in zip(takers[1:], shared[1:], strict=True):
        backend.share(taker, source, length)
    wanted = [text[:n] + tail for n, tail in zip(shared, tails, strict=True)]
    feeds = [Feed(row=row, ids=tail, keep=12) for row, tail in zip(takers, tails, strict=True)]
    assert_same(
        backend.forward([*feeds, Feed(row=source, ids=[9])]),
        [uncached(model, w, 12) for w in wanted] + [uncached(model, [*text[:35], 9], 1)],
    )
    backend.close(source)
    feeds = [Feed(row=row, ids=[8]) for row in takers]
    assert_same(backend.forward(feeds), [uncached(model, [*w, 8], 1) for w in wanted])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_cache_long_prompt_in_chunks_equals_uncached(name, monkeypatch):
    monkeypatch.setattr(hf, "_CHUNK", 16)
    backend = tiny_backend(name)
    text = np.random.default_rng(2).integers(3, WIDTH, 70).tolist()
    rows = [backend.open(), backend.open()]
    passes = backend.num_forwards
    scores = backend.forward([Feed(row=rows[1], ids=text[:35], keep=20), Feed(row=rows[0], ids=text, keep=1)])
    assert backend.num_forwards == passes + 3 + 5
    assert_same(scores, [uncached(backend._model, text[:35], 20), uncached(backend._model, text, 1)])


def test_cache_aligned_rows_and_equal_prompts_equal_uncached():
    backend = tiny_backend("gemma3")
    texts = np.random.default_rng(3).integers(3, WIDTH, (3, 14)).tolist()
    rows = [backend.open() for _ in texts]
    for part in (slice(0, 10), slice(10, 11), slice(11, 14)):
        feeds = [Feed(row=row, ids=text[part], keep=1) for row, text in zip(rows, texts, strict=True)]
        wanted = [uncached(backend._model, text[: part.stop], 1) for text in texts]
        assert_same(backend.forward(feeds), wanted)


def test_cache_row_between_fed_rows_keeps_what_it_holds():
    backend = tiny_backend("llama")
    rows = [backend.open() for _ in range(3)]
    texts = [[5, 6], [7, 8, 9, 10, 11], [12, 13]]
    backend.forward([Feed(row=row, ids=text) for row, text in zip(rows, texts, strict=True)])
    backend.forward([Feed(row=rows[0], ids=[3]), Feed(row=rows[2], ids=[4])])  # both at position 2
    feeds = [Feed(row=row, ids=[6]) for row in rows]
    wanted = [[5, 6, 3, 6], [7, 8, 9, 10, 11, 6], [12, 13, 4, 6]]
    assert_same(backend.forward(feeds), [uncached(backend._model, text, 1) for text in wanted])


def test_cache_grows_and_releases_its_memory():
    backend = tiny_backend("llama", max_context=100)
    cache = backend._cache
    rows = [backend.open() for _ in range(3)]
    backend.forward([Feed(row=row, ids=[3, 4]) for row in rows])
    assert (cache.num_slots, cache.capacity) == (4, 132)  # 100 and room for padding
    for row in rows:
        backend.close(row)
    assert (cache.num_slots, cache.capacity) == (0, 0)
    assert all(layer.keys is None for layer in cache.layers)


@torch.inference_mode()
def test_cache_capacity_doubles_and_stays_within_the_longest_row():
    cache = SlotCache([False], max_length=1000)
    row = cache.open()
    capacities = []
    for end in (3, 256, 257, 600, 1000):
        cache.begin(SlotPass(first=0, stop=1, start=end - 1, kv_stop=end), end)
        cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
        capacities.append(cache.capacity)
    assert capacities == [256, 256, 512, 1000, 1000]
    assert cache.layers[0].keys[0, 0, :, 0].nonzero()[:, 0].tolist() == [2, 255, 256, 599, 999]
    cache.close(row)


def test_cache_left_over_nan_does_not_reach_the_next_rows():
    # 0 times NaN is NaN: a masked position must never hold one. The poisoned row is closed, its slot reused.
    backend = tiny_backend("llama")
    weight = backend._model.get_input_embeddings().weight
    rows = [backend.open() for _ in range(3)]
    backend.forward([Feed(row=row, ids=[3] * 12) for row in rows])
    good = weight[7].clone()
    with torch.no_grad():
        weight[7] = float("nan")
    scores = backend.forward([Feed(row=rows[0], ids=[7] * 9), Feed(row=rows[1], ids=[4]), Feed(row=rows[2], ids=[7])])
    assert scores.top1()[1].tolist() == [False, True, False]
    backend.close(rows[0])
    backend.close(rows[2])
    with torch.no_grad():
        weight[7] = good
    late = [backend.open(), backend.open()]
    scores = backend.forward([Feed(row=rows[1], ids=[5]), *(Feed(row=row, ids=[6, 7]) for row in late)])
    assert_same(scores, [uncached(backend._model, t, 1) for t in ([3] * 12 + [4, 5], [6, 7], [6, 7])])


def test_cache_sharing_without_memory_is_an_error_that_changes_no_row(monkeypatch):
    backend = tiny_backend("llama")
    source = backend.open()
    backend.forward([Feed(row=source, ids=[3, 4, 5])])
    row = backend.open()

    def resized(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("safe_llm.backends.slots._resized", resized)
        with pytest.raises(MemberError, match="OutOfMemoryError") as caught:
            backend.share(row, source, 2)
    assert "fewer rows" in caught.value.hint
    assert [backend.length(r) for r in (source, row)] == [3, 0]
    assert backend.share(row, source, 2) == 2


def test_cache_shared_nan_does_not_outlive_the_rows():
    backend = tiny_backend("llama")
    weight = backend._model.get_input_embeddings().weight
    other, poisoned, taker = (backend.open() for _ in range(3))
    good = weight[7].clone()
    with torch.no_grad():
        weight[7] = float("nan")
    backend.forward([Feed(row=poisoned, ids=[7] * 20), Feed(row=other, ids=[5] * 25)])
    backend.share(taker, poisoned, 20)
    with torch.no_grad():
        weight[7] = good
    backend.close(poisoned)
    backend.close(taker)
    late = [backend.open(), backend.open()]
    scores = backend.forward([Feed(row=row, ids=[6, 7]) for row in (other, *late)])
    assert_same(scores, [uncached(backend._model, text, 1) for text in ([5] * 25 + [6, 7], [6, 7], [6, 7])])


def test_cache_left_over_nan_does_not_reach_the_row_that_moves_in():
    backend = tiny_backend("llama")
    weight = backend._model.get_input_embeddings().weight
    poisoned, mover = backend.open(), backend.open()
    good = weight[7].clone()
    with torch.no_grad():
        weight[7] = float("nan")
    backend.forward([Feed(row=poisoned, ids=[7] * 20), Feed(row=mover, ids=[3, 4])])
    with torch.no_grad():
        weight[7] = good
    backend.close(poisoned)
    long = backend.open()
    backend.forward([Feed(row=long, ids=[5] * 25)])
    scores = backend.forward([Feed(row=long, ids=[8]), Feed(row=mover, ids=[6])])
    assert_same(scores, [uncached(backend._model, text, 1) for text in ([5] * 25 + [8], [3, 4, 6])])


class CacheMachine(RuleBasedStateMachine):
    """Random histories of rows; after every step the cache must agree with fresh forwards."""

    name = "llama"

    def __init__(self):
        super().__init__()
        self.backend = BACKENDS.setdefault(self.name, tiny_backend(self.name, max_context=60))
        self.rows = {}

    def teardown(self):
        for row in self.rows:
            self.backend.close(row)

    @precondition(lambda self: len(self.rows) < 5)
    @rule()
    def open(self):
        self.rows[self.backend.open()] = []

    @precondition(lambda self: 0 < len(self.rows) < 5)
    @rule(data=st.data())
    def share(self, data):
        source = data.draw(st.sampled_from(list(self.rows)))
        length = data.draw(st.integers(0, len(self.rows[source])))
        row = self.backend.open()
        assert self.backend.share(row, source, length) == length
        self.rows[row] = self.rows[source][:length]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data):
        row = data.draw(st.sampled_from(list(self.rows)))
        self.backend.close(row)
        del self.rows[row]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rollback(self, data):
        row = data.draw(st.sampled_from(list(self.rows)))
        length = data.draw(st.integers(0, len(self.rows[row])))
        self.backend.rollback(row, length)
        del self.rows[row][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data):
        chosen = data.draw(st.lists(st.sampled_from(list(self.rows)), min_size=1, unique=True))
        feeds = []
        for row in chosen:
            room = 60 - len(self.rows[row])
            if room:
                ids = data.draw(st.lists(st.integers(3, WIDTH - 1), min_size=1, max_size=min(room, 40)))
                feeds.append(Feed(row=row, ids=ids, keep=data.draw(st.integers(1, len(ids)))))
                self.rows[row] += ids
        if feeds:
            wanted = [uncached(self.backend._model, self.rows[feed.row], feed.keep) for feed in feeds]
            assert_same(self.backend.forward(feeds), wanted)

    @invariant()
    def lengths_agree(self):
        assert {row: self.backend.length(row) for row in self.rows} == {k: len(v) for k, v in self.rows.items()}


class SlidingCacheMachine(CacheMachine):
    name = "gemma3"


BACKENDS = {}
SETTINGS = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestCacheHistories = CacheMachine.TestCase
TestSlidingCacheHistories = SlidingCacheMachine.TestCase
TestCacheHistories.settings = TestSlidingCacheHistories.settings = SETTINGS

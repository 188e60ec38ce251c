"""`HFBackend`: what it refuses, how it fails, what it calls, and how models are loaded and placed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig

from safe_llm.backends import hf, layers
from safe_llm.backends.base import Feed
from safe_llm.backends.hf import HFBackend
from safe_llm.backends.loading import end_ids_of, load_model, place
from safe_llm.config import MemberConfig, ServerConfig
from safe_llm.errors import ConfigError, MemberError, ModelCorruptError, UnsupportedModelError
from safe_llm.testing import plain_symbols

WIDTH = 48
TINY = {
    "vocab_size": WIDTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads cost more than they give on models this small, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_llama(seed=0, **extra):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, **extra})).eval()


def backend_of(model=None, symbols=None, **options):
    return HFBackend(model or tiny_llama(), symbols or plain_symbols(WIDTH), "tiny", **options)


# ---------------------------------------------------------------------- refused when built


REFUSED = {
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}, "mamba"),
    "jamba": ("JambaConfig", {"mamba_d_state": 4, "num_experts": 2}, "linear_attention"),
    "qwen3-next": ("Qwen3NextConfig", {"num_experts": 2, "num_experts_per_tok": 1}, "linear_attention"),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "conv"),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ("MptConfig", {"n_layers": 2, "n_heads": 4, "d_model": 32}, "ALiBi"),
    "falcon-alibi": ("FalconConfig", {"alibi": True}, "ALiBi"),
    "llama4-chunked": (
        "Llama4TextConfig",
        {"intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 8, "head_dim": 8},
        "chunked_attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hf_refuses_by_name_what_cannot_be_rolled_back(name):
    # Cases C05, C10, C12: a recurrent state, or biases that depend on the batch.
    kind, extra, reason = REFUSED[name]
    config = getattr(transformers, kind)(**{**TINY, **extra})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        HFBackend(model, plain_symbols(WIDTH), "their-model")
    assert "'their-model'" in str(caught.value)
    assert repr(config.model_type) in str(caught.value)


def test_hf_refuses_encoder_decoders():
    config = transformers.T5Config(vocab_size=WIDTH, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        HFBackend(AutoModelForSeq2SeqLM.from_config(config), plain_symbols(WIDTH), "t5")


def test_hf_refuses_symbols_of_another_width():
    with pytest.raises(ConfigError, match="40 ids, but its logits have 48"):
        backend_of(symbols=plain_symbols(40))


def test_hf_context_is_the_models_unless_lowered_or_its_positions_stretch():
    assert backend_of().max_context == 64
    assert backend_of(max_context=20).max_context == 20
    assert backend_of(max_context=2).max_context == 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(**TINY, rope_parameters={**rope, "original_max_position_embeddings": 32})
    assert layers.context_limit(config, "x", None) == 32
    config = transformers.BloomConfig()
    with pytest.raises(UnsupportedModelError, match="no context length"):
        layers.context_limit(config, "x", None)
    assert layers.context_limit(config, "x", 99) == 99


# ---------------------------------------------------------------------- the self-check


def test_hf_self_check_passes_a_good_model_and_leaves_no_trace():
    backend = backend_of(self_check=True)
    assert (backend.num_forwards, backend.forward_s, len(backend._cache.lengths)) == (0, 0.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_self_check_catches_an_ignored_window(dtype, monkeypatch):
    config = transformers.MistralConfig(**TINY, sliding_window=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    HFBackend(model, plain_symbols(WIDTH), "mistral")
    unlimited = layers.Layers(is_sliding=(False, False), window=0, by_type=False)
    monkeypatch.setattr(layers.Layers, "of", lambda config: unlimited)
    with pytest.raises(UnsupportedModelError, match=r"failed the self-check.* differ by .* of their spread"):
        HFBackend(model, plain_symbols(WIDTH), "mistral")
    HFBackend(model, plain_symbols(WIDTH), "mistral", self_check=False)


def test_hf_self_check_catches_a_stale_cache(monkeypatch):
    monkeypatch.setattr(hf.SlotCache, "rollback", lambda self, row, length: None)
    with pytest.raises(UnsupportedModelError, match="self-check"):
        backend_of()


def test_hf_self_check_reports_a_model_that_raises():
    model = tiny_llama()
    model.model.layers[1].forward = raises(TypeError("got an unexpected cache"))
    with pytest.raises(UnsupportedModelError, match="unexpected cache"):
        backend_of(model)


# ---------------------------------------------------------------------- failures


def raises(error):
    def forward(*args, **kwargs):
        raise error

    return forward


class Broken:
    """Makes the last layer of a model raise while the block runs, after the first has written its keys."""

    def __init__(self, model, error):
        self.layer, self.error = model.model.layers[1], error

    def __enter__(self):
        self.layer.forward = raises(self.error)

    def __exit__(self, *exc):
        del self.layer.forward


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()]
)
def test_hf_exception_in_the_model_changes_no_row_and_the_next_call_is_right(error):
    # Case F20 and decision 6; also Ctrl-C in the middle of a pass.
    model = tiny_llama()
    backend = backend_of(model)
    rows = [backend.open() for _ in range(5)]
    backend.forward([Feed(row=row, ids=[3 + i] * (i + 1)) for i, row in enumerate(rows)])
    for row in rows[3:]:
        backend.close(row)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else MemberError
    with Broken(model, error), pytest.raises(expected) as caught:
        backend.forward([Feed(row=rows[0], ids=[9] * 40), Feed(row=rows[1], ids=[8]), Feed(row=rows[2], ids=[8, 9])])
    assert [backend.length(row) for row in rows[:3]] == [1, 2, 3]
    if expected is MemberError:
        assert caught.value.member == "tiny"
        assert caught.value.__cause__ is error
        assert type(error).__name__ in str(caught.value)
    if isinstance(error, torch.OutOfMemoryError):
        assert backend._cache.num_slots == 3  # there was memory for 8
        assert "max_context" in caught.value.hint
    scores = backend.forward([Feed(row=rows[2], ids=[7]), Feed(row=rows[0], ids=[7, 6])])
    texts = [[5, 5, 5, 7], [3, 7, 6]]
    with torch.inference_mode():
        wanted = torch.stack([model(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
    np.testing.assert_allclose(scores.dense([0, 1]), wanted, atol=1e-5)


def test_hf_failed_pass_frees_what_its_traceback_holds():
    # Case F20: an exception that is kept (a future, a log record) must not keep activations alive.
    held = []

    def forward(hidden_states, *args, **kwargs):
        activation = hidden_states + 1
        held.append(__import__("weakref").ref(activation))
        raise torch.OutOfMemoryError("no memory")

    model = tiny_llama()
    backend = backend_of(model)
    model.model.layers[1].forward = forward
    row = backend.open()
    with pytest.raises(MemberError) as caught:
        backend.forward([Feed(row=row, ids=[3])])
    assert caught.value.__cause__.__traceback__ is not None
    assert held[0]() is None
    assert backend._cache.num_slots == 1
    backend.close(row)


def test_hf_nan_row_is_reported_alone():
    model = tiny_llama()
    backend = backend_of(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    rows = [backend.open(), backend.open()]
    scores = backend.forward([Feed(row=rows[0], ids=[9, 3]), Feed(row=rows[1], ids=[3, 3])])
    assert scores.top1()[1].tolist() == [False, True]


@pytest.mark.parametrize("token", [-1, WIDTH])
def test_hf_id_without_embedding_is_an_error(token):
    # Case D10. On a GPU it would be a device assert that ends the process.
    backend = backend_of()
    row = backend.open()
    with pytest.raises(MemberError, match="outside of its vocabulary of 48"):
        backend.forward([Feed(row=row, ids=[3, token])])
    assert backend.length(row) == 0


def test_hf_misuse_is_refused():
    backend = backend_of()
    row = backend.open()
    for feeds in ([], [Feed(row=row, ids=[3]), Feed(row=row, ids=[4])], [Feed(row=row, ids=[3], keep=2)]):
        with pytest.raises(ValueError, match=r"forward needs|keep must be"):
            backend.forward(feeds)
    backend.close(row)
    with pytest.raises(KeyError):
        backend.length(row)


# ---------------------------------------------------------------------- what the model is asked


class Spy:
    def __init__(self, model):
        self.calls, self.forward = [], model.forward
        model.forward = self

    def __call__(self, **kwargs):
        self.calls.append(kwargs)
        return self.forward(**kwargs)


def test_hf_leaves_the_mask_out_where_the_plain_kernel_is_right(monkeypatch):
    monkeypatch.setattr(hf, "_CHUNK", 40)
    model = tiny_llama()
    backend = backend_of(model)
    spy = Spy(model)
    rows = [backend.open(), backend.open()]
    steps = {
        "prompt, two chunks": [Feed(row=rows[0], ids=[3] * 45)],
        "one token": [Feed(row=rows[0], ids=[3])],
        "equal prompts": [Feed(row=backend.open(), ids=[3, 4]), Feed(row=backend.open(), ids=[5, 6])],
        "ragged rows": [Feed(row=rows[0], ids=[3]), Feed(row=rows[1], ids=[4])],
    }
    masked = []
    for feeds in steps.values():
        backend.forward(feeds)
    masked = [None if call["attention_mask"] is None else tuple(call["attention_mask"].shape) for call in spy.calls]
    assert masked == [None, (1, 1, 5, 45), None, None, (2, 1, 1, 47)]
    assert [call["logits_to_keep"] for call in spy.calls] == [1] * 5


def test_hf_ends_come_from_both_configurations():
    model = tiny_llama(eos_token_id=[2, 7])
    assert end_ids_of(model) == [2, 7]
    model.generation_config.eos_token_id = 9
    assert end_ids_of(model) == [9, 2, 7]
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_ids_of(model) == []


def test_hf_half_precision_rows_agree_within_rounding():
    # Case C07: in bfloat16 a batch of rows and single rows differ by rounding only.
    backend = backend_of(tiny_llama().to(torch.bfloat16))
    rows = [backend.open() for _ in range(3)]
    texts = [[4, 5, 6, 7], [8], [9, 10]]
    batch = backend.forward([Feed(row=row, ids=text) for row, text in zip(rows, texts, strict=True)]).dense(range(3))
    alone = torch.cat([backend.forward([Feed(row=backend.open(), ids=text)]).dense([0]) for text in texts])
    assert batch.dtype == torch.float32
    np.testing.assert_allclose(batch, alone, atol=0.05)


# ---------------------------------------------------------------------- loading and placing


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


def copy_of(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def load(folder, **options):
    return load_model(Path(folder), config=MemberConfig(model=str(folder), **options), device="cpu")


def test_load_model_reads_a_folder_silently(saved, capfd):
    model = load(saved, dtype="float32")
    assert (model.dtype, model.config._attn_implementation) == (torch.float32, "sdpa")
    assert capfd.readouterr() == ("", "")
    assert load(saved, dtype="bfloat16", device_map="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize(("capabilities", "dtype"), [({"avx512_bf16": True}, "bfloat16"), ({}, "float32")])
def test_load_model_auto_dtype_is_what_the_cpu_is_fast_at(saved, monkeypatch, capabilities, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert load(saved).dtype == getattr(torch, dtype)


def test_load_model_takes_eager_attention_where_logits_are_capped(tmp_path):
    config = transformers.Gemma2Config(**TINY, head_dim=8, sliding_window=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load(tmp_path).config._attn_implementation == "eager"


def truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


DAMAGE = {
    "truncated weights": (truncate, ModelCorruptError),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ModelCorruptError),
    "no config": (lambda folder: (folder / "config.json").unlink(), ModelCorruptError),
    "config is not JSON": (lambda folder: (folder / "config.json").write_text("{"), ModelCorruptError),
    "missing tensors": (lambda folder: edit_config(folder, num_hidden_layers=3), ModelCorruptError),
    "other shapes": (lambda folder: edit_config(folder, hidden_size=64), ModelCorruptError),
    "unknown architecture": (lambda folder: edit_config(folder, model_type="nobody"), UnsupportedModelError),
    "not a language model": (lambda folder: edit_config(folder, model_type="vit"), UnsupportedModelError),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_model_says_what_is_wrong(saved, tmp_path, damage):
    spoil, expected = DAMAGE[damage]
    folder = copy_of(saved, tmp_path / "damaged")
    spoil(folder)
    with pytest.raises(expected, match="damaged"):
        load(folder)


def test_place_spreads_over_gpus_or_takes_the_cpu(monkeypatch):
    members = [MemberConfig(model="a"), MemberConfig(model="b", device="cuda:3"), *map(member, "cde")]
    assert place(members) == ["cpu", "cuda:3", "cpu", "cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place(members) == ["cuda:0", "cuda:3", "cuda:1", "cuda:0", "cuda:1"]
    there = MemberConfig(model="s", backend="vllm", server=ServerConfig(url="http://127.0.0.1:1"))
    assert place([member("a"), there, member("b")]) == ["cuda:0", "cpu", "cuda:1"]


def member(name):
    return MemberConfig(model=name)


def test_symbols_follow_the_logits_to_their_device():
    # Case D12: with a device map the logits may lie elsewhere than the embeddings.
    backend = backend_of(symbols=plain_symbols(WIDTH, end_ids=(1, 2), unusable=(0,)))
    assert backend.scores(torch.zeros(1, WIDTH)).top1()[0].tolist() == [1]
    assert backend.scores(torch.zeros(1, WIDTH, device="meta")).dense([0]).device.type == "meta"
    assert backend.scores(torch.zeros(1, WIDTH)).top1()[0].tolist() == [1]


@pytest.mark.parametrize(
    ("device", "message"), [("cuda", "does not exist"), ("cuda:7", "does not exist"), ("gpu0", "unknown device")]
)
def test_device_that_is_not_there_is_refused_with_a_hint(tmp_path, monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path, config=MemberConfig(model=str(tmp_path), device=device), device=None)
    assert "cpu" in caught.value.hint

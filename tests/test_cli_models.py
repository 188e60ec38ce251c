from __future__ import annotations

import json

import pytest

from safe_llm.config import PRESETS
from safe_llm.models import DEMO_MODELS, ResolvedModel, store
from test_cli_support import run


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path))
    return tmp_path


def put(name: str) -> None:
    def build(scratch, target):
        (target / "model.safetensors").write_bytes(bytes(3_000_000))
        return store.ModelRecord(
            name=name, source="gguf", origin="/x.gguf", sha256="0" * 64, licence="MIT [red]x\x1b[2J"
        )

    store.get_or_build(name, build)


def test_list_shows_every_demo_model_with_its_licence():
    shown = run("models", "list").stdout.decode()
    for name, model in DEMO_MODELS.items():
        [line] = [line for line in shown.splitlines() if line.startswith(f"{name} ")]
        assert model.licence in line
        assert line.split()[-1] == "no"
        assert f"{name}: {model.licence_note}" in shown
    for name in PRESETS:
        assert f"preset {name}: " in shown


def test_list_shows_cached_models_literally():
    put("mine")
    [line] = [line for line in run("models", "list").stdout.decode().splitlines() if line.startswith("mine ")]
    assert line.split() == ["mine", "gguf", "MIT", "[red]x\\x1b[2J", "3", "MB", "yes"]


def test_list_in_json():
    put("mine")
    listed = {model["name"]: model for model in json.loads(run("models", "list", "--json").stdout)}
    assert listed.keys() == {*DEMO_MODELS, "mine"}
    assert listed["mine"]["is_cached"]
    assert listed["mine"]["path"].endswith("/mine")
    assert listed["gemma-3-270m"]["path"] is None


def test_remove_deletes_and_says_how_much():
    put("mine")
    assert run("models", "rm", "mine").stdout == b"removed mine, 3 MB freed\n"
    assert store.cached("mine") is None


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["rm", "mien"], "unknown model 'mien'", "did you mean 'mine'?"),
        (["rm", "gemma-3-270m"], "'gemma-3-270m' is not in the cache", "nothing to remove"),
        (["rm", "../mine"], "'../mine'", ""),
        (["rm"], "missing argument", "--help"),
        (["fetch", "dmeo3"], "unknown preset or model 'dmeo3'", "did you mean 'demo3'?"),
        (["fetch", "gema-3-270m"], "unknown preset or model", "did you mean 'gemma-3-270m'?"),
        (["fetch", "./missing.gguf"], "there is no model at './missing.gguf'", "existing folder"),
    ],
)
def test_bad_names_are_one_error_with_a_hint(args, message, hint):
    put("mine")
    result = run("models", *args)
    assert (result.code, result.stdout) == (2, b"")
    error, advice = result.error_lines
    assert message in error
    assert hint in advice


@pytest.mark.parametrize(
    ("name", "fetched"),
    [
        ("demo3", ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct", "gemma-3-270m"]),
        ("gemma-3-270m", ["gemma-3-270m"]),
    ],
)
@pytest.mark.parametrize("quiet", [True, False])
def test_fetch_takes_a_preset_or_one_model(monkeypatch, home, name, fetched, quiet):
    asked = []

    def resolve(config, *, needs="safetensors", progress=True):
        asked.append((config.model, progress))
        return ResolvedModel(
            path=home / config.model, name=config.model, source="demo", revision=None, licence=None, fingerprint=""
        )

    monkeypatch.setattr("safe_llm.cli.model_commands.resolve", resolve)
    monkeypatch.setattr("safe_llm.models.listing.resolve", resolve)
    result = run("models", "fetch", name, *(["--quiet"] if quiet else []))
    assert asked == [(model, not quiet) for model in fetched]
    assert result.stdout.decode().splitlines() == [f"{model}\t{home / model}" for model in fetched]

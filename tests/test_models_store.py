"""The cache: what is complete, what an interruption leaves, who builds when several want the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from safe_llm.errors import ModelError
from safe_llm.models import store


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))


def builder(name: str, *, calls: list[str] | None = None, delay_s: float = 0.0):
    def build(scratch: Path, target: Path) -> store.ModelRecord:
        if calls is not None:
            calls.append(name)
        (scratch / "half").write_bytes(b"x" * 100)
        (target / "model.safetensors").write_bytes(b"weights")
        time.sleep(delay_s)
        (target / "config.json").write_text("{}")
        return store.ModelRecord(name=name, source="demo", origin=name, sha256="0" * 64)

    return build


def leftovers() -> list[Path]:
    work = store.home() / "work"
    return list(work.iterdir()) if work.is_dir() else []


def test_get_or_build_publishes_a_complete_model_and_then_reuses_it() -> None:
    calls: list[str] = []
    first = store.get_or_build("m", builder("m", calls=calls))
    second = store.get_or_build("m", builder("m", calls=calls))
    assert calls == ["m"]
    assert first == second == store.cached("m")
    assert first.path == store.home() / "models" / "m"
    assert first.record.files == {"config.json": 2, "model.safetensors": 7}
    assert first.size_bytes == 9
    assert leftovers() == []


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_get_or_build_interrupted_leaves_nothing_and_the_next_try_works(error: BaseException) -> None:
    def build(scratch: Path, target: Path) -> store.ModelRecord:
        builder("m")(scratch, target)
        raise error

    with pytest.raises(type(error)):
        store.get_or_build("m", build)
    assert store.cached("m") is None
    assert leftovers() == []
    assert store.folder_names() == []
    assert store.get_or_build("m", builder("m")).size_bytes == 9


def test_interrupted_rename_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.get_or_build("m", builder("m"))
    assert store.cached("m") is None
    assert leftovers() == []
    store.get_or_build("m", builder("m"))
    assert store.cached("m") is not None


@pytest.mark.parametrize(
    "damage", ["delete", "truncate", "no record", "bad record", "odd record", "old format", "other name"]
)
def test_damaged_folder_is_not_complete_and_is_built_anew(damage: str) -> None:
    path = store.get_or_build("m", builder("m")).path
    record = path / "safe_llm.json"
    values = json.loads(record.read_text())
    if damage == "delete":
        (path / "model.safetensors").unlink()
    elif damage == "truncate":
        (path / "model.safetensors").write_bytes(b"w")
    elif damage == "no record":
        record.unlink()
    elif damage == "bad record":
        record.write_text('{"name": "m"')
    elif damage == "odd record":
        record.write_text(json.dumps({**values, "files": ["model.safetensors"]}))
    elif damage == "old format":
        record.write_text(json.dumps({**values, "format": store.FORMAT - 1}))
    else:
        record.write_text(json.dumps({**values, "name": "other"}))
    assert store.cached("m") is None
    assert list(store.iter_cached()) == []
    calls: list[str] = []
    store.get_or_build("m", builder("m", calls=calls))
    assert calls == ["m"]
    assert store.cached("m") is not None


def test_threads_build_once() -> None:
    calls: list[str] = []
    build = builder("m", calls=calls, delay_s=0.2)
    threads = [threading.Thread(target=store.get_or_build, args=("m", build)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["m"]


SCRIPT = """
import sys, time
from pathlib import Path
from safe_llm.models import store

def build(scratch, target):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (target / "model.safetensors").write_bytes(b"half")
    time.sleep(float(sys.argv[2]))
    (target / "config.json").write_text("{}")
    return store.ModelRecord(name="m", source="demo", origin="m", sha256="0" * 64)

store.get_or_build("m", build)
"""


def start_process(log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(log), str(seconds)], env=dict(os.environ))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start_process(log, 0.5) for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert log.read_text() == "built\n"


def test_killed_process_leaves_nothing_that_counts_and_is_cleaned_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_process(log, 60)
    half = store.home() / "work" / "m" / "model" / "model.safetensors"
    wait_for(half)
    process.kill()
    process.wait(30)
    assert half.exists()
    assert store.cached("m") is None
    assert store.folder_names() == []
    store.get_or_build("other", builder("other"))
    assert leftovers() == []
    assert store.get_or_build("m", builder("m")).size_bytes == 9


def test_work_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    process = start_process(tmp_path / "log", 2)
    half = store.home() / "work" / "m" / "model" / "model.safetensors"
    wait_for(half)
    store.get_or_build("other", builder("other"))
    assert half.exists()
    assert process.wait(30) == 0
    assert store.cached("m") is not None


@pytest.mark.parametrize("name", ["../secret", "..", ".", "", "a/b", "/etc", "a\0b", ".hidden", "a..b", "x" * 300])
def test_names_that_could_leave_the_store_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not a name"):
        store.cached(name)


def test_home_defaults_to_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAFE_LLM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.home().name == "safe_llm"
    monkeypatch.setenv("SAFE_LLM_HOME", "~/models")
    assert store.home() == Path.home() / "models"


def test_discard_frees_what_it_says_and_removes_the_folder() -> None:
    path = store.get_or_build("m", builder("m")).path
    size = sum(file.stat().st_size for file in path.iterdir())
    assert store.discard("m") == size
    assert not path.exists()
    assert leftovers() == []

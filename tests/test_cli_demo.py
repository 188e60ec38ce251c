"""The main job: `safe-llm` as a program, on the real demo models."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from safe_llm.config import preset
from safe_llm.models import DEMO_MODELS, resolve
from safe_llm.prompting import load_tokenizer
from safe_llm.vocabulary import Vocabulary

pytestmark = pytest.mark.demo

QUESTION = "In one sentence: what is the capital of France, and what is it famous for?"


def safe_llm(*args: str, stdin: bytes = b"") -> bytes:
    command = [sys.executable, "-m", "safe_llm", *args]
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=900, env=dict(os.environ))
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def vocabularies() -> dict[str, Vocabulary]:
    """The members' vocabularies; fetches the models once, so that no test below waits for that."""
    loaded = {}
    for member in preset("demo3").members:
        files = load_tokenizer(resolve(member).path, canonical=True)
        loaded[member.display_name] = Vocabulary(files.spec)
    return loaded


def check_points(answer: dict) -> None:
    """Each ensemble point carries bytes of the answer and an opinion of every member."""
    text = answer["text"].encode()
    assert answer["points"]
    for point in answer["points"]:
        assert text[point["byte_offset"] :].startswith(point["chosen"].encode())
        assert set(point["probabilities"]) == {member["name"] for member in answer["members"]}


def check_boundaries(answer: dict, vocabularies: dict[str, Vocabulary]) -> None:
    """Each ensemble point lies on a token boundary that all members have in the text as drafted."""
    for point in answer["points"]:
        offset = point["byte_offset"]
        drafted = answer["text"].encode()[:offset] + point["drafted"].encode()
        for member in answer["members"]:
            assert offset in {0, *vocabularies[member["name"]].encode(drafted).ends}


@pytest.mark.parametrize("preset_name", ["demo", "demo3"])
def test_demo_answers_in_json(preset_name, vocabularies):
    answer = json.loads(safe_llm("generate", "--preset", preset_name, "--json", "--max-tokens", "24", QUESTION))
    assert "Paris" in answer["text"]
    assert answer["usage"]["completion_tokens"] <= 24
    assert [m["name"] for m in answer["members"]] == [m.display_name for m in preset(preset_name).members]
    check_points(answer)
    check_boundaries(answer, vocabularies)


def test_every_token_mode_merges_at_every_token():
    answer = json.loads(safe_llm("generate", "--mode", "every-token", "--json", "--max-tokens", "24", QUESTION))
    assert "Paris" in answer["text"]
    assert answer["counters"]["num_ensembled"] > 16  # also where a member has no boundary: it is the baseline
    check_points(answer)


def test_streamed_text_is_the_json_text():
    streamed = safe_llm("generate", "--max-tokens", "12", "-", stdin=QUESTION.encode())
    assert streamed.decode() == json.loads(safe_llm("generate", "--json", "--max-tokens", "12", QUESTION))["text"]


def test_chat_remembers_the_name():
    lines = safe_llm("chat", "--max-tokens", "24", stdin=b"My name is Ada.\nWhat is my name?\n").decode()
    assert "Ada" in lines.rpartition("\n")[0]


def test_inspect_reads_three_kinds_of_tokenizers():
    report = json.loads(safe_llm("inspect", "--preset", "demo3", "--chat", "--json", "The answer is 63,700 日本."))
    assert [m["kind"] for m in report["members"]] == ["byte-level", "byte-level", "sentencepiece"]
    assert [m["width"] for m in report["members"]] == [151_936, 49_152, 262_144]
    assert [m["max_context"] for m in report["members"]] == [32_768, 8_192, 32_768]
    assert any("no chat template" in note for note in report["members"][2]["notes"])
    assert len(report["overlaps"]) == 3
    assert report["shared_boundaries"][-1] == report["num_bytes"]
    assert all(member["inexact_spans"] == [] for member in report["members"])


def test_list_shows_the_demo_models_as_cached():
    listed = {model["name"]: model for model in json.loads(safe_llm("models", "list", "--json"))}
    assert all(listed[name]["is_cached"] for name in DEMO_MODELS)

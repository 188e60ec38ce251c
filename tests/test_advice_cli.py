from __future__ import annotations

import json

import pytest

from safe_llm.cli import advising
from safe_llm.config import EnsembleSpec
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.tasks import task_named
from safe_llm.testing import scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace
from test_cli_inspect import model_folder
from test_cli_support import run

TASK = task_named("gsm8k")
RECORDS = [{"id": str(n), "question": f"What is {n} and 1850?", "answer": str(n + 1850)} for n in range(4)]
BOTH = ("--member", "models/a", "--member", "b.gguf")


@pytest.fixture
def data(tmp_path):
    """Four labelled items, under the name of no known task."""
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def loaded(monkeypatch):
    """Scripted members in place of what would be loaded: a is always right, b half the time."""
    asked: list[tuple[list[str], bool]] = []

    def load(configs, *, progress):
        asked.append(([config.model for config in configs], progress))
        return [
            scripted_member(config.display_name, kind(), answers(num_right))
            for config, kind, num_right in zip(configs, (byte_level, metaspace, metaspace), (4, 2, 4), strict=False)
        ]

    monkeypatch.setattr(advising, "load", load)
    return asked


def answers(num_right: int) -> dict[str, str]:
    return {
        TASK.prompt(Item(**one)): f"\\boxed{{{one['answer'] if i < num_right else 7}}}" for i, one in enumerate(RECORDS)
    }


def refuse_to_load(monkeypatch):
    def load(configs, *, progress):
        raise AssertionError("loaded weights before the input was checked")

    monkeypatch.setattr(advising, "load", load)


def test_advise_prints_measurements_and_recommendation(data, loaded):
    result = run("advise", *BOTH, "--data", str(data))
    shown = result.stdout.decode()
    assert result.code == 0
    assert loaded == [(["models/a", "b.gguf"], True)]
    assert "A  a       4 of 4  100.0%" in shown
    assert "B  b       2 of 4  50.0%" in shown
    assert "- b is left out: 2 of 4 right (50.0%), 50 points below the drafter." in shown
    assert "safe-llm generate --drafter models/a PROMPT" in shown
    assert result.error_lines == [
        "a alone: 4 of 4 answers",
        "b alone: 4 of 4 answers",
        "a with b: 4 of 4 answers",
        "b with a: 4 of 4 answers",
    ]


def test_json_has_all_and_the_file_it_names_can_be_used(data, loaded, tmp_path):
    members = ("--member", "models/a", "--member", "b", "--member", "c")
    result = run("advise", *members, "--data", str(data), "--json", "--quiet", "--device", "cpu")
    assert (result.code, result.stderr, loaded[0][1]) == (0, "", False)
    values = json.loads(result.stdout)
    assert values["recommendation"]["refused"] == ["b"]
    config = tmp_path / "ready.toml"
    config.write_text(values["toml"])
    spec = EnsembleSpec.from_toml(config)
    assert {member.model for member in spec.members} == {"models/a", "c"}
    assert {member.device for member in spec.members} == {"cpu"}
    for model in ("models/a", "c"):
        assert model in values["command"].split()


def test_progress_keeps_one_line_on_a_terminal(data, loaded):
    result = run("advise", *BOTH, "--data", str(data), tty=True)
    assert "\r\x1b[Ka alone: 4 of 4 answers\n" in result.stderr
    assert "\x1b[2J" not in result.stdout.decode()


def test_progress_says_what_is_under_way_to_a_terminal_only(data, loaded):
    more = [{"id": f"x{n}", "question": f"{n}?", "answer": "1"} for n in range(9)]
    data.write_text("".join(json.dumps(record) + "\n" for record in more))
    assert "a alone: 8 of 9" in run("advise", *BOTH, "--data", str(data), tty=True).stderr
    assert "a alone: 8 of 9" not in run("advise", *BOTH, "--data", str(data)).stderr


def test_limit_and_text_and_tokens_are_those_that_were_given(data, loaded, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes("naïve\r\n".encode())
    flags = ("--limit", "3", "--text", str(text), "--max-tokens", "2")
    values = json.loads(run("advise", *BOTH, "--data", str(data), *flags, "--json").stdout)
    assert (values["num_items"], values["max_tokens"], values["measurements"]["num_bytes"]) == (3, 2, 8)


def test_items_that_nobody_can_answer_are_left_out_and_named(tmp_path, loaded):
    path = tmp_path / "choices.jsonl"
    shared = {"question": "Which?", "answer": "A"}
    items = [shared | {"id": "1", "choices": ["one", "two"]}, shared | {"id": "2", "choices": ["", ""]}]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    shown = run("advise", *BOTH, "--data", str(path)).stdout.decode()
    assert "on 1 answer of the drafter" in shown
    assert "task choices, 1 item (1 left out: nobody can answer them)" in shown
    values = json.loads(run("advise", *BOTH, "--data", str(path), "--json").stdout)
    assert (values["num_items"], values["left_out"]) == (1, ["2"])


def test_task_is_the_named_one_else_that_of_the_files_name_else_what_fits(data, loaded):
    def task_of(path, *flags):
        return json.loads(run("advise", *BOTH, "--data", str(path), "--json", "--limit", "1", *flags).stdout)["task"]

    assert task_of(data) == "mine"
    assert task_of(data, "--task", "gsm8k") == "gsm8k"
    assert task_of(data.rename(data.with_name("gsm8k.jsonl"))) == "gsm8k"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "advice compares members, got 0"),
        (["--member", "a"], "advice compares members, got 1"),
        (["--member", "a", "--member", "a"], "two members are called 'a'"),
        (["--member", "x/a", "--member", "y/a"], "two members are called 'a'"),
        ([*BOTH, "--limit", "0"], "--limit must be at least 1, got 0"),
        ([*BOTH, "--max-tokens", "0"], "max_tokens must be a whole number at least 1"),
        ([*BOTH, "--dtype", "int3"], "dtype"),
        ([*BOTH, "--task", "gsm9k"], "unknown task 'gsm9k'"),
        ([*BOTH, "--text", "missing.txt"], "cannot read the text 'missing.txt'"),
        ([*BOTH, "--data", "missing.jsonl"], "cannot read the data file 'missing.jsonl'"),
    ],
)
def test_bad_flags_are_one_error_before_anything_is_loaded(data, monkeypatch, flags, message):
    refuse_to_load(monkeypatch)
    result = run("advise", "--data", str(data), *flags)
    assert (result.code, result.stdout) == (2, b"")
    assert message in result.error_lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no items"),
        (b'{"id": "1", "question": "Two?"}\n', "line 1: field answer: it is missing"),
        (b'{"id": "1", "question": "Two?", "answer": ""}\n', "line 1: field answer: it is empty"),
        (b"[1]\n", "line 1"),
    ],
)
def test_data_without_labels_is_one_error_before_anything_is_loaded(tmp_path, monkeypatch, content, message):
    refuse_to_load(monkeypatch)
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    result = run("advise", *BOTH, "--data", str(path))
    assert (result.code, result.stdout) == (2, b"")
    assert message in result.error_lines[0]


def test_gold_answers_that_do_not_score_are_an_error(tmp_path, monkeypatch):
    """H13: the field holds the whole solution."""
    refuse_to_load(monkeypatch)
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"id": "1", "question": "Two?", "answer": "because it is so"}) + "\n")
    result = run("advise", *BOTH, "--data", str(path))
    assert result.code == 2
    assert "the gold answer of 1 of 1 items does not score" in result.error_lines[0]


def test_a_task_that_needs_more_than_the_data_says_so_before_anything_is_loaded(tmp_path, monkeypatch):
    refuse_to_load(monkeypatch)
    path = tmp_path / "bbh.jsonl"
    path.write_text(json.dumps({"id": "1", "question": "Is it?", "answer": "True", "subject": "navigate"}) + "\n")
    result = run("advise", *BOTH, "--data", str(path))
    assert result.code == 2
    assert "cannot read the examples" in result.error_lines[0]
    assert str(tmp_path) in result.error_lines[0]


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe", "is not UTF-8"), (b"", "the text is empty")])
def test_text_that_is_none_is_one_error(data, tmp_path, monkeypatch, content, message):
    refuse_to_load(monkeypatch)
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    result = run("advise", *BOTH, "--data", str(data), "--text", str(text))
    assert (result.code, result.stdout) == (2, b"")
    assert message in result.error_lines[0]


def test_a_missing_data_flag_is_a_usage_error():
    result = run("advise", *BOTH)
    assert result.code == 2
    assert "--data" in result.error_lines[0]


def test_unknown_models_are_found_before_the_weights_of_another_are_read(data, monkeypatch, tmp_path):
    def load_members(configs, *, progress):
        raise AssertionError("loaded weights before every model was found")

    monkeypatch.setattr("safe_llm.ensemble.load_members", load_members)
    known = model_folder(tmp_path / "known", byte_level(), eos="<|im_end|>")
    result = run("advise", "--member", str(known), "--member", "./missing", "--data", str(data))
    assert result.code == 2
    assert "missing" in result.error_lines[0]


def test_models_that_are_found_are_loaded_once_each(monkeypatch):
    from safe_llm.config import MemberConfig

    order: list[str] = []
    monkeypatch.setattr("safe_llm.models.resolve", lambda config, *, progress: order.append(config.model))
    monkeypatch.setattr("safe_llm.ensemble.load_members", lambda configs, *, progress: [*order, "loaded"])
    assert advising.load([MemberConfig(model="a"), MemberConfig(model="b")], progress=False) == ["a", "b", "loaded"]

"""`safe-llm eval`: flags, endings, and the whole on the demo models."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from evaluation_support import DRAFTER, VERIFIER, Loader, write_items
from safe_llm.cli import evaluating, terminal
from safe_llm.evaluation import paper
from test_cli_support import run


@pytest.fixture
def load(monkeypatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr(evaluating, "load_members", loader)
    return loader


@pytest.fixture
def folders(tmp_path) -> list[str]:
    return ["--data", str(write_items(tmp_path / "data")), "--output", str(tmp_path / "out")]


@pytest.fixture
def nothing_loads(monkeypatch) -> None:
    def refuse(configs, *, progress):
        raise AssertionError("loaded weights before the input was checked")

    monkeypatch.setattr(evaluating, "load_members", refuse)


def test_eval_prints_tables_and_says_where_the_rest_is(load, folders, tmp_path):
    done = run("eval", "gsm8k", *folders, "--batch-size", "2", "--lookahead", "3")
    assert done.code == 0
    text = done.stdout.decode()
    assert "GSM8K, 4 items" in text
    assert f"safe - {DRAFTER} (best member)" in text
    assert done.error_lines == [f"results are in {tmp_path / 'out'}"]
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [c["name"] for c in saved["contenders"]] == [DRAFTER, VERIFIER, "every-token", "safe"]
    assert {(c["config"]["max_batch_size"], c["config"]["lookahead"]) for c in saved["contenders"]} == {(2, 3)}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "answers",
        "results.json",
        "results.md",
        "results.png",
    ]


def test_eval_takes_runs_limit_tokens_and_seed(load, folders, tmp_path):
    flags = ["--runs", " drafter , safe", "--limit", "3", "--max-tokens", "9", "--seed", "7", "-q"]
    assert run("eval", "gsm8k", *folders, *flags).code == 0
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    (task,) = saved["tasks"]
    assert [(c["name"], c["num_items"]) for c in task["contenders"]] == [(DRAFTER, 3), ("safe", 3)]
    assert (task["params"]["max_tokens"], task["params"]["seed"], saved["settings"]["seed"]) == (9, 7, 7)
    assert task["contenders"][0]["finish_details"] == {"max_tokens": 3}
    assert {c["name"]: c["config"]["method"] for c in saved["contenders"]} == {DRAFTER: "unite", "safe": "prefix-mass"}


def test_eval_shows_its_progress_on_a_terminal(load, folders):
    done = run("eval", "gsm8k", *folders, "--runs", "drafter", tty=True)
    assert done.code == 0
    assert "4/4" in done.stderr
    assert DRAFTER in done.stderr


def test_interrupted_eval_says_how_to_go_on(load, folders, tmp_path, monkeypatch):
    def interrupt(contender, done, total):
        if (contender, done) == ("safe", 0):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(terminal, "progress_bars", lambda *, enabled: nullcontext(interrupt))
        done = run("eval", "gsm8k", *folders)
    assert done.code == 130
    assert f"the same command goes on with what is in {tmp_path / 'out'}" in done.stderr
    assert run("eval", "gsm8k", *folders).code == 0


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["gsm8k", "--runs", "sfae"], "unknown run 'sfae'", "did you mean 'safe'"),
        (["gsm8k", "--method", "unit"], "unknown method 'unit'", "did you mean 'unite'"),
        (["gsm8k", "--method", ""], "unknown method ''", ""),
        (["gsm8k", "--weights", "1"], "1 weights for 2 members", ""),
        (["gsm8k", "--limit", "-1"], "limit must be at least 1", ""),
        (["gsm8k", "--max-tokens", "0"], "max_tokens must be", ""),
        (["gsm8k", "--batch-size", "0"], "max_batch_size", ""),
        (
            [
                "gsm8",
            ],
            "unknown task 'gsm8'",
            "did you mean 'gsm8k'",
        ),
        (["math500"], "math500.jsonl", ""),
        (["gsm8k", "--preset", "dema"], "unknown preset 'dema'", "did you mean 'demo'"),
        (["gsm8k", "--dry-run"], "--dry-run belongs to `safe-llm eval paper`", ""),
        (["gsm8k", "--pairs", "I+Q"], "--pairs belongs to `safe-llm eval paper`", ""),
        (["paper", "--preset", "demo"], "--preset does not go with `paper`", "--pairs"),
        (["paper", "--pairs", "I+W"], "unknown ensemble of the paper 'I+W'", "did you mean 'I+Q'"),
        (["paper", "--dry-run", "--lookahead", "0"], "lookahead", ""),
        (["paper"], "mmlu_redux.jsonl", ""),
    ],
)
def test_eval_refuses_bad_input_before_loading(nothing_loads, folders, args, message, hint):
    done = run("eval", *args, *folders)
    assert done.code == 2
    assert done.stdout == b""
    assert message in done.error_lines[0]
    assert hint in done.stderr


def test_runs_of_other_items_are_refused(load, folders):
    assert run("eval", "gsm8k", *folders).code == 0
    done = run("eval", "gsm8k", *folders, "--limit", "2")
    assert done.code == 2
    assert "which is not asked now" in done.error_lines[0]
    assert done.error_lines[1] == "hint: use another --output"


def test_paper_says_what_it_takes(nothing_loads):
    done = run("eval", "paper", "--dry-run", "--batch-size", "4")
    assert done.code == 0
    text = done.stdout.decode()
    assert "48.5 GB" in text
    assert "caches of 4 answers" in text
    assert "84.59" in text


def test_paper_runs_its_ensembles_with_its_settings(monkeypatch, folders, tmp_path):
    asked = []

    def members(configs, *, progress):
        asked.append([config.model for config in configs])
        names = [config.display_name for config in configs]
        return Named(names)(configs)

    class Named(Loader):
        def __init__(self, names):
            super().__init__()
            self._answers = dict(zip(names, ({"1": "\\boxed{2}"}, {"1": "\\boxed{2}"}, {}), strict=False))

    monkeypatch.setattr(evaluating, "load_members", members)
    done = run("eval", "paper", "gsm8k", *folders, "--pairs", "I+Q,Q+E")
    assert done.code == 0, done.stderr
    hub = {letter: model.hub_id for letter, model in paper.MODELS.items()}
    assert asked == [[hub["I"], hub["Q"]], [hub["Q"], hub["E"]]]
    saved = json.loads((tmp_path / "out" / "Q+E" / "results.json").read_text())
    assert {c["config"]["top_k"] for c in saved["contenders"]} == {10}
    alone = [tmp_path / "out" / pair / "answers" / "Qwen2.5-7B-Instruct.jsonl" for pair in ("I+Q", "Q+E")]
    assert alone[0].read_bytes() == alone[1].read_bytes()  # taken over, not decoded again


@pytest.mark.demo
def test_eval_of_the_demo_models(folders, tmp_path):
    flags = ["--limit", "2", "--max-tokens", "24"]
    done = run("eval", "gsm8k", *folders, *flags)
    assert done.code == 0, done.stderr
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    contenders = {c["name"]: c for c in saved["tasks"][0]["contenders"]}
    assert contenders["every-token"]["ensemble_rate"] > 0.5
    assert 0 < contenders["safe"]["ensemble_rate"] < contenders["every-token"]["ensemble_rate"]
    assert all(c["num_tokens"] > 4 and c["tokens_per_s"] > 0 and not c["num_failed"] for c in contenders.values())
    assert all(member["template"] for member in saved["members"])

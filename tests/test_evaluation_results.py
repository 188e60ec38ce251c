"""What an evaluation writes: figures, circumstances, tables, a picture."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from evaluation_support import DRAFTED, DRAFTER, GOLDS, RIGHT, SUMS, VERIFIER, Loader, settings, write_items
from safe_llm.config import EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, EvaluationError, UnknownNameError
from safe_llm.evaluation import results as module
from safe_llm.evaluation.evaluate import evaluate, prepare
from safe_llm.evaluation.files import make_folder
from safe_llm.evaluation.plot import write_plot
from safe_llm.evaluation.scoring import collect_questions, score_answers
from safe_llm.evaluation.store import Answer
from safe_llm.evaluation.tables import print_results, write_markdown
from safe_llm.evaluation.tasks import open_task


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of a run on four questions, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    return evaluate(prepare(settings(folder)), load=Loader()), folder / "out"


@pytest.fixture
def saved(found):
    return json.loads((found[1] / "results.json").read_text(encoding="utf-8"))


def by_name(saved: dict) -> dict[str, dict]:
    return {contender["name"]: contender for contender in saved["tasks"][0]["contenders"]}


# ---------------------------------------------------------------------- figures


def test_accuracies_are_those_of_the_answers(saved):
    contenders = by_name(saved)
    assert contenders[DRAFTER]["accuracy"]["flexible"]["value"] == 0.75
    assert contenders[DRAFTER]["accuracy"]["strict"]["value"] == 0.75
    assert contenders[VERIFIER]["accuracy"]["flexible"]["value"] == 0.5
    assert saved["tasks"][0]["best_member"] == DRAFTER


def test_figures_are_sums_over_the_answers(found, saved):
    lines = [json.loads(line) for line in (found[1] / "answers" / "safe.jsonl").read_text().splitlines()]
    safe = by_name(saved)["safe"]
    assert safe["num_tokens"] == sum(line["num_tokens"] for line in lines)
    assert safe["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert safe["tokens_per_s"] == pytest.approx(safe["num_tokens"] / safe["seconds"])
    assert safe["ensemble_rate"] == sum(line["num_ensembled"] for line in lines) / safe["num_tokens"]
    assert safe["replacement_rate"] == sum(line["num_replaced"] for line in lines) / safe["num_tokens"]
    assert safe["finish_details"] == {"end": 4}  # H05: what ended the answers is stated
    assert (safe["num_failed"], safe["failures"]) == (0, {})
    assert by_name(saved)["every-token"]["ensemble_rate"] == 1.0
    assert by_name(saved)[DRAFTER]["ensemble_rate"] == 0.0


def test_comparisons_are_with_the_best_member_and_the_drafter(saved):
    pairs = [(c["one"], c["other"]) for c in saved["tasks"][0]["comparisons"] if c["metric"] == "flexible"]
    assert pairs == [("safe", DRAFTER), ("safe", "every-token"), ("every-token", DRAFTER)]
    first = saved["tasks"][0]["comparisons"][0]["comparison"]
    assert first["wins"] - first["losses"] == 4 * first["difference"]["value"]


def test_best_member_may_be_a_verifier(tmp_path):
    load = Loader(drafter=DRAFTED | {"1": "No idea."}, verifier=RIGHT)
    task = evaluate(prepare(settings(tmp_path)), load=load).tasks[0]
    assert task.best_member == VERIFIER
    pairs = [(c.one, c.other) for c in task.comparisons if c.metric == "strict"]
    assert pairs == [("safe", VERIFIER), ("safe", DRAFTER), ("safe", "every-token"), ("every-token", VERIFIER)]


def test_runs_with_a_method_are_compared_with_the_same_method_and_with_safe(tmp_path):
    runs = ("drafter", "every-token:gac", "safe", "safe:gac")
    task = evaluate(prepare(settings(tmp_path, runs=runs)), load=Loader()).tasks[0]
    pairs = [(c.one, c.other) for c in task.comparisons if c.metric == "strict"]
    assert pairs == [
        ("safe", DRAFTER),
        ("safe:gac", DRAFTER),
        ("safe:gac", "every-token:gac"),
        ("safe:gac", "safe"),
        ("every-token:gac", DRAFTER),
    ]


def test_comparisons_need_both_contenders(tmp_path):
    task = evaluate(prepare(settings(tmp_path, runs=("safe",))), load=Loader()).tasks[0]
    assert (task.best_member, task.comparisons) == (None, ())
    assert [contender.name for contender in task.contenders] == ["safe"]


def test_unaligned_tokens_are_a_share_of_all_outcomes(found):
    contender = found[0].tasks[0].contenders[-1]
    assert 0 <= contender.unaligned_rate < 1
    assert contender.acceptance_rate <= 1


# ---------------------------------------------------------------------- circumstances


def test_results_say_how_prompts_were_made_and_on_what(saved):
    # H07: the flags that change scores are in the file
    assert saved["settings"] == {
        "apply_chat_template": True,
        "fewshot_as_multiturn": False,
        "num_fewshot": 0,
        "system_instruction": None,
        "limit": None,
        "seed": 0,
        "num_resamples": 10_000,
        "sampling": {},
    }
    assert saved["tasks"][0]["params"] == {"max_tokens": 512, "stop": [], "temperature": 0.0}
    assert saved["schema_version"] == 1
    assert {"safe_llm", "torch", "transformers", "lm_eval"} <= saved["versions"].keys()
    assert saved["machine"]["num_threads"] >= 1
    assert [member["fingerprint"] for member in saved["members"]] == [f"weights of {n}" for n in (DRAFTER, VERIFIER)]
    assert [contender["config"]["mode"] for contender in saved["contenders"]] == ["drafter"] * 2 + [
        "every-token",
        "safe",
    ]
    assert len({contender["fingerprint"] for contender in saved["contenders"]}) == 4


def test_machine_without_proc_has_a_name_anyway(monkeypatch):
    class Missing:
        def __init__(self, path: str) -> None: ...

        def read_text(self, encoding: str) -> str:
            raise FileNotFoundError

    monkeypatch.setattr(module, "Path", Missing)
    assert isinstance(module.machine()["cpu"], str)


# ---------------------------------------------------------------------- scoring through lm_eval


def test_gold_answers_score_full_marks_through_lm_eval(tmp_path):
    load = Loader(drafter={item: f"\\boxed{{{gold}}}" for item, gold in GOLDS.items()})
    task = evaluate(prepare(settings(tmp_path, runs=("drafter",))), load=load).tasks[0]
    assert {metric: interval.value for metric, interval in task.contenders[0].accuracy.items()} == {
        "flexible": 1.0,
        "strict": 1.0,
    }


def test_answers_to_other_prompts_are_not_scored(tmp_path):
    data = (open_task("gsm8k", write_items(tmp_path) / "gsm8k.jsonl"),)
    questions = collect_questions(data)
    assert [question.item for question in questions] == list(SUMS)
    with pytest.raises(EvaluationError, match="item '1' of 'gsm8k' has no answer to this prompt"):
        score_answers(data, {})
    stale = Answer(task="gsm8k", item="1", prompt_sha256="0" * 64, params={}, fingerprint="f", text="\\boxed{2}")
    with pytest.raises(EvaluationError, match="no answer to this prompt"):
        score_answers([replace(data[0], items=data[0].items[:1])], {("gsm8k", "1"): stale})


def test_wrong_golds_are_found_before_the_run(tmp_path):
    # H13: the field `answer` holds a whole solution
    (tmp_path / "gsm8k.jsonl").write_text('{"id": "1", "question": "?", "answer": "2 + 2 = 4, so four."}\n')
    with pytest.raises(EvaluationError, match="gold answer of 1 of 1 items does not score: '1'"):
        prepare(settings(tmp_path / "run", data=tmp_path))


# ---------------------------------------------------------------------- tables and picture


def printed(results) -> str:
    stream = io.StringIO()
    print_results(Console(file=stream, width=200, markup=False), results)
    return stream.getvalue()


def test_tables_show_accuracies_and_differences(found):
    text, markdown = printed(found[0]), (found[1] / "results.md").read_text(encoding="utf-8")
    for shown in ("GSM8K, 4 items of gsm8k.jsonl", "75.0 (25.0 to 100.0)", f"safe - {DRAFTER} (best member)"):
        assert shown in text
        assert shown in markdown
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines[:6]}) == 1


def test_what_failed_or_was_left_out_is_said(found, tmp_path):
    task = found[0].tasks[0]
    failed = replace(task.contenders[0], num_failed=2, failures={"ContextOverflowError": 2})
    changed = replace(found[0], tasks=(replace(task, contenders=(failed,), comparisons=(), num_left_out=3),))
    write_markdown(changed, tmp_path / "results.md")
    for text in (printed(changed), (tmp_path / "results.md").read_text(encoding="utf-8")):
        assert "2 items failed and count as wrong (ContextOverflowError 2)" in text
        assert "3 items of gsm8k.jsonl cannot be answered" in text
        assert "difference" not in text


def test_names_cannot_break_the_tables(found, tmp_path):
    task = found[0].tasks[0]
    hostile = replace(task.contenders[0], name="a|b<script>\x1b[31m[red]$\\frac{$日本")
    changed = replace(found[0], tasks=(replace(task, contenders=(hostile,)),))
    write_markdown(changed, tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "a\\|b&lt;script>" in text
    assert "\x1b" not in text + printed(changed)
    write_plot(changed, tmp_path / "results.png")


def test_picture_is_a_png_with_a_panel_per_task(found, tmp_path):
    assert (found[1] / "results.png").read_bytes().startswith(b"\x89PNG")
    two = replace(found[0], tasks=found[0].tasks * 2)
    write_plot(two, tmp_path / "two.png")
    heights = [int.from_bytes((path).read_bytes()[20:24]) for path in (found[1] / "results.png", tmp_path / "two.png")]
    assert heights[1] == pytest.approx(2 * heights[0], abs=4)


def test_files_that_cannot_be_written_are_named(found, tmp_path):
    for write in (write_markdown, write_plot):
        with pytest.raises(EvaluationError, match="cannot write"):
            write(found[0], tmp_path / "nowhere" / "file.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot make the folder"):
        make_folder(tmp_path / "file" / "folder")


# ---------------------------------------------------------------------- input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tasks": ("gsm8",)}, UnknownNameError, "did you mean 'gsm8k'"),
        ({"tasks": ("gsm8k", "gsm8k")}, ConfigError, "named twice"),
        ({"tasks": ()}, ConfigError, "name a task"),
        ({"data": None}, EvaluationError, "no data is named"),
        ({"tasks": ("math500",)}, EvaluationError, "math500.jsonl"),
        ({"limit": 0}, ConfigError, "limit must be at least 1, got 0"),
        ({"runs": ("sfae",)}, UnknownNameError, "did you mean 'safe'"),
        (
            {"spec": EnsembleSpec(drafter=MemberConfig(model="a"), sampling={"max_tokens": 0})},
            ConfigError,
            "max_tokens",
        ),
    ],
)
def test_input_is_checked(tmp_path, monkeypatch, changes, error, message):
    monkeypatch.delenv("SAFE_LLM_EVAL_DATA", raising=False)
    with pytest.raises(error, match=message):
        prepare(settings(tmp_path, **changes))


def test_data_may_be_a_file_of_ones_own_or_come_from_the_environment(tmp_path, monkeypatch):
    folder = write_items(tmp_path / "data")
    own = (folder / "gsm8k.jsonl").rename(folder / "mine.jsonl")
    (task,) = prepare(settings(tmp_path / "a", tasks=(), data=own)).tasks
    assert task.task.name == "mine"
    (task,) = prepare(settings(tmp_path / "b", data=own)).tasks
    assert task.task.name == "gsm8k"
    with pytest.raises(ConfigError, match="one data file for 2 tasks"):
        prepare(settings(tmp_path / "c", tasks=("gsm8k", "math500"), data=own))
    write_items(folder)
    monkeypatch.setenv("SAFE_LLM_EVAL_DATA", str(folder))
    assert len(prepare(settings(tmp_path / "d", data=None, limit=3)).questions) == 3

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from safe_llm.errors import EvaluationError, UnknownNameError
from safe_llm.evaluation.items import Item, load_items
from safe_llm.evaluation.lm_eval_tasks import FOLDER
from safe_llm.evaluation.tasks import TASKS, NumberTask, check_gold, open_task, task_for, task_named

DATA = Path(__file__).parent / "data"
SHARED = os.environ.get("SAFE_LLM_EVAL_DATA")
NAMES = sorted(TASKS)


def item_of(answer: str, **fields) -> Item:
    return Item(id="1", question=fields.pop("question", "How many?"), answer=answer, **fields)


def scores(name: str, text: str, item: Item) -> tuple[bool, bool]:
    score = TASKS[name].score(text, item)
    return score.strict, score.flexible


# ---------------------------------------------------------------------- golds


def _check_whole_set(name: str, folder: Path) -> None:
    opened = open_task(name, folder / TASKS[name].file_name)
    items, task = opened.items, opened.task
    for place, item in enumerate(items):
        for text in (task.stated_gold(item), task.gold_text(item)):
            score = task.score(text, item)
            assert (score.strict, score.flexible) == (True, True), item.id
        others = (o for o in (*items[place + 1 :], *items[:place]) if o.answer != item.answer)
        wrong = next((o for o in others if o.subject == item.subject and set(o.letters) <= set(item.letters)), None)
        if wrong is not None:
            assert not task.score(task.stated_gold(wrong), item).flexible, (item.id, wrong.id)
        assert not task.score("I do not know.", item).flexible, item.id


@pytest.mark.parametrize("name", NAMES)
def test_golds_score_against_themselves_and_wrong_answers_do_not(name):  # H09, H13
    _check_whole_set(name, DATA)


@pytest.mark.skipif(SHARED is None, reason="SAFE_LLM_EVAL_DATA names no folder with the whole sets")
@pytest.mark.parametrize("name", NAMES)
def test_golds_of_the_whole_sets_score_against_themselves(name):
    _check_whole_set(name, Path(SHARED or ""))


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("gsm8k", item_of("He sells 9 eggs at $2.\n#### 18")),
        ("gsm8k", item_of("eighteen")),
        ("math500", item_of("We have $2 + 2 = \\boxed{4}$, so it is four.")),
        ("math500", item_of("Two and two make four since two is one more than one.")),
        ("math500", item_of("\\sqrt{5}", solution="It is $\\boxed{\\sqrt{6}}$.")),
        ("bbh", item_of("(C)", question="Which?\nOptions:\n(A) this\n(B) that")),
        ("bbh", item_of("Maybe", question="Is it so?\nOptions:\n- Yes\n- No")),
    ],
)
def test_gold_self_check_names_items_that_do_not_score(name, item):  # H13
    items = [replace(item, id=f"item-{number}") for number in range(7)]
    with pytest.raises(EvaluationError, match=r"'item-0', 'item-1', .*'item-4' and 2 more") as caught:
        check_gold(TASKS[name], items)
    assert "7 of 7" in str(caught.value)
    assert item.answer not in str(caught.value)


def test_gold_self_check_wants_the_stated_gold_to_be_strictly_right():
    class Unstated(NumberTask):
        def stated_gold(self, item):
            return f"It is {item.answer}"

    task = Unstated(name="own", title="Own", file_name="own.jsonl", max_tokens=8)
    item = item_of("7", solution="#### 7")
    check_gold(TASKS["gsm8k"], [item])
    with pytest.raises(EvaluationError, match="'own': the gold answer of 1 of 1 items"):
        check_gold(task, [item])


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The order is $29.00.", "29", (False, True)),  # H01
        ("The answer is $29.00.", "29", (True, True)),  # H01
        ("a profit of $70,000", "70000", (False, True)),  # H02
        ("\\boxed{70 000}", "70000", (True, True)),  # H02
        ("#### -5", "-5", (True, True)),  # H02
        ("#### -5", "5", (False, False)),
        ("The answer is 50%.", "50", (True, True)),  # H02
        ("The answer is 1/2.", "0.5", (True, True)),  # H02
        ("#### 5\n\nQ: And now?\n#### 7", "7", (True, True)),  # H03: the last match
        ("#### 5\n\nQ: And now?\n#### 7", "5", (False, False)),
        ("So she has 7.", "7", (False, True)),  # H07: right, and not where it was asked for
        ("The answer is 18. That is 6 threes.", "18", (True, True)),
        ("It is 7, so I write \\boxed{}", "7", (False, True)),
        ("9" * 5000, "9", (False, False)),
        ("", "7", (False, False)),
    ],
)
def test_number_task_scores(text, answer, expected):
    assert scores("gsm8k", text, item_of(answer)) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("\\[ \\boxed{42} \\]", "42", (True, True)),  # H10
        ("$\\boxed{\\dfrac{9}{7}}$", "\\frac97", (True, True)),  # H10
        ("first \\boxed{1}, then \\boxed{2}", "2", (True, True)),  # H10: the last
        ("\\boxed{1} and \\boxed{2", "1", (True, True)),  # H10: the last that is balanced
        ("The answer is 42.", "42", (False, True)),  # H07
        ("so $x = \\frac{1}{2}$.", "0.5", (False, True)),
        ("It is 12", "12", (False, True)),
        ("I write \\boxed{}", "12", (False, False)),
    ],
)
def test_math_task_scores(text, answer, expected):
    assert scores("math500", text, item_of(answer)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is (B).", (True, True)),
        ("The answer is (A). No: the answer is (B).", (True, True)),  # H03
        ("The answer is (B). The answer is (A).", (False, False)),
        ("the answer is **B**, as I said", (True, True)),
        ("\\boxed{\\text{B}}", (True, True)),
        ("I choose option B", (False, True)),  # H07
        ("The answer is zinc.", (False, True)),
        ("The answer is (X).", (False, False)),  # the prompt's own placeholder
        ("The answer is A bit of everything", (False, False)),
    ],
)
def test_choice_task_scores(text, expected):
    assert scores("arc_challenge", text, item_of("B", choices=("iron", "zinc", "tin"))) == expected


@pytest.mark.parametrize(
    ("answer", "options", "text", "expected"),
    [
        ("(B)", "\n(A) one\n(B) two", "So the answer is (B).", (True, True)),
        ("(B)", "\n(A) one\n(B) two", "It must be (B)", (False, True)),
        ("(B)", "\n(A) one\n(B) two", "So the answer is (B).\n\nQ: Next?\nA: The answer is (A).", (True, True)),
        ("valid", "\n- valid \n- invalid", "So the answer is Valid.", (True, True)),
        ("valid", "\n- valid \n- invalid", "So the answer is invalid.", (False, False)),
        ("valid", "\n- valid \n- invalid", "So the answer is not valid.", (False, False)),
        ("No", "\n- Yes\n- No", "There is no doubt: Yes", (False, False)),
        ("True", "", "not False = True", (False, True)),
    ],
)
def test_big_bench_hard_scores(answer, options, text, expected):
    assert scores("bbh", text, item_of(answer, question=f"Is it so?{options}", subject="any")) == expected


# ---------------------------------------------------------------------- prompts and names


def test_prompts_ask_for_the_form_that_strict_wants():
    assert TASKS["gsm8k"].prompt(item_of("7")).endswith("put your final answer within \\boxed{}.")
    text = TASKS["arc_challenge"].prompt(item_of("B", choices=("iron", "zinc")))
    assert text.startswith("How many?\n(A) iron\n(B) zinc\n\n")
    assert '"The answer is (X)."' in text


def test_big_bench_hard_prompt_has_three_examples_of_its_subject():
    task = TASKS["bbh"].beside(DATA / "bbh.jsonl")
    item = load_items(DATA / "bbh.jsonl")[2]
    text = task.prompt(item)
    assert text.startswith("Say whether a walk ends where it began.\n\nQ: ")  # what is before the rule is left out
    assert len(re.findall("^Q: ", text, re.MULTILINE)) == 4
    assert text.endswith(f"Q: {item.question}\nA: Let's think step by step.")


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (None, "'1': field subject must name"),
        ("../secret", "'1': field subject must name"),
        ("unheard_of", "unheard_of.txt': No such file"),
        ("binary", "binary.txt': it is not UTF-8"),
    ],
)
def test_big_bench_hard_prompt_refuses_a_subject_without_examples(tmp_path, subject, message):
    (tmp_path / "bbh_prompts").mkdir()
    (tmp_path / "bbh_prompts" / "binary.txt").write_bytes(b"\xff")
    with pytest.raises(EvaluationError, match=re.escape(message)):
        TASKS["bbh"].beside(tmp_path / "bbh.jsonl").prompt(item_of("True", subject=subject))


def test_big_bench_hard_prompt_needs_to_know_where_its_examples_lie():
    with pytest.raises(EvaluationError, match="beside"):
        TASKS["bbh"].prompt(item_of("True", subject="navigate"))


def test_task_named_suggests_the_nearest():
    assert task_named("gsm8k") is TASKS["gsm8k"]
    with pytest.raises(UnknownNameError, match="did you mean 'math500'"):
        task_named("math50")


def test_task_for_ones_own_file_follows_its_answers():
    choice, number = item_of("B", choices=("a", "b")), item_of("$1,200")
    assert task_for("mine.jsonl", [choice]).score("The answer is (B).", choice).strict
    assert task_for("mine.jsonl", [number]).score("#### 1200", number).strict
    formula = item_of("x^2")
    task = task_for("dir/mine.jsonl", [number, formula])
    assert task.score("\\boxed{x^{2}}", formula).strict
    assert (task.name, task.title, task.file_name) == ("mine", "mine", "mine.jsonl")
    with pytest.raises(EvaluationError, match="some items have choices"):
        task_for("mine.jsonl", [choice, number])


def test_open_task_leaves_out_items_that_lost_their_choices():
    opened = open_task(None, DATA / "arc_challenge.jsonl")
    assert opened.left_out == ("choice/4",)
    assert [item.id for item in opened.items] == ["choice/1", "choice/2", "choice/3", "choice/5"]
    assert opened.task.name == "arc_challenge"


def test_open_task_checks_the_golds(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"id": "one", "question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}))
    with pytest.raises(EvaluationError, match="'gsm8k': the gold answer of 1 of 1 items does not score: 'one'"):  # H13
        open_task("gsm8k", file)


# ---------------------------------------------------------------------- lm-evaluation-harness


@pytest.fixture
def harness(monkeypatch, tmp_path):
    """The harness with our task files only, its caches in a folder of the test."""
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("SAFE_LLM_EVAL_DATA", str(DATA))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    def evaluate(model, *tasks, **metadata):
        manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
        # num_fewshot: what the task files do not let happen
        return simple_evaluate(
            model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, limit=4, num_fewshot=2
        )

    return evaluate


def _answering(answer):
    from lm_eval.api.model import LM

    class Answering(LM):
        def __init__(self):
            super().__init__()
            self.arguments = []

        def generate_until(self, requests, disable_tqdm=False):
            self.arguments += [request.arguments for request in requests]
            return [answer(request.task_name.removeprefix("safe_"), request.doc) for request in requests]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    return Answering()


def _gold(name, document):
    items = open_task(name, DATA / TASKS[name].file_name).items
    return TASKS[name].gold_text(next(item for item in items if item.id == document["id"]))


def _nonsense(name, document):
    return "lol"


def test_harness_scores_golds_all_right_with_our_prompts_and_stops(harness):
    model = _answering(_gold)
    results = harness(model, "safe_llm")  # the tag of all of them
    assert {name: (r["strict,none"], r["flexible,none"]) for name, r in results["results"].items()} == {
        f"safe_{name}": (1.0, 1.0) for name in NAMES
    }
    for name in NAMES:
        for sample in results["samples"][f"safe_{name}"]:
            document = sample["doc"]
            task = TASKS[name].beside(DATA / "bbh.jsonl")
            item = next(item for item in load_items(DATA / task.file_name) if item.id == document["id"])
            ((text, settings),) = sample["arguments"]
            assert text == task.prompt(item)
            # H05: nothing but the task's own strings ends an answer
            assert settings == {"until": list(task.stop), "max_gen_toks": task.max_tokens, "do_sample": False}


def test_harness_scores_nonsense_all_wrong(harness):
    results = harness(_answering(_nonsense), *(f"safe_{name}" for name in NAMES))["results"]
    assert {(r["strict,none"], r["flexible,none"]) for r in results.values()} == {(0.0, 0.0)}


def test_harness_reports_strict_and_flexible(harness):  # H07
    results = harness(_answering(lambda name, document: f"It is {document['answer']}"), "safe_gsm8k")["results"]
    assert (results["safe_gsm8k"]["strict,none"], results["safe_gsm8k"]["flexible,none"]) == (0.0, 1.0)


def test_harness_reads_the_file_that_metadata_names(harness, monkeypatch, tmp_path):
    monkeypatch.delenv("SAFE_LLM_EVAL_DATA")
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"id": "mine", "question": "1 + 1?", "answer": "2"}))
    samples = harness(_answering(_nonsense), "safe_gsm8k", data=str(file))["samples"]["safe_gsm8k"]
    assert [sample["doc"]["id"] for sample in samples] == ["mine"]
    with pytest.raises(EvaluationError, match="SAFE_LLM_EVAL_DATA"):
        harness(_answering(_nonsense), "safe_gsm8k")


def test_harness_is_told_of_items_that_are_left_out(harness, caplog):
    harness(_answering(_nonsense), "safe_arc_challenge")
    assert "arc_challenge: 1 of 5 items are left out: no choices" in caplog.text


def test_importing_the_tasks_is_light():
    import subprocess

    heavy = ("torch", "lm_eval", "datasets", "math_verify", "sympy")
    code = f"import safe_llm.evaluation.tasks, sys; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []

"""Several contenders on the same questions: the plan, turns, interruptions, failures."""

from __future__ import annotations

import json

import pytest

from evaluation_support import DRAFTED, DRAFTER, VERIFIER, Loader, member, prompt_of, settings, write_items
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig, preset
from safe_llm.errors import ConfigError, EvaluationError, MemberError, UnknownNameError
from safe_llm.evaluation.evaluate import evaluate, prepare
from safe_llm.evaluation.questions import Question
from safe_llm.evaluation.runs import answer_all, contenders_of, plan_runs

SPEC = preset("demo3")
NAMES = [member.display_name for member in SPEC.members]
LONELY = EnsembleSpec(drafter=MemberConfig(model="a"))


def lines_of(folder, contender: str) -> list[dict]:
    text = (folder / "out" / "answers" / f"{contender}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------------- plan


def test_plan_has_each_member_alone_and_both_ensembles():
    plans = plan_runs(SPEC)
    assert [plan.name for plan in plans] == [*NAMES, "every-token", "safe"]
    assert [plan.members for plan in plans] == [(0,), (1,), (2,), (0, 1, 2), (0, 1, 2)]
    assert [plan.config.mode for plan in plans] == ["drafter"] * 3 + ["every-token", "safe"]
    assert [plan.is_alone for plan in plans] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["safe", "drafter"], [NAMES[0], "safe"]),
        (["verifiers"], NAMES[1:]),
        ([NAMES[2], "verifiers", "every-token"], [*NAMES[1:], "every-token"]),
        (["safe:gac", "safe", "every-token:unite"], ["safe", "every-token:unite", "safe:gac"]),
    ],
)
def test_plan_takes_runs_by_their_names(runs, names):
    assert [plan.name for plan in plan_runs(SPEC, runs)] == names


def test_run_with_a_method_differs_in_the_method_only():
    plans = plan_runs(SPEC, ["safe", "safe:prefix-mass", "every-token:gac"])
    assert {plan.name: (plan.config.mode, plan.config.method) for plan in plans} == {
        "safe": ("safe", "auto"),
        "safe:prefix-mass": ("safe", "prefix-mass"),
        "every-token:gac": ("every-token", "gac"),
    }
    assert {plan.config.lookahead for plan in plans} == {SPEC.ensemble.lookahead}


def test_weights_hold_for_the_ensembles_only():
    weighted = SPEC.model_copy(update={"ensemble": EnsembleConfig(weights=(2, 1, 1), lookahead=3)})
    plans = {plan.name: plan.config for plan in plan_runs(weighted)}
    assert plans["safe"].weights == (2, 1, 1)
    assert plans[NAMES[0]].weights is None
    assert {config.lookahead for config in plans.values()} == {3}


def test_one_model_runs_alone():
    assert [plan.name for plan in plan_runs(LONELY)] == ["a"]
    with pytest.raises(ConfigError, match="'safe' needs a drafter and at least one verifier"):
        plan_runs(LONELY, ["safe"])
    with pytest.raises(ConfigError, match="nothing to run"):
        plan_runs(LONELY, ["verifiers"])


def test_plan_refuses_unknown_runs_and_members_called_like_one():
    with pytest.raises(UnknownNameError, match="did you mean 'every-token'"):
        plan_runs(SPEC, ["every-tokens"])
    with pytest.raises(ConfigError, match="a member is called 'safe'"):
        plan_runs(EnsembleSpec(drafter=MemberConfig(model="safe")))
    with pytest.raises(ConfigError, match="a member is called 'safe:gac'"):
        plan_runs(EnsembleSpec(drafter=MemberConfig(model="x", name="safe:gac")))


# ---------------------------------------------------------------------- answers


def test_all_contenders_are_asked_the_same_in_turns(tmp_path):
    # H07: baselines and ensemble have identical prompts and parameters
    reports = []
    load = Loader()
    evaluate(prepare(settings(tmp_path)), load=load, report=lambda *facts: reports.append(facts))
    contenders = [DRAFTER, VERIFIER, "every-token", "safe"]
    assert reports == [(name, done, 4) for done in (0, 2, 4) for name in contenders]
    asked = [
        [(line["item"], line["prompt_sha256"], line["params"]) for line in lines_of(tmp_path, name)]
        for name in contenders
    ]
    assert all(questions == asked[0] for questions in asked)
    assert [line["text"] for line in lines_of(tmp_path, DRAFTER)] == list(DRAFTED.values())
    assert len(load.members) == 2  # loaded once, shared


def interrupted_at(done: int):
    """A report that is interrupted when SAFE has answered so many."""

    def report(contender: str, answered: int, total: int) -> None:
        if (contender, answered) == ("safe", done):
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("done", [0, 2, 4])
def test_interrupted_run_goes_on_where_it_was(tmp_path, done):
    whole = evaluate(prepare(settings(tmp_path / "whole")), load=Loader())
    with pytest.raises(KeyboardInterrupt):
        evaluate(prepare(settings(tmp_path)), load=Loader(), report=interrupted_at(done))
    assert not (tmp_path / "out" / "results.json").exists()
    kept = lines_of(tmp_path, "safe")
    assert len(kept) == done
    load = Loader()
    resumed = evaluate(prepare(settings(tmp_path)), load=load)
    assert lines_of(tmp_path, "safe")[:done] == kept  # not even the times change: nothing was decoded again
    assert len(lines_of(tmp_path, "safe")) == 4
    assert resumed.tasks[0].comparisons == whole.tasks[0].comparisons
    assert [c.accuracy for c in resumed.tasks[0].contenders] == [c.accuracy for c in whole.tasks[0].contenders]
    assert (load.num_passes > 0) == (done < 4)


@pytest.fixture
def interrupted_decoding(tmp_path):
    """A run whose drafter is interrupted in the middle of a forward pass of its second chunk."""
    load = Loader()

    def members(configs):
        loaded = load(configs)
        forward, calls = loaded[0].backend.forward, []

        def interrupted(feeds):
            calls.append(feeds)
            if (tmp_path / "out" / "answers" / "safe.jsonl").stat().st_size and len(calls) % 7 == 0:
                raise KeyboardInterrupt
            return forward(feeds)

        loaded[0].backend.forward = interrupted
        return loaded

    with pytest.raises(KeyboardInterrupt):
        evaluate(prepare(settings(tmp_path)), load=members)
    return tmp_path


def test_interruption_inside_the_engine_keeps_whole_answers(interrupted_decoding):
    assert [line["text"] for line in lines_of(interrupted_decoding, DRAFTER)] == list(DRAFTED.values())[:2]
    evaluate(prepare(settings(interrupted_decoding)), load=Loader())
    assert [line["text"] for line in lines_of(interrupted_decoding, DRAFTER)] == list(DRAFTED.values())


def test_more_items_and_contenders_may_be_added_later(tmp_path):
    evaluate(prepare(settings(tmp_path, limit=2, runs=("drafter",))), load=Loader())
    first = lines_of(tmp_path, DRAFTER)
    results = evaluate(prepare(settings(tmp_path)), load=Loader())
    assert lines_of(tmp_path, DRAFTER)[:2] == first
    assert {c.num_items for c in results.tasks[0].contenders} == {4}


def test_run_of_other_items_is_refused_before_anything_is_loaded(tmp_path):
    evaluate(prepare(settings(tmp_path)), load=Loader())
    with pytest.raises(EvaluationError, match="answers item '3' of 'gsm8k', which is not asked now"):
        prepare(settings(tmp_path, limit=2))
    other = write_items(tmp_path / "other", {"1": "What is 1 plus 1, please?"})
    with pytest.raises(EvaluationError, match="answers another prompt for item '1'"):
        prepare(settings(tmp_path, data=other, limit=1))


def test_run_of_other_models_is_refused(tmp_path):
    evaluate(prepare(settings(tmp_path)), load=Loader())

    def others(configs):
        loaded = Loader()(configs)
        loaded[1].fingerprint = "another revision"
        return loaded

    with pytest.raises(EvaluationError, match="written by other models"):
        evaluate(prepare(settings(tmp_path)), load=others)


# ---------------------------------------------------------------------- failures


def questions(**texts: str) -> list[Question]:
    return [Question(task="t", item=item, context=text, params={"max_tokens": 40}) for item, text in texts.items()]


def test_question_that_does_not_fit_is_an_answer_that_failed(tmp_path):
    small = member(DRAFTER, {"1": "Two."}, max_context=120)
    contenders = contenders_of(plan_runs(preset("demo"), ["drafter"]), {0: small})
    found = answer_all(contenders, questions(a="x" * 500, b=prompt_of("1")), tmp_path)[DRAFTER]
    assert found["t", "a"].error == "ContextOverflowError"
    assert found["t", "b"].text == "Two."


def test_model_that_fails_ends_the_run_and_keeps_what_there_is(tmp_path):
    broken = member(DRAFTER, {"1": "Two.", "2": "Four, or so it seems to me."})
    forward, calls = broken.backend.forward, []

    def failing(feeds):
        calls.append(feeds)
        if len(calls) > 8:
            raise MemberError(DRAFTER, "out of memory")
        return forward(feeds)

    broken.backend.forward = failing
    contenders = contenders_of(plan_runs(preset("demo"), ["drafter"]), {0: broken})
    asked = questions(a=prompt_of("1"), b=prompt_of("2"))
    with pytest.raises(MemberError, match="out of memory"):
        answer_all(contenders, asked, tmp_path)
    broken.backend.forward = forward
    kept = (tmp_path / "answers" / f"{DRAFTER}.jsonl").read_bytes()
    assert kept.count(b"\n") == 1
    found = answer_all(contenders, asked, tmp_path)[DRAFTER]
    assert [answer.text for answer in found.values()] == ["Two.", "Four, or so it seems to me."]


def test_questions_of_other_parameters_are_decoded_apart(tmp_path):
    known = member(DRAFTER, {"1": "Two and no more."})
    contenders = contenders_of(plan_runs(preset("demo"), ["drafter"]), {0: known})
    asked = [
        Question(task="t", item=str(limit), context=prompt_of("1"), params={"max_tokens": limit}) for limit in (1, 2, 3)
    ]
    found = answer_all(contenders, asked, tmp_path)[DRAFTER]
    assert [answer.num_tokens for answer in found.values()] == [1, 2, 3]

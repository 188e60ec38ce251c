"""Advice from end to end, on scripted members; and once on the real demo models."""

from __future__ import annotations

import io
import json
import tomllib

import numpy as np
import pytest
from rich.console import Console

import safe_llm.evaluation
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.ensemble import Ensemble, load_members
from safe_llm.errors import ConfigError, ContextOverflowError, EvaluationError, MemberError, PromptError
from safe_llm.evaluation.advice import AGREEMENT_ITEMS, Advice, advice_as_dict, advise
from safe_llm.evaluation.advice_view import print_advice
from safe_llm.evaluation.agreement import Watching, agreement_of
from safe_llm.evaluation.boundaries import boundary_outcomes
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.ready import command_line, toml_text
from safe_llm.evaluation.tasks import task_named
from safe_llm.member import Member
from safe_llm.methods import GaC, UniTE
from safe_llm.testing import Opinion, answering, point_of, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, wordpiece
from safe_llm.vocabulary import Vocabulary

TASK = task_named("gsm8k")
ITEMS = [Item(id=str(n), question=f"What is {n} and 1850?", answer=str(n + 1850)) for n in range(10, 14)]
RIGHT = {TASK.prompt(item): f"The answer is \\boxed{{{item.answer}}}." for item in ITEMS}
WRONG = dict.fromkeys(RIGHT, "The answer is \\boxed{7}.")
LOOSE = {TASK.prompt(item): f"It is {item.answer}" for item in ITEMS}


def members(*scripts, kinds=(byte_level, metaspace, byte_level)) -> list[Member]:
    return [scripted_member(name, kind(), script) for name, kind, script in zip("abc", kinds, scripts, strict=False)]


# ---------------------------------------------------------------------- accuracy


def test_accuracies_are_those_of_each_member_alone():
    halves = {**WRONG, **dict(list(RIGHT.items())[:2])}
    advice = advise(members(RIGHT, halves, LOOSE), ITEMS, TASK)
    a, b, c = advice.measurements.accuracies
    assert [(one.member, one.num_right, one.num_strict, one.num_items) for one in (a, b, c)] == [
        ("a", 4, 4, 4),
        ("b", 2, 2, 4),
        ("c", 4, 0, 4),  # the right number, but not where it was asked for
    ]
    assert b.correct == {"10": True, "11": True, "12": False, "13": False}
    assert all(one.tokens_per_s > 0 for one in (a, b, c))
    assert (advice.task, advice.num_items, advice.max_tokens) == ("gsm8k", 4, TASK.max_tokens)


def test_limit_of_tokens_cuts_and_is_reported():
    advice = advise(members(RIGHT, RIGHT), ITEMS, TASK, max_tokens=2)
    assert [(one.num_cut, one.num_right) for one in advice.measurements.accuracies] == [(4, 0), (4, 0)]
    assert any("4 of 4 answers of a were cut" in warning for warning in advice.recommendation.warnings)


def test_strings_that_end_an_answer_of_the_task_end_it():
    """H03: a next question that the model makes up is neither read nor waited for."""
    made_up = {TASK.prompt(item): f"It is {item.answer}\nQ: What is 2 and 2?" for item in ITEMS}
    stopping = type(TASK)(name="t", title="T", file_name="t.jsonl", max_tokens=64, stop=("\nQ:",))
    advice = advise(members(made_up, made_up), ITEMS, stopping)
    assert [one.num_right for one in advice.measurements.accuracies] == [4, 4]


# ---------------------------------------------------------------------- agreement


def asking(prompts):
    return lambda ensemble: ensemble.generate(list(prompts), max_tokens=64)


def test_watching_keeps_the_drafters_own_answer_and_shows_what_the_ensemble_wanted():
    drafter, verifier = members(RIGHT, WRONG)
    watched = Ensemble([drafter, verifier], method=Watching(method=UniTE()))
    free = Ensemble([drafter, verifier])
    for prompt, answer in RIGHT.items():
        result, other = watched.generate(prompt), free.generate(prompt)
        assert result.text == answer
        assert other.points[0].position == result.points[0].position
        assert other.points[0].chosen == result.points[0].candidates[0].token


def test_watching_decides_as_the_method_that_it_watches():
    vocabulary = Vocabulary(characters([]))
    sure, torn = (
        point_of(
            [Opinion(vocabulary=vocabulary, probs=probs, own=b"a"), Opinion(vocabulary=vocabulary, probs={b"b": 0.9})]
        )
        for probs in ({b"a": 0.6}, {b"a": 0.4, b"b": 0.3})
    )
    for method in (GaC(), UniTE()):
        watching = Watching(method=method)
        assert watching.needs_dense == method.needs_dense
        for point in (sure, torn):
            assert watching.consensus(point, 0.5) == method.consensus(point, 0.5)
            assert watching.keeps_drafter(point) == method.keeps_drafter(point)
            assert watching.waits(point) == method.waits(point)
            assert watching.distribution(point, 1.0) == method.distribution(point, 1.0)
    assert Watching(method=UniTE()).merge(torn).chosen == b"a"
    assert Watching(method=UniTE()).merge(torn).candidates[0].token == UniTE().merge(torn).chosen == b"b"


@pytest.mark.parametrize("kinds", [(byte_level, metaspace), (metaspace, byte_level), (byte_level, wordpiece)])
def test_members_that_say_the_same_agree_wherever_they_can_be_asked(kinds):
    text = "In 1850 the census put 63,700 people there."
    said = dict.fromkeys(RIGHT, text)
    drafter, verifier = members(said, said, kinds=kinds)
    found = agreement_of(drafter, verifier, asking(said))
    outcomes = [None, *boundary_outcomes(drafter.vocabulary, verifier.vocabulary, text.encode())] * len(said)
    assert (found.drafter, found.verifier, found.num_answers) == ("a", "b", len(said))
    assert found.num_tokens == len(outcomes)
    assert found.num_c1 + found.num_c2 + found.num_ensembled + found.num_unchecked == found.num_tokens
    assert found.num_unchecked > 0
    if kinds == (byte_level, metaspace):  # others have texts where a round's last token is cut in another way
        assert found.num_unchecked == len(outcomes) - outcomes.count(None)
        assert (found.num_c2, found.num_ensembled, found.share(found.num_ensembled)) == (0, 0, 0.0)


def test_members_that_part_disagree_from_there_on():
    """'The answer is \\boxed{' is common; after it the verifier wants something else, and then to end."""
    drafter, verifier = members(RIGHT, WRONG, kinds=(byte_level, byte_level))
    [prompt, answer] = next(iter(RIGHT.items()))
    ends = [0, *drafter.vocabulary.encode(answer.encode()).ends]
    from_there = sum(end >= answer.index("{") + 1 for end in ends)
    found = agreement_of(drafter, verifier, asking([prompt]))
    assert (found.num_tokens, found.num_unchecked) == (len(ends), 0)
    assert found.num_ensembled == from_there - 1  # END: both want it, once the answer cannot be saved
    assert found.share(found.num_c1) == (len(ends) - from_there + 1) / len(ends)
    assert 0 < found.num_replaced <= found.num_ensembled


def test_consensus_by_mean_probability_is_told_apart():
    """The verifier likes another token a little more at every position, and the mean is over 1/2 all the same."""

    def torn(vocabulary):
        own = answering(vocabulary, RIGHT, peak=0.4)

        def next_logits(ids):
            logits = np.array(own(ids))
            logits[vocabulary.ids[b"Z"]] = np.log(0.5)
            return logits

        return next_logits

    found = agreement_of(*members(RIGHT, torn, kinds=(byte_level, byte_level)), asking(RIGHT))
    assert found.num_c2 == found.num_tokens > 0


def test_agreement_is_measured_on_some_of_many_items():
    items = [Item(id=str(n), question=f"What is {n}?", answer=str(n)) for n in range(AGREEMENT_ITEMS + 3)]
    answers = {TASK.prompt(item): item.answer for item in items}
    told: list[tuple[str, int, int]] = []
    advice = advise(members(answers, answers), items, TASK, progress=lambda *news: told.append(news))
    assert {one.num_answers for one in advice.measurements.agreements} == {AGREEMENT_ITEMS}
    assert [news for news in told if news[0] == "a alone"] == [("a alone", n, 19) for n in (8, 16, 19)]
    assert told[-1] == ("b with a", 16, 16)
    assert [title for title, done, total in told if done == total] == ["a alone", "b alone", "a with b", "b with a"]


# ---------------------------------------------------------------------- the text


def test_text_is_that_of_the_items_unless_one_is_given():
    solved = [
        Item(id="1", question="Two?", answer="2", solution="1 + 1 = 2"),
        Item(id="2", question="Ten?", answer="10"),
    ]
    both = members({TASK.prompt(item): item.answer for item in solved}, {})
    assert advise(both, solved, TASK).measurements.num_bytes == len(b"Two?\n\n1 + 1 = 2" + b"Ten?\n\n10")
    assert advise(both, solved, TASK, text="naïve").measurements.num_bytes == 6


def test_pairs_are_measured_once_and_roles_both_ways():
    found = advise(members(RIGHT, RIGHT, RIGHT), ITEMS, TASK, text="In 1850 there were 63,700.").measurements
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    roles = [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")]
    assert [(one.first, one.second) for one in found.overlaps] == pairs
    assert [(one.first, one.second) for one in found.numbers] == pairs
    assert [(one.drafter, one.verifier) for one in found.boundaries] == roles
    assert [(one.drafter, one.verifier) for one in found.agreements] == roles
    assert found.boundaries_between("a", "c").share == 1.0
    assert found.boundaries_between("a", "b").share < 1.0
    assert found.agreement_between("c", "a").num_ensembled == 0
    assert found.numbers_between("c", "a").share == 1.0
    assert found.without_template == ("a", "b", "c")


def test_members_without_full_rows_are_known():
    first, second = members(RIGHT, RIGHT)
    second.backend.has_dense_scores = False
    assert advise([first, second], ITEMS, TASK).measurements.without_dense == ("b",)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"members": 1}, ConfigError, "advice compares members, got 1"),
        ({"members": 0}, ConfigError, "advice compares members, got 0"),
        ({"items": []}, EvaluationError, "there are no items"),
        ({"text": ""}, ConfigError, "the text is empty"),
        ({"text": "a\ud83d"}, PromptError, "lone surrogate"),
        ({"max_tokens": 0}, ConfigError, "max_tokens must be a whole number at least 1"),
    ],
)
def test_bad_input_is_an_error(change, error, message):
    options = {"items": ITEMS, "task": TASK} | change
    chosen = members(RIGHT, RIGHT)[: options.pop("members", 2)]
    with pytest.raises(error, match=message):
        advise(chosen, **options)


def test_members_of_one_name_are_an_error():
    one = members(RIGHT)
    with pytest.raises(ConfigError, match="two members are called 'a'"):
        advise(one * 2, ITEMS, TASK)


def test_prompts_that_do_not_fit_are_found_before_anybody_answers():
    short = scripted_member("short", byte_level(), RIGHT, max_context=20)
    told: list[object] = []
    with pytest.raises(ContextOverflowError, match="for member 'short', whose context window is 20 tokens"):
        advise([*members(RIGHT), short], ITEMS, TASK, progress=lambda *news: told.append(news))
    assert told == []


def test_a_member_that_fails_is_named():
    def broken(vocabulary):
        return lambda ids: 1 / 0

    with pytest.raises(MemberError, match="member 'b'"):
        advise(members(RIGHT, broken), ITEMS, TASK)


def test_advice_is_exported():
    assert safe_llm.evaluation.advise is advise
    assert safe_llm.evaluation.Advice is Advice


# ---------------------------------------------------------------------- what is shown


def test_advice_as_dict_is_json_with_shares():
    advice = advise(members(RIGHT, WRONG), ITEMS, TASK)
    values = json.loads(json.dumps(advice_as_dict(advice)))
    found = values["measurements"]
    assert [(one["num_right"], one["num_items"]) for one in found["accuracies"]] == [(4, 4), (0, 4)]
    assert found["accuracies"][0]["interval"]["low"] == pytest.approx(0.5101, abs=5e-5)
    assert [one["share"] for one in found["boundaries"]] == [one.share for one in advice.measurements.boundaries]
    assert [one["share"] for one in found["numbers"]] == [one.share for one in advice.measurements.numbers]
    assert values["recommendation"]["drafter"] == "a"


def shown(advice: Advice, spec: EnsembleSpec) -> str:
    out = io.StringIO()
    print_advice(Console(file=out, width=120, markup=False, highlight=False, emoji=False), advice, spec)
    return out.getvalue()


def test_view_shows_every_number_and_the_recommendation():
    scripts = (RIGHT, RIGHT, WRONG)
    advice = advise(
        members(*scripts, kinds=(byte_level, metaspace, wordpiece)), ITEMS, TASK, text="NO No 12 " * 5, max_tokens=48
    )
    spec = EnsembleSpec(drafter=MemberConfig(model="a"), verifiers=(MemberConfig(model="b"),))
    text = shown(advice, spec)
    for part in (
        "Each member alone: task gsm8k, 4 items",
        "4 of 4  100.0%  51.0% to 100.0%",
        "Tokenizers, on 45 bytes of text",
        "One drafts, one verifies: on 4 answers of the drafter",
        "Not representable\n- c: bytes 0 to",
        "ranges more",
        "- c is left out: 0 of 4 right",
        "But\n- 4 items are too few to tell",
        command_line(spec),
        '[drafter]\nmodel = "a"',
    ):
        assert part in text
    for one in advice.measurements.boundaries:
        assert f"{one.share:.1%} of {one.num_ends}" in text


def test_view_takes_names_literally():
    hostile = "[bold]\x1b[2J:smile:"
    both = [scripted_member(name, byte_level(), RIGHT) for name in (hostile, "b")]
    text = shown(advise(both, ITEMS, TASK), EnsembleSpec(drafter=MemberConfig(model="b")))
    assert "[bold]\\x1b[2J:smile:" in text
    assert "\x1b" not in text


def test_members_after_the_26th_have_letters_of_their_own():
    from safe_llm.evaluation.advice_view import letter

    assert [letter(0), letter(25), letter(26), letter(27)] == ["A", "Z", "#27", "#28"]


# ---------------------------------------------------------------------- ready to use

SPECS = [
    EnsembleSpec(drafter=MemberConfig(model="demo")),
    EnsembleSpec(
        drafter=MemberConfig(model='./a b/"it\'s".gguf', device="cpu", dtype="float32"),
        verifiers=(MemberConfig(model="owner/é"), MemberConfig(model="c\\d\x7f\x01\n")),
        ensemble=EnsembleConfig(method="prefix-mass", weights=(90.0, 82.5, 1.0)),
    ),
    EnsembleSpec(
        drafter=MemberConfig(model="a", self_check=False, template_kwargs={"enable thinking": False, "n": [1, 2.5]}),
        sampling={"max_tokens": 5, "stop": ("x",)},
    ),
]


@pytest.mark.parametrize("spec", SPECS)
def test_toml_reads_back_as_the_same_ensemble(spec, tmp_path):
    path = tmp_path / "ensemble.toml"
    path.write_text(toml_text(spec), encoding="utf-8")
    assert "\n\n\n" not in toml_text(spec)
    assert tomllib.loads(toml_text(spec)).keys() == spec.model_dump(exclude_defaults=True).keys()
    assert EnsembleSpec.from_toml(path).model_dump(mode="json") == spec.model_dump(mode="json")


def test_command_line_is_what_a_shell_takes():
    assert command_line(SPECS[0]) == "safe-llm generate --drafter demo PROMPT"
    import shlex

    words = shlex.split(command_line(SPECS[1]))
    assert words[:8] == [
        *("safe-llm", "generate", "--drafter", './a b/"it\'s".gguf'),
        *("--verifier", "owner/é", "--verifier", "c\\d\x7f\x01\n"),
    ]
    assert words[8:] == [
        *("--dtype", "float32", "--device", "cpu", "--method", "prefix-mass", "--weights", "90,82.5,1", "PROMPT")
    ]


# ---------------------------------------------------------------------- the real thing


@pytest.mark.demo
def test_advice_on_the_demo_models():
    names = ("qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct")
    loaded = load_members([MemberConfig(model=name) for name in names], progress=False)
    advice = advise(loaded, ITEMS[:2], TASK, max_tokens=24)
    found = advice.measurements
    assert [one.num_items for one in found.accuracies] == [2, 2]
    assert found.overlaps[0].num_shared > 30_000
    assert found.numbers[0].share == 1.0  # both cut digit by digit
    for one in found.agreements:
        counts = (one.num_c1, one.num_c2, one.num_ensembled, one.num_unchecked)
        assert sum(counts) == one.num_tokens > 0
        assert one.num_c1 > 0
    assert {advice.recommendation.drafter, *advice.recommendation.verifiers, *advice.recommendation.refused} == {*names}

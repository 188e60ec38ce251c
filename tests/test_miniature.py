"""The experiment in benchmarks/miniature: its problems, its ablations, its table; training is run for a few steps."""

import itertools
import json
import random
import re

import pytest

import answer as answering
import corpus
import grid
import table
import train
from safe_llm.events import Outcome
from safe_llm.methods import UniTE
from safe_llm.testing import MethodConformance, scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace

SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_worked_answers_are_right(kind):
    r = random.Random(3)
    for _ in range(300):
        problem = corpus.problem(r, kind)
        results = [int(result) for *_, result in SUM.findall(problem.steps)]
        for left, sign, right, result in SUM.findall(problem.steps):
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert int(result) == (exact[sign] if sign in exact else int(left) / int(right))
        assert problem.answer == results[-1] >= 0
        assert answering.is_right(problem.worked, problem)


def test_held_out_problems_are_distinct_and_of_every_kind_in_turn():
    problems = corpus.held_out(60)
    assert len({p.question for p in problems}) == 60
    assert [p.kind for p in problems] == list(itertools.islice(itertools.cycle(corpus.KINDS), 60))
    assert corpus.held_out(30) == problems[:30]


def test_training_never_sees_a_held_out_problem():
    seen = next(corpus.stream(1, [1.0] * 6))
    after = next(corpus.stream(1, [1.0] * 6, frozenset([seen.question])))
    assert after.question != seen.question


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 2 + 3 = 5 apples. The answer is 5.", True),
        (" The answer is 4. The answer is 5.", True),
        (" The answer is 5. The answer is 4.", False),
        (" The answer is 51.", False),
        (" The answer is 5", False),
        ("", False),
    ],
)
def test_last_number_that_is_named_as_the_answer_counts(text, right):
    problem = corpus.Problem("add", "?", "2 + 3 = 5 apples.", 5)
    assert answering.is_right(text, problem) is right


@pytest.mark.parametrize("name", train.RECIPES)
def test_tokenizers_cut_numbers_as_the_regimes_say(name):
    tokenizer = train.make_tokenizer(train.RECIPES[name])
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(" has 31 + 19 = 50 apples.")["input_ids"])
    digits = [piece for piece in pieces if any(sign.isdigit() for sign in piece)]
    assert all(len(piece) == 1 for piece in digits) is (name != "a")


class TestNoBoundaries(MethodConformance):
    def make_method(self):
        return grid.NoBoundaries(UniTE())


def test_grid_is_complete_and_has_no_row_twice():
    keys = [contender.key for contender in grid.contenders()]
    assert len(keys) == len(set(keys))
    for regime, first in grid.REGIMES.items():
        for members in (f"{first}b", f"b{first}", f"{first}bc"):
            for method in grid.METHODS:
                assert f"{regime} | {members} | SAFE, {method}" in keys


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    folder = tmp_path_factory.mktemp("miniature")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(train, "SEQUENCES", 1)
    for name in train.RECIPES:
        train.train(name, seed=1, steps=2, folder=folder / name)
    monkeypatch.undo()
    return answering.load(folder, list(train.RECIPES))


@pytest.fixture(scope="module")
def knowing():
    """Two members that cut text differently and know the answers."""
    known = {corpus.prompt(p.question): p.worked for p in corpus.held_out(2)}
    return {"a": scripted_member("a", byte_level(), known), "b": scripted_member("b", metaspace(), known)}


def answered(members, without, **options):
    contender = grid.Contender(regime="differently", members="ab", label="x", options=options, without=without)
    return answering.answer(contender, members, corpus.held_out(2))


def test_contenders_answer_with_members_that_were_hardly_trained(members, monkeypatch):
    monkeypatch.setattr(answering, "MAX_TOKENS", 4)
    problems = corpus.held_out(1)
    for contender in list(grid.contenders())[::6]:
        result = answering.answer(contender, members, problems)
        assert len(result["right"]) == 1
        assert result["tokens"] > 0
        assert result["outcomes"]


def test_without_the_consensus_check_every_boundary_is_an_ensemble_point(knowing):
    agreed = answered(knowing, "")
    assert (agreed["right"], agreed["ensembled"]) == ("11", 0)
    assert str(Outcome.C1) in agreed["outcomes"]
    outcomes = answered(knowing, "consensus")["outcomes"]
    assert str(Outcome.CONFIRMED) in outcomes
    assert outcomes.keys() <= {str(Outcome.CONFIRMED), str(Outcome.REPLACED), str(Outcome.OOV_LIKE)}


def test_without_the_boundary_check_agreement_is_looked_for_at_every_token(knowing):
    outcomes = answered(knowing, "boundary", mode="every-token")["outcomes"]
    assert str(Outcome.OOV_LIKE) in answered(knowing, "")["outcomes"]
    assert str(Outcome.OOV_LIKE) not in outcomes
    assert outcomes[Outcome.GATE] > 0


def results(tmp_path, bits):
    files = []
    for number, seed in enumerate(bits):
        file = tmp_path / f"seed{number}.json"
        for key, right in seed.items():
            answering.keep(file, key, {"right": right, "tokens": 10, "ensembled": 2, "replaced": 1, "outcomes": {}})
        files.append(file)
    return table.Results(files)


def test_table_has_paired_differences_to_the_best_member(tmp_path):
    keys = {
        "alike | d | alone": "110000" * 20,
        "alike | b | alone": "100000" * 20,
        "alike | db | SAFE, GaC": "111000" * 20,
    }
    found = results(tmp_path, [keys, keys])
    text = table.markdown(found)
    row = next(line for line in text.splitlines() if line.startswith("| SAFE, GaC"))
    assert "| 50.0 (" in row
    assert "| +16.7 (+" in row
    assert "| 100 100 100 0 0 0 | 20.0 | 10.0 |" in row
    assert found.best_member(grid.Contender(regime="alike", members="db", label="")) == "alike | d | alone"
    low, high = found.interval(found.bits("alike | d | alone").mean(axis=0))
    assert low < 1 / 3 < high


def test_kept_results_are_added_to(tmp_path):
    file = tmp_path / "seed1.json"
    answering.keep(file, "one", {"right": "1"})
    answering.keep(file, "two", {"right": "0"})
    assert json.loads(file.read_text("utf-8")) == {"one": {"right": "1"}, "two": {"right": "0"}}

from __future__ import annotations

import importlib.util
import io
import logging
import sys
import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_llm.errors import ConfigError, EvaluationError
from safe_llm.evaluation import math_process, math_worker
from safe_llm.evaluation.extraction import (
    boxed,
    last_formula,
    loose_letter,
    loose_number,
    loose_option,
    number_value,
    stated_letter,
    stated_number,
    stated_option,
    stated_text,
)
from safe_llm.evaluation.math_process import MathProcess
from safe_llm.evaluation.mathematics import normalized, same_answer

# ---------------------------------------------------------------------- numbers

whole = st.integers(min_value=0, max_value=10**12)
places = st.integers(min_value=0, max_value=4)


@st.composite
def written_numbers(draw):
    """A number as a model may write it, with what it is worth."""
    number, after, separator = draw(whole), draw(places), draw(st.sampled_from(["", ",", " ", "{,}", ",\\!", "\u202f"]))
    text = f"{number:,}".replace(",", separator)
    value = Fraction(number)
    if after:
        decimals = draw(st.integers(0, 10**after - 1))
        text += f".{decimals:0{after}}"
        value += Fraction(decimals, 10**after)
    sign, currency = draw(st.sampled_from(["", "-", "\u2212"])), draw(st.sampled_from(["", "$", "\\$", "€"]))
    text = sign + currency + text + draw(st.sampled_from(["", "%", "\\%", " %"]))
    return text, -value if sign else value


@given(written_numbers())
def test_number_comes_back_however_it_is_written(number):  # H02
    text, value = number
    assert number_value(text) == value


@given(written_numbers(), st.sampled_from(["That makes {} in all.", "The answer is {}.", "\\boxed{{{}}}", "#### {}\n"]))
def test_number_comes_back_out_of_a_text(number, sentence):  # H01, H02
    text, value = number
    found = loose_number("First 3 of 12. " + sentence.format(text))
    assert found is not None
    assert number_value(found) == value
    if "That" not in sentence:
        assert stated_number("The answer is 3. " + sentence.format(text)) == found  # H03


@given(st.fractions(max_denominator=10**6))
def test_fraction_comes_back(value):
    assert number_value(f"{value.numerator}/{value.denominator}") == value


@given(st.text())
def test_extraction_takes_any_text(text):
    for found in (stated_number(text), loose_number(text)):
        assert found is None or number_value(found) is not None or "/" in found
    boxed(text), stated_text(text), last_formula(text), normalized(text)
    assert stated_letter(text, "AB") in {None, "A", "B"}
    assert loose_letter(text, "AB", ["x", "y"]) in {None, "A", "B"}
    assert stated_option(text, ["Yes", "No"]) in {None, "Yes", "No"}
    assert loose_option(text, ["Yes", "No"]) in {None, "Yes", "No"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$29.00.", 29),
        (".5", Fraction(1, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("-\\dfrac{1}{2}", Fraction(-1, 2)),
        ("$-5", -5),
        ("1,00,000", 100_000),
        ("1/0", None),
        ("1 1/0", None),
        ("1/2/3", None),
        ("12:30", None),
        ("3rd", None),
        ("five", None),
        ("", None),
        ("9" * 101, None),
    ],
)
def test_number_value(text, value):
    assert number_value(text) == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10-5", "5"),
        ("it is (-5)", "-5"),
        ("1,2,3", "3"),
        ("5 of CO2, on the 4th", "5"),
        ("3.1.4", "3.1"),
        ("none", None),
    ],
)
def test_loose_number_is_the_last(text, found):
    assert loose_number(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 12 + 6 = 18 eggs, not 20.", "18"),
        ("The answer is\n\n$$\n72\n$$ and 3", "72"),
        ("The answer is: **$1,200**. Or 3", "$1,200"),
        ("The answer is \\boxed{}, 3", "3"),
        ("#### \n5", None),
        ("Final: 5", None),
    ],
)
def test_stated_number_stands_where_it_was_asked_for(text, found):
    assert stated_number(text) == found


# ---------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\[ \\boxed{42} \\]", "42"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed {1} then \\fbox{2}", "2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{x > \\}} + 1}", "x > \\}"),
        ("\\boxed{1 \\\\}", "1 \\\\"),
        ("} {\\boxed{1}", "1"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{1}, as asked in \\boxed{}", "1"),
        ("\\boxed{1", None),
        ("boxed{1}", None),
    ],
)
def test_boxed_is_the_last_balanced_one(text, found):  # H10
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\(x = 5\\).", "5"),
        ("$a$ or $$b = c$$", "c"),
        ("\\[x+1\\] costs \\$5", "x+1"),
        ("$x=$", None),
        ("no", None),
    ],
)
def test_last_formula_ends_at_its_right_side(text, found):
    assert last_formula(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [("The answer is 4 cm. Good.", "4 cm"), ("answer is: 0.5", "0.5"), ("The answer is ", None), ("It is 4", None)],
)
def test_stated_text_is_the_sentence(text, found):
    assert stated_text(text) == found


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(2,4)", "(2, 4)"),  # H09
        ("\\left[2,5\\right)", "[2,5)"),  # H09
        ("\\begin{bmatrix}-1&0\\\\0&-1\\end{bmatrix}", "\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}"),  # H09
        ("\\dfrac{9}{7}", "\\frac97"),  # H10
        ("\\frac{1}7", "\\frac1{7}"),
        ("10,080", "10,\\!080"),
        ("10 080", "10080"),
        ("\\$32,348.00", "32348"),
        ("9/5", "1\\frac{4}{5}"),
        ("52_{8}", "52_8"),
        ("52", "52_8"),
        ("145", "145^\\circ"),
        ("\\frac{270}{7}^{\\circ}", "\\frac{270}7\\text{ degrees}"),
        ("8\\text{ cm}^2", "8"),
        ("evelyn", "\\text{Evelyn}"),
        ("B", "\\text{(B)}"),
        ("x \\in (5,\\infty)", "(5,\\infty)"),
        ("y=-2x", "-2x"),
        # from here on math-verify is asked
        ("9i+6", "6+9i"),
        ("\\frac{1}{\\sqrt3}", "\\frac{\\sqrt{3}}{3}"),
        ("7,5,3", "3, 5, 7"),
        ("(9,36)\\cup(0,9)", "(0,9) \\cup (9,36)"),
    ],
)
def test_same_answer_is_the_same_however_it_is_written(answer, gold):
    assert same_answer(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("[2,4]", "(2,4)"),
        ("2,4", "(2,4)"),
        ("(4,2)", "(2,4)"),
        ("(2,5)", "(2,4)"),
        ("1 2", "12"),
        ("1,2", "12"),
        ("52_9", "52_8"),
        ("53", "52_8"),
        ("0.333333", "\\frac{1}{3}"),  # which math-verify takes for the same
        ("6-9i", "6+9i"),
        ("1+\\sqrt{19}", "1 \\pm \\sqrt{19}"),
        ("x^2", "x^3"),
        ("odd", "\\text{even}"),
        ("", "5"),
        ("\\text{}", ""),
        ("\\text{}", "(2,4)"),
        ("x" * 500, "y"),
        ("5", "The answer is \\boxed{5}"),
    ],
)
def test_other_answer_is_not_the_same(answer, gold):
    assert not same_answer(answer, gold)


# ---------------------------------------------------------------------- math-verify's process


@pytest.fixture
def process():
    process = MathProcess(limit_s=1.0)
    yield process
    process.close()


def test_math_process_outlives_an_answer_that_cannot_be_computed(process):
    assert not process.same("9^{9^{9^{9}}}", "5")
    assert process.same("a+b", "b+a")


def test_math_process_outlives_its_own_end(process):
    assert process.same("a+b", "b+a")
    process._child.process.kill()
    process._child.process.wait()
    assert not process.same("a+b", "b+a")
    assert process.same("a+b", "b+a")


def test_math_process_serves_other_threads(process):
    said = []
    threads = [threading.Thread(target=lambda: said.append(process.same("a+b", "b+a"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [True, True, True]


def test_math_process_without_math_verify_names_the_extra(process, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "safe-llm-ensemble\[eval\]"'):
        process.same("a", "b")


def test_math_process_that_does_not_start_is_an_error(process, monkeypatch):
    monkeypatch.setattr(math_process, "COMMAND", ("-c", "pass"))
    with pytest.raises(EvaluationError, match="did not start"):
        process.same("a", "b")
    monkeypatch.setattr(math_process, "COMMAND", ("-c", "input()"))
    monkeypatch.setattr(math_process, "START_LIMIT_S", 0.1)
    with pytest.raises(EvaluationError, match="did not start"):
        process.same("a", "b")


def test_math_worker_says_false_for_what_it_cannot_read():
    assert math_worker.same("b + a", "a + b")
    assert not math_worker.same("b + a", "a + c")
    assert not math_worker.same("", "a")


@pytest.mark.parametrize(("most", "limit"), [(-1, math_worker.MEMORY_LIMIT_BYTES), (10**9, 10**9)])
def test_math_worker_answers_line_by_line_within_its_memory(monkeypatch, capsys, most, limit):
    resource = pytest.importorskip("resource")
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (most, most))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    monkeypatch.setattr(logging, "disable", lambda level: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "stdin", io.StringIO('["b+a", "a+b"]\n["b", "a"]\n'))
    math_worker.main()
    assert capsys.readouterr().out.splitlines() == ["ready", "true", "false"]
    assert limits == [(limit, most)]
    monkeypatch.setattr(sys, "platform", "darwin")
    math_worker.main()
    assert len(limits) == 1


# ---------------------------------------------------------------------- letters and words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is (B).", "B"),
        ("The answer is: **(B)** that", "B"),
        ("The answer is B because it is", "B"),
        ("the answer is option C.", "C"),
        ("The answer is \\boxed{\\text{D}}.", "D"),
        ("The answer is (A). Wait. The answer is (C).", "C"),
        ("The answer is (B). The answer is unknown.", "B"),
        ("The answer is a good conductor.", None),
        ("The answer is A good conductor.", None),
        ("The answer is (A) good conductors.", "A"),
        ("The answer is A.", "A"),
        ("The answer is (E).", None),
        ("The answer is Because of it", None),
        ("Answer: B", None),
    ],
)
def test_stated_letter(text, found):
    assert stated_letter(text, "ABCD") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: B", "B"),
        ("I rule out option A. Option C", "C"),
        ("B is the correct one", "B"),
        ("(A) no\n\nB.", "B"),
        ("The answer is a copper wire.", "D"),
        ("The answer is glass", "C"),
        ("not (a), rather (c)", "C"),
        ("It is **D**", "D"),
        ("B) wool", "B"),
        ("A) no\nB) no", None),
        ("E is correct. (F)", None),
    ],
)
def test_loose_letter(text, found):
    assert loose_letter(text, "ABCD", ["wood", "wool", "glass", "A copper wire"]) == found


@pytest.mark.parametrize(
    ("text", "stated", "loose"),
    [
        ("So the answer is Yes.", "Yes", "Yes"),
        ("The answer is no", "No", None),
        ("The answer is \\boxed{Yes}", "Yes", "Yes"),
        ("The answer is not Yes", None, None),
        ("There is no way. Yes", None, "Yes"),
        ("Yes? NO!", None, "No"),
        ("Yes-men", None, None),
    ],
)
def test_options_that_are_words(text, stated, loose):
    assert (stated_option(text, ["Yes", "No"]), loose_option(text, ["Yes", "No"])) == (stated, loose)

r"""Whether two mathematical answers are the same: as strings first, then as numbers, then by math-verify.

Strings come first, since a computer algebra system does not read everything that is written as an answer.
"""

from __future__ import annotations

import re

from safe_llm.evaluation.extraction import number_value
from safe_llm.evaluation.math_process import same_by_math_verify

__all__ = ["normalized", "same_answer"]

MAX_CHARACTERS = 400
"""Longer expressions are compared as strings only."""

_TEXT = r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_STEPS = (
    (re.compile(r"\\(?:left|right|displaystyle|limits|big|Big|bigg|Bigg)(?![A-Za-z])|(?<!\\)\\[!,;: ]|~"), ""),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\[$%]|[$%]"), ""),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{bmatrix\}"), "{pmatrix}"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<=\S)\s*" + _TEXT + r"(?:\^\{?\d\}?)?\s*\.?$"), ""),  # a unit
    (re.compile(_TEXT), r"\1"),
    (re.compile(r"_\{(\w+)\}"), r"_\1"),
    (re.compile(r"(?<!\d)\s+|\s+(?!\d)"), ""),  # between digits it is a thousands separator, or none
    (re.compile(r"^[A-Za-z](?:\([a-z]\))?(?:=|\\in(?![a-z]))"), ""),
    (re.compile(r"\.$"), ""),
    (re.compile(r"(?<![\d])\.(?=\d)"), "0."),
    (re.compile(r"^\(([A-Za-z])\)$"), r"\1"),
)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")
_WORD = re.compile(r"[A-Za-z]{2,}")
_LIST_IN_BRACKETS = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_SOLUTION = re.compile(r"\\f?boxed|(?:\b[A-Za-z']{2,}\s+){8}")
_IN_BASE = re.compile(r"(\w+?)(?:_(\d+))?")


def normalized(answer: str) -> str:
    """Return an answer without what does not change it: spaces, units, sizes of brackets, spellings of a fraction."""
    for pattern, replacement in _STEPS:
        answer = pattern.sub(replacement, answer)
    if _THOUSANDS.fullmatch(answer):
        return re.sub("[, ]", "", answer)
    return answer.lower() if _WORD.fullmatch(answer) else answer


def same_answer(answer: str, gold: str) -> bool:
    r"""Say whether an answer is the gold one.

    No answer is a gold one that is a whole solution (it has a \boxed{}, or eight words in a row).

    Raises:
        ConfigError: math-verify is needed and not installed.
    """
    if _SOLUTION.search(gold):
        return False
    ours, golden = normalized(answer), normalized(gold)
    if ours == golden:
        return bool(ours)
    if not ours or not golden:
        return False
    values = number_value(ours), number_value(golden)
    if None not in values:
        return values[0] == values[1]
    if "_" in golden and (base := _IN_BASE.fullmatch(golden)):
        return ours == base[1]  # the base was asked for, so it may be left out; another base is another number
    if _LIST_IN_BRACKETS.fullmatch(golden) and (ours[0], ours[-1]) != (golden[0], golden[-1]):
        return False  # a point is no interval and no list, whatever it is read as
    if max(len(ours), len(golden)) > MAX_CHARACTERS:
        return False
    return same_by_math_verify(ours, golden)

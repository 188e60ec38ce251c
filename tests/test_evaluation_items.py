from __future__ import annotations

import json
import re

import pytest

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.items import Item, items_fingerprint, load_items

GOOD = {"id": "1", "question": "1 + 1?", "answer": "2"}
CHOICE = {"id": "2", "question": "Which?", "choices": ["this", "that"], "answer": "B"}


def write(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_items_come_as_the_file_has_them(tmp_path):
    full = {**GOOD, "id": "3", "subject": "sums", "solution": "1 + 1 = 2\u2028#### 2"}
    path = write(tmp_path / "data.jsonl", "\ufeff" + json.dumps(GOOD), "", CHOICE, "  ", full, "")
    assert load_items(path) == [
        Item(id="1", question="1 + 1?", answer="2"),
        Item(id="2", question="Which?", answer="B", choices=("this", "that")),
        Item(id="3", question="1 + 1?", answer="2", subject="sums", solution="1 + 1 = 2\u2028#### 2"),
    ]


def test_choices_may_be_numbered_filled_up_and_lost(tmp_path):
    numbered = {**CHOICE, "answer": "1"}
    padded = {**CHOICE, "id": "3", "choices": ["this", "that", " ", ""]}
    lost = {**CHOICE, "id": "4", "choices": ["", "", "", ""], "answer": "4"}
    items = load_items(write(tmp_path / "data.jsonl", numbered, padded, lost))
    assert [(item.answer, item.letters, item.is_answerable) for item in items] == [
        ("A", "AB", True),
        ("B", "AB", True),
        ("D", "ABCD", False),
    ]
    assert load_items(write(tmp_path / "data.jsonl", GOOD))[0].is_answerable


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is no JSON object: Expecting property name"),
        ("[1]", "line 2: it is no JSON object: it is no object but list"),
        ('{"id": NaN}', "line 2: it is no JSON object: NaN is no JSON"),
        ("[" * 100_000, "line 2: it is no JSON object: it is nested too deeply"),
        ({"id": "2", "question": "?"}, "line 2: field answer: it is missing"),
        ({**GOOD, "id": 2}, "line 2: field id: Input should be a valid string, got int"),
        ({**GOOD, "id": "2", "answer": None}, "line 2: field answer: Input should be a valid string, got NoneType"),
        ({**GOOD, "id": "2", "anwser": "2"}, "line 2: field 'anwser' is not known (did you mean 'answer'?)"),
        ({**GOOD, "id": "2", "zzz": "2"}, "line 2: field 'zzz' is not known (known: id, question, answer"),
        (GOOD, "line 2: field id: line 1 has the same id"),
        ({**GOOD, "id": "2", "question": " \n"}, "line 2: field question: it is empty"),
        ({**GOOD, "id": "2", "solution": ""}, "line 2: field solution: it is empty"),
        ({**GOOD, "id": "2", "question": "\ud800"}, "line 2: field question: it has half of a surrogate pair"),
        ({**CHOICE, "choices": ["a", "\udfff"]}, "line 2: field choices.1: it has half of a surrogate pair"),
        ({**CHOICE, "choices": ["a", 2]}, "line 2: field choices.1: Input should be a valid string, got int"),
        ({**CHOICE, "choices": "ab"}, "line 2: field choices: Input should be a valid tuple, got str"),
        ({**CHOICE, "choices": ["a", "", "c"]}, "line 2: field choices.1: it is empty"),
        ({**CHOICE, "choices": ["a"]}, "line 2: field choices: expected 2 to 26 of them, got 1"),
        ({**CHOICE, "choices": ["a"] * 27}, "line 2: field choices: expected 2 to 26 of them, got 27"),
        ({**CHOICE, "answer": "C"}, "line 2: field answer: expected a letter from A to B"),
        ({**CHOICE, "answer": "AB"}, "line 2: field answer: expected a letter from A to B"),
        ({**CHOICE, "answer": "3"}, "line 2: field answer: expected a letter from A to B"),
        ({**CHOICE, "answer": "that"}, "line 2: field answer: expected a letter from A to B"),
    ],
)
def test_bad_line_is_named_by_file_line_and_field(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", GOOD, line)
    with pytest.raises(EvaluationError, match="^" + re.escape(f"{path!r}: {message}")):
        load_items(path)


def test_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(EvaluationError, match=r"none\.jsonl': No such file or directory \(a data file is"):
        load_items(tmp_path / "none.jsonl")
    with pytest.raises(EvaluationError, match=r"Is a directory$"):
        load_items(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(EvaluationError, match=r"latin\.jsonl': line 1: it is not UTF-8"):
        load_items(tmp_path / "latin.jsonl")
    with pytest.raises(EvaluationError, match=r"empty\.jsonl': it has no items"):
        load_items(write(tmp_path / "empty.jsonl", "", " "))


def test_errors_hold_no_text_of_the_items(tmp_path):
    secret = {**CHOICE, "question": "SECRET", "choices": ["SECRET", "x"], "answer": "SECRET"}
    with pytest.raises(EvaluationError) as caught:
        load_items(write(tmp_path / "data.jsonl", secret))
    assert "SECRET" not in str(caught.value)


def test_fingerprint_tells_sets_apart():
    one, other = Item(id="1", question="?", answer="2"), Item(id="2", question="?", answer="2")
    prints = [
        items_fingerprint(items)
        for items in ([one], [other], [one, other], [other, one], [Item(id="1", question="?", answer="3")], [])
    ]
    assert len(set(prints)) == len(prints)
    assert items_fingerprint([one]) == prints[0]
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in prints)

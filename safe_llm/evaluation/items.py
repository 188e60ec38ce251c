"""The questions of an evaluation: one JSON object a line, checked when it is read."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from pydantic import TypeAdapter, ValidationError

from safe_llm.errors import EvaluationError
from safe_llm.trace.lines import parsed

__all__ = ["Item", "items_fingerprint", "load_items"]

_FORMAT = (
    'one JSON object a line, like {"id": "1", "question": "...", "answer": "..."}; docs/evaluation.md has the fields'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question with its gold answer.

    Attributes:
        id: Its name; no two items of a file share one.
        question: What is asked.
        answer: The gold answer alone, never the whole solution; of a choice question the letter.
        choices: What there is to choose from, A first; none where the answer is free.
        subject: What it is about, for tasks whose prompt depends on it.
        solution: A worked solution that ends in the answer, if there is one.
    """

    id: str
    question: str
    answer: str
    choices: tuple[str, ...] = ()
    subject: str | None = None
    solution: str | None = None

    @property
    def letters(self) -> str:
        """The letters of the choices."""
        return ascii_uppercase[: len(self.choices)]

    @property
    def is_answerable(self) -> bool:
        """Whether there is something to choose from: sets exist that lost the texts of all choices of a question."""
        return not self.choices or any(self.choices)


_ITEM = TypeAdapter(Item)
_FIELDS = tuple(field.name for field in fields(Item))


def load_items(path: str | Path) -> list[Item]:
    """Read a data file; blank lines are left out.

    An answer "2" to a choice question becomes "B", and choices without text at the end are dropped: some sets number
    the choices of some questions, and fill up where there are fewer.

    Raises:
        EvaluationError: It cannot be read, has no items, or one is not as it must be; names the file, line and field.
    """
    try:
        with open(path, "rb") as file:
            items = list(_items(file))
    except OSError as error:
        hint = "" if Path(path).exists() else "a data file is JSON Lines; docs/evaluation.md says which there are"
        raise EvaluationError(f"cannot read the data file {str(path)!r}: {error.strerror}", hint=hint) from None
    except EvaluationError as error:
        raise EvaluationError(f"{str(path)!r}: {error.args[0]}", hint=error.hint) from None
    if not items:
        raise EvaluationError(f"{str(path)!r}: it has no items", hint=_FORMAT)
    return items


def items_fingerprint(items: Iterable[Item]) -> str:
    """Return 16 hexadecimal digits that tell one set of items, in its order, from another."""
    text = json.dumps([astuple(item) for item in items], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _items(lines: Iterable[bytes]) -> Iterator[Item]:
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _item(_object(line))
            if item.id in seen:
                raise EvaluationError(f"field id: line {seen[item.id]} has the same id")
        except EvaluationError as error:
            raise EvaluationError(f"line {number}: {error.args[0]}", hint=error.hint) from None
        seen[item.id] = number
        yield item


def _object(line: bytes) -> dict[str, Any]:
    try:
        return parsed(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise EvaluationError("it is not UTF-8") from None
    except ValueError as error:
        reason = str(error).partition(": line ")[0]  # without json's position, which counts from this line
        raise EvaluationError(f"it is no JSON object: {reason}", hint=_FORMAT) from None


def _item(values: Mapping[str, Any]) -> Item:
    for name in values:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            raise EvaluationError(
                f"field {name!r} is not known",
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_FIELDS)}",
            )
    try:
        item = _ITEM.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise EvaluationError(f"field {where}: it is missing", hint=_FORMAT) from None
        raise EvaluationError(f"field {where}: {first['msg']}, got {type(first['input']).__name__}") from None
    _check_text(item)
    return _lettered(item) if item.choices else item


def _check_text(item: Item) -> None:
    """Refuse text that says nothing or that no model can be asked, being no Unicode text."""
    texts = {name: getattr(item, name) for name in _FIELDS if name != "choices"}
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise EvaluationError(f"field {name}: it is empty")
    texts |= {f"choices.{number}": text for number, text in enumerate(item.choices)}
    for name, text in texts.items():
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise EvaluationError(f"field {name}: it has half of a surrogate pair, which is no character") from None


def _lettered(item: Item) -> Item:
    texts = tuple(choice.strip() for choice in item.choices)
    if any(texts):
        while not texts[-1]:
            texts = texts[:-1]
        if not all(texts):
            raise EvaluationError(f"field choices.{texts.index('')}: it is empty")
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise EvaluationError(f"field choices: expected 2 to {len(ascii_uppercase)} of them, got {len(texts)}")
    item = replace(item, choices=texts)
    numbers = {str(number): letter for number, letter in enumerate(item.letters, 1)}
    answer = numbers.get(item.answer, item.answer)
    if answer not in tuple(item.letters):
        raise EvaluationError(f"field answer: expected a letter from A to {item.letters[-1]}, the last choice's")
    return replace(item, answer=answer)

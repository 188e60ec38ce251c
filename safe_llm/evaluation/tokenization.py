"""How members cut a text, from their tokenizers alone: shared tokens, numbers cut alike, what cannot be spelled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from safe_llm.vocabulary import NOT_EXACT, Pieces, Vocabulary

__all__ = ["Numbers", "Overlap", "Reading", "Unspelled", "inexact_spans", "numbers_of", "overlap_of", "unspelled_by"]

_NUMBER = re.compile(rb"[0-9]{2,}")


class Reading(Protocol):
    """A member as far as its tokenizer goes; a `Member` is one."""

    @property
    def name(self) -> str:
        """As errors and traces call it."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """What its ids mean."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How many different tokens (byte strings) two vocabularies share, and which part of each that is."""

    first: str
    second: str
    num_shared: int
    part_of_first: float
    part_of_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Whether two members cut numbers alike.

    Attributes:
        first: One member.
        second: The other.
        num_numbers: Numbers of two or more digits in the texts.
        num_alike: Those before, inside and after which both have the same token boundaries.
    """

    first: str
    second: str
    num_numbers: int
    num_alike: int

    @property
    def share(self) -> float:
        """Numbers cut alike over all; 1 without any."""
        return self.num_alike / self.num_numbers if self.num_numbers else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unspelled:
    """What one member cannot represent.

    Attributes:
        member: Its name.
        num_bytes: How many bytes of the texts.
        spans: Where they are: number of the text, first byte, byte after the last.
    """

    member: str
    num_bytes: int
    spans: tuple[tuple[int, int, int], ...]


def overlap_of(first: Reading, second: Reading) -> Overlap:
    """Count the tokens that two vocabularies share byte by byte."""
    shared = len(first.vocabulary.ids.keys() & second.vocabulary.ids.keys())
    return Overlap(
        first=first.name,
        second=second.name,
        num_shared=shared,
        part_of_first=shared / len(first.vocabulary.ids),
        part_of_second=shared / len(second.vocabulary.ids),
    )


def numbers_of(first: Reading, second: Reading, texts: Sequence[bytes]) -> Numbers:
    """Count the numbers in the texts that two members cut alike."""
    num_numbers = num_alike = 0
    for data in texts:
        one, other = ({0, *member.vocabulary.encode(data).ends} for member in (first, second))
        for match in _NUMBER.finditer(data):
            places = range(match.start(), match.end() + 1)
            num_numbers += 1
            num_alike += one.intersection(places) == other.intersection(places)
    return Numbers(first=first.name, second=second.name, num_numbers=num_numbers, num_alike=num_alike)


def unspelled_by(member: Reading, texts: Sequence[bytes]) -> Unspelled:
    """Find the byte ranges of the texts that a member cannot represent."""
    spans = tuple(
        (number, start, end)
        for number, data in enumerate(texts)
        for start, end in inexact_spans(member.vocabulary, member.vocabulary.encode(data), len(data))
    )
    return Unspelled(member=member.name, num_bytes=sum(end - start for _, start, end in spans), spans=spans)


def inexact_spans(vocabulary: Vocabulary, pieces: Pieces, num_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges of a text of `num_bytes` bytes that its tokens do not spell."""
    spans, done = [], 0
    exact = [
        (end - len(vocabulary.surface(token_id)), end)
        for token_id, end in zip(pieces.ids, pieces.ends, strict=True)
        if end != NOT_EXACT
    ]
    for start, end in [*exact, (num_bytes, num_bytes)]:
        if start > done:
            spans.append((done, start))
        done = end
    return tuple(spans)

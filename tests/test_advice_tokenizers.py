"""What advice says about tokenizers, against brute force: whole texts tokenized anew, and compared byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from safe_llm.evaluation.boundaries import LOOKAHEAD, boundaries_of, boundary_outcomes
from safe_llm.evaluation.tokenization import inexact_spans, numbers_of, overlap_of, unspelled_by
from safe_llm.events import Outcome
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram, wordpiece
from safe_llm.vocabulary import NOT_EXACT, Vocabulary

TEXT = (
    "In 1850 the census put 63,700 people there; naïve café, NAÏVE 日本語 and emoji 🙂👍🏽.\n\n"
    "def total(values):\n    return 12 - 7  # the answer is 42, not 1850\n"
) * 4
KINDS = {
    "byte-level": byte_level,
    "digits": lambda: byte_level(individual_digits=True),
    "metaspace": metaspace,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@dataclass(frozen=True)
class Tokens:
    name: str
    vocabulary: Vocabulary


@pytest.fixture(scope="module")
def readers() -> dict[str, Tokens]:
    return {name: Tokens(name, Vocabulary(make())) for name, make in KINDS.items()}


def in_rounds(drafter: Vocabulary, verifier: Vocabulary, data: bytes) -> list[bool]:
    """Whether each of the drafter's ends is a candidate once its round's draft is written; tokenizes all text anew."""
    starts = [0, *(end for end in drafter.encode(data).ends if end != NOT_EXACT)]
    found = []
    for i, start in enumerate(starts):
        following = starts[(i // LOOKAHEAD + 1) * LOOKAHEAD :]
        ends = [0, *verifier.encode(data[: following[0]] if following else data).ends]
        own = ends[ends.index(start) + 1 :] if start in ends else [NOT_EXACT]
        found.append(start in ends and (start == len(data) or own[:1] not in ([], [NOT_EXACT])))
    return found[1:]


@pytest.mark.parametrize("drafter", ["byte-level", "digits", "metaspace"])
@pytest.mark.parametrize("verifier", KINDS)
def test_boundaries_are_those_of_full_retokenization(readers, drafter, verifier):
    one, other = readers[drafter], readers[verifier]
    data = TEXT.encode()
    outcomes = boundary_outcomes(one.vocabulary, other.vocabulary, data)
    assert [outcome is None for outcome in outcomes] == in_rounds(one.vocabulary, other.vocabulary, data)
    counted = boundaries_of(one, other, [data, data])
    assert (counted.drafter, counted.verifier) == (drafter, verifier)
    assert (counted.num_ends, counted.num_shared) == (2 * len(outcomes), 2 * outcomes.count(None))
    assert counted.share == pytest.approx(outcomes.count(None) / len(outcomes))
    assert counted.share > 0.99 or drafter != verifier  # a round may end inside a run of spaces


def test_boundaries_tell_what_a_verifier_cannot_spell(readers):
    """WordPiece has no capitals; what follows one is not asked, and neither is it in the middle of a token."""
    one, other = readers["byte-level"], readers["wordpiece"]
    counted = boundaries_of(one, other, [b"the answer NO"])
    assert counted.num_unrepresentable > 0
    outcomes = boundary_outcomes(one.vocabulary, other.vocabulary, b"the answer NO")
    assert counted.num_unrepresentable == outcomes.count(Outcome.UNREPRESENTABLE)
    assert boundaries_of(one, readers["metaspace"], [b"the answer NO"]).num_unrepresentable == 0


def test_boundaries_of_texts_without_tokens_are_none(readers):
    counted = boundaries_of(readers["byte-level"], readers["metaspace"], [b""])
    assert (counted.num_ends, counted.share) == (0, 1.0)


@pytest.mark.parametrize("other", KINDS)
def test_overlap_is_that_of_the_sets_of_byte_strings(readers, other):
    found = overlap_of(readers["byte-level"], readers[other])
    first, second = ({t for t in readers[name].vocabulary.tokens if t} for name in ("byte-level", other))
    assert (found.first, found.second, found.num_shared) == ("byte-level", other, len(first & second))
    assert found.part_of_first == pytest.approx(len(first & second) / len(first))
    assert found.part_of_second == pytest.approx(len(first & second) / len(second))


def test_numbers_are_cut_alike_where_every_boundary_is():
    words = ["12", "123", " 12", "7", "45"]
    pairs = Tokens("pairs", Vocabulary(characters(words)))
    single = Tokens("single", Vocabulary(characters([])))
    texts = [b"a 12", b"99 and 345", b"1 2 3"]
    # ' 12' is one token of `pairs`, '99' is two of both, '345' is '3' '45', and a digit alone is no number here
    found = numbers_of(pairs, single, texts)
    assert (found.first, found.second, found.num_numbers, found.num_alike) == ("pairs", "single", 3, 1)
    same = numbers_of(pairs, pairs, texts)
    assert (same.num_alike, same.share) == (3, 1.0)


def test_a_space_that_sticks_to_a_number_counts():
    """The same digits are inside, but only one member can be asked between the space and the first of them."""
    sticky = Tokens("sticky", Vocabulary(characters([" 1"])))
    plain = Tokens("plain", Vocabulary(characters([])))
    assert numbers_of(sticky, plain, [b"a 12"]).num_alike == 0
    assert numbers_of(sticky, plain, [b"a\n12"]).num_alike == 1
    ending = Tokens("ending", Vocabulary(characters(["2,"])))
    assert [numbers_of(ending, plain, [text]).num_alike for text in (b"12,", b"12.")] == [0, 1]


def test_unspelled_bytes_are_those_that_no_token_covers(readers):
    data = TEXT.encode()
    assert unspelled_by(readers["byte-level"], [data]).num_bytes == 0
    found = unspelled_by(readers["wordpiece"], [b"the answer", data])
    assert found.member == "wordpiece"
    assert {number for number, _, _ in found.spans} == {0, 1}  # it has no spaces either
    vocabulary = readers["wordpiece"].vocabulary
    for number, text in enumerate((b"the answer", data)):
        covered = bytearray(len(text))
        pieces = vocabulary.encode(text)
        for token_id, end in zip(pieces.ids, pieces.ends, strict=True):
            if end != NOT_EXACT:
                covered[end - len(vocabulary.surface(token_id)) : end] = b"\1" * len(vocabulary.surface(token_id))
        missing = [at for n, start, end in found.spans for at in range(start, end) if n == number]
        assert missing == [at for at, byte in enumerate(covered) if not byte]
        assert all(start < end for _, start, end in found.spans)
    assert found.num_bytes == sum(end - start for _, start, end in found.spans)


def test_nothing_is_unspelled_in_no_text(readers):
    vocabulary = readers["metaspace"].vocabulary
    assert inexact_spans(vocabulary, vocabulary.encode(b""), 0) == ()

from __future__ import annotations

import codecs
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from safe_llm.cli.answering import Marker
from safe_llm.cli.terminal import harmless
from safe_llm.detokenization import TextStream
from safe_llm.events import EnsemblePoint, RoundFinished, Timings


def _point(offset: int, chosen: bytes, drafted: bytes = b"?") -> EnsemblePoint:
    return EnsemblePoint(
        index=0,
        position=0,
        byte_offset=offset,
        drafted=drafted,
        chosen=chosen,
        reason="no-consensus",
        probabilities={},
        candidates=(),
    )


def _round(committed: bytes) -> RoundFinished:
    return RoundFinished(index=0, decisions=(), num_draft_tokens=0, committed=committed, timings=Timings())


def test_marker_marks_exactly_the_tokens_of_the_points():
    marker = Marker()
    marker.see(_point(4, "né".encode()))
    marker.see(_round("un  né e".encode()))
    marker.see(_point(8, b" e", drafted=b" e"))
    assert marker.split("un  né e") == [("un  ", None), ("né", "replaced"), (" ", None), ("e", "confirmed")]


def test_marker_marks_a_token_that_arrives_in_parts():
    marker = Marker()
    marker.see(_point(0, b"abc"))
    marker.see(_round(b"abcd"))
    assert [marker.split("a"), marker.split("bc"), marker.split("d")] == [
        [("a", "replaced")],
        [("bc", "replaced")],
        [("d", None)],
    ]


token_bytes = st.one_of(st.binary(min_size=1, max_size=4), st.text(min_size=1, max_size=3).map(str.encode))


@given(st.lists(st.tuples(token_bytes, st.sampled_from([None, "replaced", "confirmed"])), max_size=12))
def test_marker_follows_the_bytes_of_any_text(tokens):
    """Every character is marked iff one of the bytes that it was made of belongs to a marked token."""
    raw = b"".join(token for token, _ in tokens)
    marks = [mark for token, mark in tokens for _ in token]
    marker, stream, pieces, at = Marker(), TextStream(), [], 0
    for token, mark in tokens:
        if mark is not None:
            marker.see(_point(at, token, drafted=token if mark == "confirmed" else b""))
        marker.see(_round(token))
        at += len(token)
        pieces += marker.split(stream.feed(token))
    pieces += marker.split(stream.finish())
    assert "".join(text for text, _ in pieces) == raw.decode(errors="replace")
    got = [mark for text, mark in pieces for _ in text]
    wanted, start = [], 0
    for end in _char_ends(raw):
        wanted.append(next((mark for mark in marks[start:end] if mark), None))
        start = end
    assert got == wanted


def _char_ends(raw: bytes) -> list[int]:
    """Reference: where each character of the decoded text ends, from the decoder's own reports of what is broken."""
    broken: list[int] = []

    def report(error: UnicodeError) -> tuple[str, int]:
        broken.append(error.end - error.start)
        return "\udcff", error.end

    codecs.register_error("test_cli_report", report)
    text = raw.decode(errors="test_cli_report")
    sizes = iter(broken)
    return list(accumulate(next(sizes) if char == "\udcff" else len(char.encode()) for char in text))


@given(st.text())
def test_harmless_text_has_no_control_character_but_newline_and_tab(text):
    shown = harmless(text)
    assert not [char for char in shown if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160]


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_harmless_text_stays_as_it_is(text):
    assert harmless(text) == text
    assert harmless(text + "\n\t") == text + "\n\t"

"""Bytes as text deltas: valid, final, the same however they are cut, stop strings never shown."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from safe_llm.detokenization import TextStream
from tokenizer_zoo import BROKEN, HOSTILE, TEXTS

BYTES = st.one_of(TEXTS.map(str.encode), BROKEN.map(b"".join), st.binary(max_size=12))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[low:high] for low, high in itertools.pairwise(edges)]


def deltas(parts: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(stop)
    out = [stream.feed(part) for part in parts]
    return [*out, stream.finish()], stream


def cut_at_stop(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, the longest of them if several end there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@st.composite
def answers(draw):
    """Bytes, where they are cut, and stop strings, most of which occur in them or nearly so."""
    data = draw(BYTES)
    text = data.decode("utf-8", errors="replace")
    some = st.text(min_size=1, max_size=4)
    if text:
        pieces = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
        some = st.one_of(
            pieces, pieces.map(lambda piece: piece + "x"), pieces.map(lambda piece: piece[1:] + "\n" or "x"), some
        )
    return data, draw(st.lists(st.integers(0, 10_000), max_size=12)), draw(st.lists(some, max_size=4))


@settings(max_examples=600, deadline=None)
@given(answer=answers())
@example(answer=("🙂 ok".encode(), [1, 2, 3], []))  # A14
@example(answer=(b"abcd", [3], ["abcd", "bc"]))  # whichever is complete first, whatever the cut
@example(answer=(b"\xf0\x9fSTOP\xff", [1], ["STOP"]))
def test_deltas_are_the_text_cut_at_the_first_stop(answer):
    # B01-B06, A02: and nothing that was shown is taken back, since deltas can only be appended
    data, places, stop = answer
    whole = data.decode("utf-8", errors="replace")
    expected = cut_at_stop(whole, stop)
    out, stream = deltas(cut(data, places), stop)
    assert "".join(out) == expected
    assert stream.stopped == any(s in whole for s in stop)
    for delta in out:
        delta.encode("utf-8")


@settings(max_examples=300, deadline=None)
@given(answer=answers())
@example(answer=(b"abcd", [], ["abcd", "bc"]))  # whichever is complete first
def test_every_way_of_cutting_gives_the_same_answer(answer):
    data, places, stop = answer
    whole, one = deltas([data], stop)
    bytewise, two = deltas([data[i : i + 1] for i in range(len(data))], stop)
    random, three = deltas(cut(data, places), stop)
    assert "".join(whole) == "".join(bytewise) == "".join(random)
    assert one.num_bytes == two.num_bytes == three.num_bytes
    assert one.stopped == two.stopped == three.stopped


@settings(max_examples=300, deadline=None)
@given(answer=answers())
@example(answer=(b"\xff\xfeaSTOP", [], ["STOP"]))
@example(answer=(b"ab\xe6\x97STOP\xff\xff", [4], ["STOP", "P"]))
def test_num_bytes_is_where_the_stop_begins(answer):
    data, places, stop = answer
    out, stream = deltas(cut(data, places), stop)
    text = "".join(out)
    if not stream.stopped:
        assert stream.num_bytes == len(data)
        return
    assert data[: stream.num_bytes].decode("utf-8", errors="replace") == text
    rest = data[stream.num_bytes :].decode("utf-8", errors="replace")
    assert any(rest.startswith(s) for s in stop)


@settings(max_examples=300, deadline=None)
@given(answer=answers())
def test_only_what_may_become_a_stop_is_held_back(answer):
    # B06: exactly the longest end that is a proper prefix of a stop string, not a whole window
    data, places, stop = answer
    stream = TextStream(stop)
    shown = ""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    for part in cut(data, places):
        shown += stream.feed(part)
        text += decoder.decode(part)
        if stream.stopped:
            break
        held = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert shown == text[: len(text) - held]


@pytest.mark.parametrize(
    ("parts", "stop", "expected"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC"),  # B01
        (["hi", "\nUser", ":", " x"], ["\nUser:"], "hi"),  # B01
        (["alpha ", "beta", " gam", "ma delta"], ["beta gamma"], "alpha "),  # B02
        (["a<STA", "RT>b"], ["<START>"], "a"),  # B03
        (["so", "...", "x"], [".."], "so"),  # B04
        (["a", "##", "#\n"], ["###"], "a"),  # B05
        (["The quick br", "own", " dog."], ["own fox"], "The quick brown dog."),  # B06
        (["<"], ["<|end|>", "<s>"], "<"),  # B08
        (["</thi"], ["</think>"], "</thi"),  # B08
        (["aaa", "aab"], ["aab"], "aaa"),
        (["ababa", "bc"], ["ababc"], "ab"),
        (["x", "y"], [], "xy"),
        (["你是", "谁？"], ["谁"], "你是"),  # B21
        (["STOP"], ["STOP"], ""),
    ],
)
def test_stop_strings_cut_the_text_before_them(parts, stop, expected):
    out, _ = deltas([part.encode() for part in parts], stop)
    assert "".join(out) == expected


def test_held_text_is_released_as_soon_as_it_cannot_match():
    # B06
    stream = TextStream(["own fox"])
    assert [stream.feed(part) for part in (b"The br", b"own", b" f", b"ish")] == ["The br", "", "", "own fish"]


def test_held_text_is_released_once():
    # B06: released text counted twice
    stream = TextStream(["<end>"])
    assert [stream.feed(b"a<"), stream.feed(b"e"), stream.feed(b"x"), stream.finish(), stream.finish()] == [
        "a",
        "",
        "<ex",
        "",
        "",
    ]


def test_nothing_follows_a_stop():
    stream = TextStream(["|"])
    assert (stream.feed(b"a|b"), stream.feed(b"c|d"), stream.finish()) == ("a", "", "")
    assert stream.stopped
    assert stream.num_bytes == 1


def test_character_is_shown_when_it_is_complete():
    # A14
    stream = TextStream()
    assert [stream.feed(bytes([b])) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]


def test_incomplete_character_at_the_end_is_one_replacement_character():
    # A14, A21
    stream = TextStream()
    assert (stream.feed(b"a\xf0\x9f"), stream.finish()) == ("a", "\ufffd")


def test_invalid_bytes_are_replaced_and_the_rest_goes_on():
    # A21, F11: as bytes.decode(errors="replace") does it, however cut
    data = b"\x80ok \xc3\xff \xed\xa0\x80 \xf4\x90\x80\x80 end\xe6\x97"
    for places in ([], [1], list(range(len(data)))):
        out, _ = deltas(cut(data, places), [])
        assert "".join(out) == data.decode("utf-8", errors="replace")


def test_stop_is_found_right_after_invalid_bytes():
    out, stream = deltas([b"a\xf0", b"\x9fST", b"OP"], ["STOP"])
    assert "".join(out) == "a\ufffd"
    assert stream.num_bytes == 3


@pytest.mark.parametrize(
    "text", [*HOSTILE, "🏳️‍🌈", "e\u0301", "ห้าม", "การคัดกรอง", "مَرْحَبًا", "да гледам ќе идев", "': 'search"]
)
def test_marks_and_joiners_are_neither_lost_nor_repeated(text):
    # B19, A22, A02
    data = text.encode()
    for step in (1, 2, 3, 5):
        out, _ = deltas([data[i : i + step] for i in range(0, len(data), step)], ["\x01", "zz"])
        assert "".join(out) == text


def test_many_long_stop_strings_are_matched_in_linear_time():
    # F19: what is held back is compared, not the whole answer again
    stops = [chr(0x4E00 + i) * 1000 for i in range(64)]
    stream = TextStream(stops)
    shown = "".join(stream.feed(b"word ") for _ in range(2000))
    assert shown == "word " * 2000
    assert len(stream._held) == len(stream._raw) == 0


def test_empty_answer_is_empty():
    assert deltas([], ["x"])[0] == [""]
    assert deltas([b""], [])[0] == ["", ""]

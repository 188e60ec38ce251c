"""What a report shows of a request: its tokens with what was decided, and every member's cuts around them."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from safe_llm.events import Decision, EnsemblePoint
from safe_llm.report.words import LOOKS, Look, look_of, reason
from safe_llm.trace import Trace, TracedRequest, TraceHeader

__all__ = ["Answer", "Cut", "Piece", "Token", "answers"]

_AROUND = 2  # pieces shown on each side of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One decided token.

    Attributes:
        decision: The verdict on the drafted token.
        point: What the ensemble did here, if it acted.
        start: Byte at which it starts.
        end: Byte at which what was committed in its place ends.
        text: The characters that it completes; empty for END and inside a character.
        num_kept: How many of these belong to the answer: a stop string may cut it.
        look: How it looks.
        why: Why this became of it.
    """

    decision: Decision
    point: EnsemblePoint | None
    start: int
    end: int
    text: str
    num_kept: int
    look: Look
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token of a member in the generated text, or several between whose ends the text cannot be cut."""

    start: int
    end: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a member cuts the text around a token.

    Attributes:
        member: Its name.
        pieces: Those that the token touches, and some on each side.
        begins: Whether one of them begins where the token does.
    """

    member: str
    pieces: tuple[Piece, ...]
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request of a report.

    Attributes:
        number: Its place in the report, from 1.
        source: The trace's name, and which request of it.
        header: Who answered.
        request: What was asked and what came of it.
        generated: All committed bytes.
        tokens: The decided tokens.
        pieces: Every member's pieces of the generated text, by member name.
    """

    number: int
    source: str
    header: TraceHeader
    request: TracedRequest
    generated: bytes
    tokens: tuple[Token, ...]
    pieces: dict[str, tuple[Piece, ...]]

    @property
    def looks(self) -> tuple[tuple[Look, int], ...]:
        """The looks that occur, and how many tokens have them."""
        counts = Counter(token.look.key for token in self.tokens)
        return tuple((look, counts[look.key]) for look in LOOKS if counts[look.key])

    def cuts(self, token: Token) -> tuple[Cut, ...]:
        """How each member cuts the text around a token."""
        return tuple(
            Cut(member=name, pieces=_around(pieces, token), begins=_begins(pieces, token.start))
            for name, pieces in self.pieces.items()
        )


def answers(traces: Sequence[tuple[str, Trace]]) -> tuple[Answer, ...]:
    """Return the requests of all traces, which come with their names."""
    requests = [
        (source if len(trace.requests) == 1 else f"{source}, request {number}", trace.header, request)
        for source, trace in traces
        for number, request in enumerate(trace.requests, 1)
    ]
    return tuple(_answer(number, *request) for number, request in enumerate(requests, 1))


def _answer(number: int, source: str, header: TraceHeader, request: TracedRequest) -> Answer:
    generated = request.generated
    pieces = {name: _pieces(ends, len(generated)) for name, ends in request.tokenizations.items()}
    spans = list(_spans(request))
    texts = _texts(generated, [end for _, _, end in spans])
    left = sum(map(len, texts)) if request.result is None else len(request.result.text)
    points = {point.position: point for point in request.points}
    tokens = []
    for (decision, start, end), text in zip(spans, texts, strict=True):
        point = points.get(decision.position) if decision.outcome.is_ensembled else None
        inside = [name for name, cut in pieces.items() if not _begins(cut, start)]
        tokens.append(
            Token(
                decision=decision,
                point=point,
                start=start,
                end=end,
                text=text,
                num_kept=min(left, len(text)),
                look=look_of(decision.outcome),
                why=reason(decision, point, header, request, inside),
            )
        )
        left -= tokens[-1].num_kept
    return Answer(
        number=number,
        source=source,
        header=header,
        request=request,
        generated=generated,
        tokens=tuple(tokens),
        pieces=pieces,
    )


def _spans(request: TracedRequest) -> Iterator[tuple[Decision, int, int]]:
    """Yield the decisions with the bytes that were committed for them."""
    end = 0
    for done in request.rounds:
        end += len(done.committed)
        for number, decision in enumerate(done.decisions, 1):
            ends_round = decision.outcome.is_ensembled and number == len(done.decisions)
            yield decision, decision.byte_offset, end if ends_round else decision.byte_offset + len(decision.token)


def _texts(generated: bytes, ends: Sequence[int]) -> list[str]:
    """Give each character to the token that completes it; what is no character is U+FFFD, as in the answer."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    starts = [0, *ends[:-1]]
    return [
        decoder.decode(generated[start:end], final=end == len(generated) and number == len(ends) - 1)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _pieces(ends: Sequence[int | None], length: int) -> tuple[Piece, ...]:
    pieces, start, is_exact = [], 0, True
    for end in ends:
        if end is None:
            is_exact = False
        else:
            pieces.append(Piece(start=start, end=end, is_exact=is_exact))
            start, is_exact = end, True
    if start < length:
        pieces.append(Piece(start=start, end=length, is_exact=False))
    return tuple(pieces)


def _begins(pieces: Sequence[Piece], offset: int) -> bool:
    index = bisect_right(pieces, offset, key=lambda piece: piece.end)
    return index == len(pieces) or pieces[index].start == offset


def _around(pieces: Sequence[Piece], token: Token) -> tuple[Piece, ...]:
    first = bisect_right(pieces, token.start, key=lambda piece: piece.end)
    last = bisect_right(pieces, token.end - 1, key=lambda piece: piece.end)
    return tuple(pieces[max(0, first - _AROUND) : last + 1 + _AROUND])

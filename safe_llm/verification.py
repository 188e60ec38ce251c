"""Verification: the drafts in the verifiers' tokens, the boundary check, and the verifiers' scores. No decision yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from safe_llm.alignment import Alignment
from safe_llm.backends.base import Scores
from safe_llm.drafting import Draft
from safe_llm.errors import GenerationError, NonFiniteLogitsError
from safe_llm.events import Outcome
from safe_llm.grammar import Grammar
from safe_llm.member import Member, Session, Want
from safe_llm.types import SamplingParams
from safe_llm.vocabulary import NOT_EXACT

__all__ = ["Scored", "Track", "VerifyTask", "align", "boundary_check", "find_non_finite", "score"]


@dataclass(slots=True, eq=False)  # a track is itself: it is looked for among others
class Track:
    """One row on one verifier: its session and its view of the generated text.

    Attributes:
        member: The verifier.
        weight: Its weight.
        session: The session.
        alignment: The generated text in the verifier's tokens.
        grammar: Where the row stands in its grammar; None without one.
        dirty: Ids from this index on may differ from what the session last saw.
    """

    member: Member
    weight: float
    session: Session
    alignment: Alignment
    grammar: Grammar | None = None
    dirty: int = 0

    @property
    def room(self) -> int:
        """How many more ids than the text has fit into the verifier's context."""
        return self.member.room(self.session, len(self.alignment.ids))


@dataclass(slots=True)
class Scored:
    """A verifier's scores for one row.

    Attributes:
        track: The row on this verifier.
        scores: They hold other rows' positions, too.
        offset: This row's first position.
        first: How many generated ids come before it.
        memo: Scratch space for methods.
    """

    track: Track
    scores: Scores
    offset: int
    first: int
    memo: dict[Any, Any] = field(default_factory=dict)

    def position(self, count: int) -> int:
        """The position at which `count` generated ids come before."""
        return self.offset + count - self.first


@dataclass(slots=True)
class VerifyTask:
    """One row in verification.

    Attributes:
        draft: What the drafter proposes.
        keys: Bytes of the drafted tokens that are to be verified; empty for END.
        offsets: Byte offset at which each drafted token starts.
        tracks: The row on each verifier that takes part.
        position: Index of the first drafted token among the generated ones.
        sampling: The row's sampling parameters.
        uniform: Draws from [0, 1) for this row.
        blocked: Why the i-th drafted token is no candidate; None where it is one.
        every_token: No boundary check and no consensus check: merge right after the text, whatever its tokens are.
        detailed: Report every asked member's probability, also where C1 needed none, and its best tokens.
        error: Why the row cannot go on.
        scored: What each verifier says; empty where nobody was asked.
        drafter_memo: Scratch space for methods, the drafter's.
    """

    draft: Draft
    keys: list[bytes]
    offsets: list[int]
    tracks: Sequence[Track]
    position: int
    sampling: SamplingParams
    uniform: Callable[[], float]
    blocked: list[Outcome | None] = field(default_factory=list)
    every_token: bool = False
    detailed: bool = False
    error: GenerationError | None = None
    scored: list[Scored] = field(default_factory=list)
    drafter_memo: dict[Any, Any] = field(default_factory=dict)

    def heard(self) -> list[Scored]:
        """What those verifiers say that still take part."""
        return [scored for scored in self.scored if scored.track in self.tracks]

    def candidates(self) -> list[int]:
        """Indices of the drafted tokens that passed the boundary check."""
        return [i for i, outcome in enumerate(self.blocked) if outcome is None]

    def rest_of_span(self, index: int) -> tuple[bytes, bool]:
        """Drafted text behind a candidate up to the next boundary of all, and whether that is the draft's end."""
        if self.every_token or not self.keys[index]:
            return b"", False
        stop = index + 1
        while stop < len(self.keys) and self.blocked[stop] in (Outcome.OOV_LIKE, Outcome.UNREPRESENTABLE):
            stop += 1
        return b"".join(self.keys[index + 1 : stop]), stop == len(self.keys)

    def count(self, track: Track, index: int) -> int:
        """How many of a verifier's ids come before the candidate with this index."""
        if self.every_token:
            return len(track.alignment.ids)
        return track.alignment.tokens_before(self.offsets[index]) or 0


def align(task: VerifyTask, text: bytes | bytearray, unchanged: int) -> None:
    """Retokenize the row's text, draft included, for every verifier, and do the boundary check.

    (Mode every-token: the text without the draft, and no check.)
    """
    for track in task.tracks:
        track.alignment.update(text, unchanged)
        track.dirty = min(track.dirty, track.alignment.start)
    task.blocked = [_blocked(task, i) for i in range(len(task.keys))]


def _blocked(task: VerifyTask, index: int) -> Outcome | None:
    if task.draft.forced[index]:
        return Outcome.FORCED
    if task.every_token:
        return None
    return boundary_check([track.alignment for track in task.tracks], task.offsets[index], task.keys[index])


def boundary_check(alignments: Sequence[Alignment], offset: int, key: bytes) -> Outcome | None:
    """Say why a drafted token is no candidate, or None.

    Args:
        alignments: The text, draft included, in every verifier's tokens.
        offset: Byte at which the token starts.
        key: Its bytes; empty for END.
    """
    for alignment in alignments:
        count = alignment.tokens_before(offset)
        if count is None:
            return alignment.why_not(offset)
        own_starts_here = count < len(alignment.ids)
        if key and not (own_starts_here and alignment.ends[count] != NOT_EXACT):
            return Outcome.UNREPRESENTABLE  # it has no exact token of its own to vote with
    return None


def score(verifier: Member, tasks: Sequence[VerifyTask]) -> None:
    """Score the candidates of all rows with one verifier: one ragged forward pass. Rows without a candidate wait.

    Args:
        verifier: The member.
        tasks: The rows, after `align`; those in which it takes no part are left alone.

    Raises:
        MemberError: The forward pass failed.
    """
    asked = [
        (task, track) for task in tasks if None in task.blocked for track in task.tracks if track.member is verifier
    ]
    if not asked:
        return
    wants = []
    for task, track in asked:
        first = task.count(track, task.candidates()[0])
        tail = track.alignment.ids[track.dirty :]
        wants.append(Want(session=track.session, start=track.dirty, tail=tail, first=first))
    scores, offsets = verifier.score(wants)
    end_id = verifier.vocabulary.symbols.end_id
    for (task, track), want, offset in zip(asked, wants, offsets, strict=True):
        track.dirty = len(track.alignment.ids)
        early = task.sampling.min_tokens - task.position
        if early > 0 and end_id is not None:
            held = [offset + task.count(track, i) - want.first for i in task.candidates() if i < early]
            if held:
                scores.forbid_end(held)
        if track.grammar is not None:
            _restrict(task, track, track.grammar, scores, offset - want.first)
        task.scored.append(Scored(track, scores, offset, want.first))


def _restrict(task: VerifyTask, track: Track, grammar: Grammar, scores: Scores, shift: int) -> None:
    """Leave the verifier, at every candidate, what the grammar allows there.

    Where it can spell nothing of that, it is left alone: the drafter's mask holds.

    Args:
        task: The row.
        track: The row on the verifier.
        grammar: Where it stands there.
        scores: The verifier's scores.
        shift: From a number of generated ids to a position in `scores`.
    """
    followed = b""
    positions, masks = [], []
    try:
        for i in task.candidates():
            step = b"".join(task.keys[:i])[len(followed) :]
            grammar.advance(step)
            followed += step
            mask = grammar.allowed()
            if mask.any():
                positions.append(task.count(track, i) + shift)
                masks.append(mask)
        grammar.rollback(len(followed))
    except GenerationError as error:
        task.error = error
    if positions:
        scores.restrict(positions, np.stack(masks))


def find_non_finite(verifier: Member, tasks: Sequence[VerifyTask]) -> Iterator[tuple[int, NonFiniteLogitsError]]:
    """Yield the indices of the rows that have a position where a verifier's scores are not finite, candidate or not.

    Methods look beyond the candidates, and a rollback would leave the NaN behind in the row's cache. This is where the
    host first waits for the verifier's pass, so it should come after the passes of all.

    Raises:
        MemberError: The pass had been left to run by itself, and failed.
    """
    for i, task in enumerate(tasks):
        for scored in [scored for scored in task.scored if scored.track.member is verifier]:
            finite = scored.scores.top1()[1]
            for count in range(scored.first, len(scored.track.alignment.ids) + 1):
                if not finite[scored.position(count)]:
                    yield i, NonFiniteLogitsError(verifier.name, scored.track.session.prompt_tokens + count - 1)
                    break

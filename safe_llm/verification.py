"""Verification: score the drafts with every verifier, then walk them from the left to where the ensemble must act.

The walk applies, per drafted token, the boundary check (does the text before it end on a token boundary of every
verifier?) and then the method's consensus check. The first token that fails neither exemption is where the members'
distributions are merged. If the winner is what was drafted, the rest of the draft stands and the walk goes on;
otherwise everything after it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from safe_llm.alignment import Alignment
from safe_llm.backends.base import Scores
from safe_llm.drafting import Draft
from safe_llm.errors import GenerationError, NonFiniteLogitsError
from safe_llm.events import Decision, Outcome
from safe_llm.grammar import Grammar
from safe_llm.member import Member, Session, Want
from safe_llm.methods.base import MemberView, Merged, Method, Point
from safe_llm.sampling import draw, nucleus, residual, sampling_probs
from safe_llm.types import SamplingParams
from safe_llm.vocabulary import NOT_EXACT

__all__ = ["Track", "Verdict", "VerifyTask", "align", "score", "walk"]

_NOBODY: Mapping[str, float] = MappingProxyType({})
_NO_TOPS: Mapping[str, tuple[tuple[bytes, float], ...]] = MappingProxyType({})
_NUM_TOPS = 3


@dataclass(slots=True)
class Track:
    """One row on one verifier: its session and its view of the generated text.

    Attributes:
        session: The session.
        alignment: The generated text in the verifier's tokens.
        dirty: Ids from this index on may differ from what the session last saw.
    """

    session: Session
    alignment: Alignment
    dirty: int = 0


@dataclass(slots=True)
class _Scored:
    """A verifier's scores for one row: `first` generated ids come before position `offset`."""

    scores: Scores
    offset: int
    first: int
    memo: dict[Any, Any]


@dataclass(slots=True)
class VerifyTask:
    """One row in verification.

    Attributes:
        draft: What the drafter proposes.
        keys: Bytes of the drafted tokens that are to be verified; empty for END.
        offsets: Byte offset at which each drafted token starts.
        tracks: The row on each verifier.
        position: Index of the first drafted token among the generated ones.
        sampling: The row's sampling parameters.
        uniform: Draws from [0, 1) for this row.
        blocked: Why the i-th drafted token is no candidate; None where it is one.
        every_token: No boundary check and no consensus check: merge right after the text, whatever its tokens are.
        detailed: Report every asked member's probability, also where C1 needed none, and its best tokens.
        grammars: Where the row stands in its grammar, for each verifier; empty without one.
        error: Why the row cannot go on.
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
    grammars: Sequence[Grammar] = ()
    error: GenerationError | None = None
    _scored: list[_Scored] = field(default_factory=list)
    _drafter_memo: dict[Any, Any] = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What verification decided on one row.

    Attributes:
        decisions: One per drafted token up to the one that was replaced, or up to what is left to the next round.
        num_accepted: Drafted tokens to keep.
        replacement: Key to commit after them in place of the rest of the draft; None if nothing was replaced.
        merges: The ensemble operations: each one's index among the decisions, and what it decided.
        guess: What a verifier would say behind the draft, if that was accepted whole; empty if none says anything.
        ensemble_s: Seconds spent merging.
    """

    decisions: tuple[Decision, ...]
    num_accepted: int
    replacement: bytes | None = None
    merges: tuple[tuple[int, Merged], ...] = ()
    guess: bytes = b""
    ensemble_s: float = 0.0


# ---------------------------------------------------------------------- boundary check and scoring


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
    offset = task.offsets[index]
    for track in task.tracks:
        count = track.alignment.tokens_before(offset)
        if count is None:
            return track.alignment.why_not(offset)
        own_starts_here = count < len(track.alignment.ids)
        if task.keys[index] and not (own_starts_here and track.alignment.ends[count] != NOT_EXACT):
            return Outcome.UNREPRESENTABLE  # it has no exact token of its own to vote with
    return None


def score(verifier: Member, index: int, tasks: Sequence[VerifyTask]) -> None:
    """Score the candidates of all rows with one verifier: one ragged forward pass. Rows without a candidate wait.

    Args:
        verifier: The member.
        index: Its place among the verifiers.
        tasks: The rows, after `align`.

    Raises:
        MemberError: The forward pass failed.
    """
    asked = [task for task in tasks if None in task.blocked]
    if not asked:
        return
    wants = []
    for task in asked:
        track = task.tracks[index]
        first = task.count(track, task.candidates()[0])
        tail = track.alignment.ids[track.dirty :]
        wants.append(Want(session=track.session, start=track.dirty, tail=tail, first=first))
    scores, offsets = verifier.score(wants)
    end_id = verifier.vocabulary.symbols.end_id
    for task, want, offset in zip(asked, wants, offsets, strict=True):
        track = task.tracks[index]
        track.dirty = len(track.alignment.ids)
        early = task.sampling.min_tokens - task.position
        if early > 0 and end_id is not None:
            held = [offset + task.count(track, i) - want.first for i in task.candidates() if i < early]
            if held:
                scores.forbid_end(held)
        if task.grammars:
            _restrict(task, index, scores, offset - want.first)
        task._scored.append(_Scored(scores, offset, want.first, {}))
    _check_finite(verifier, index, asked, scores)


def _restrict(task: VerifyTask, index: int, scores: Scores, shift: int) -> None:
    """Leave the verifier, at every candidate, what the grammar allows there.

    Where it can spell nothing of that, it is left alone: the drafter's mask holds.

    Args:
        task: The row.
        index: The verifier's place.
        scores: Its scores.
        shift: From a number of generated ids to a position in `scores`.
    """
    grammar, followed = task.grammars[index], b""
    positions, masks = [], []
    try:
        for i in task.candidates():
            step = b"".join(task.keys[:i])[len(followed) :]
            grammar.advance(step)
            followed += step
            mask = grammar.allowed()
            if mask.any():
                positions.append(task.count(task.tracks[index], i) + shift)
                masks.append(mask)
        grammar.rollback(len(followed))
    except GenerationError as error:
        task.error = error
    if positions:
        scores.restrict(positions, np.stack(masks))


def _own_token(verifier: Member, task: VerifyTask, track: Track, index: int) -> int | None:
    if task.every_token:
        return None
    if not task.keys[index]:
        return verifier.vocabulary.symbols.end_id
    return track.alignment.ids[task.count(track, index)]


def _check_finite(verifier: Member, index: int, tasks: Sequence[VerifyTask], scores: Scores) -> None:
    """Fail the rows that have a position where the verifier's scores are not finite, candidate or not.

    Methods look beyond the candidates, and a rollback would leave the NaN behind in the row's cache.
    """
    finite = scores.top1()[1]
    if finite.all():
        return
    for task in tasks:
        track, scored = task.tracks[index], task._scored[index]
        for count in range(scored.first, len(track.alignment.ids) + 1):
            if not finite[scored.offset + count - scored.first]:
                task.error = task.error or NonFiniteLogitsError(verifier.name, track.session.prompt_tokens + count - 1)


# ---------------------------------------------------------------------- the walk


def walk(
    task: VerifyTask,
    *,
    drafter: Member,
    verifiers: Sequence[Member],
    weights: Sequence[float],
    method: Method,
    threshold: float,
    clock: Callable[[], float],
) -> Verdict:
    """Go through the draft from the left to the first token that the ensemble replaces (or to its end)."""
    decisions: list[Decision] = []
    merges: list[tuple[int, Merged]] = []
    num_accepted, replacement, ensemble_s = len(task.keys), None, 0.0
    for i, key in enumerate(task.keys):
        outcome, point, merged, chosen = task.blocked[i] if verifiers else Outcome.DRAFTED, None, None, key
        started = clock()
        if outcome is None:
            point = _point(task, i, drafter, verifiers, weights)
            if i and point.is_open and _is_greedy(task) and method.waits(point):
                num_accepted = i
                break
            if task.sampling.temperature > 0.0:
                outcome, chosen = _reject_or_accept(task, i, point, method)
            elif not task.every_token:
                outcome = method.consensus(point, threshold)
            elif method.keeps_drafter(point):
                outcome = Outcome.GATE
        if outcome is None and point is not None:
            started = clock()
            merged = method.merge(point)
            chosen = merged.chosen
            drafted = key if merged.drafted is None else merged.drafted
            outcome = Outcome.CONFIRMED if chosen == drafted else Outcome.REPLACED
        decided = outcome or Outcome.DRAFTED
        if decided.is_ensembled:
            merges.append((i, merged or Merged(chosen=chosen, candidates=())))
            ensemble_s += clock() - started
        decisions.append(_decision(task, i, decided, point, drafter))
        if decided is Outcome.REPLACED:
            num_accepted, replacement = i, chosen
            break
    return Verdict(
        decisions=tuple(decisions),
        num_accepted=num_accepted,
        replacement=replacement,
        merges=tuple(merges),
        guess=_guess(task, verifiers) if num_accepted == len(task.draft.ids) else b"",
        ensemble_s=ensemble_s,
    )


def _guess(task: VerifyTask, verifiers: Sequence[Member]) -> bytes:
    """Text of the token that the first verifier that was asked would put behind the draft; empty for END."""
    if task.every_token or not task._scored:
        return b""
    scored, length = task._scored[0], len(task.tracks[0].alignment.ids)
    return verifiers[0].vocabulary.surface(int(scored.scores.top1()[0][scored.offset + length - scored.first]))


def _decision(task: VerifyTask, index: int, outcome: Outcome, point: Point | None, drafter: Member) -> Decision:
    """Write down a verdict; what the walk itself did not need is looked up only in detail."""
    asked = () if point is None else point.views
    seen = asked or (_drafter_view(task, index, drafter, 1.0),) if task.detailed else ()
    reported = asked if task.detailed or outcome.is_ensembled else ()
    return Decision(
        position=task.position + index,
        byte_offset=task.offsets[index],
        token=task.keys[index],
        outcome=outcome,
        probabilities={view.name: view.own_probability for view in reported} if reported else _NOBODY,
        tops={view.name: view.best_tokens(_NUM_TOPS) for view in seen} if seen else _NO_TOPS,
    )


def _is_greedy(task: VerifyTask) -> bool:
    return task.sampling.temperature == 0.0 and not task.every_token


def _drafter_view(task: VerifyTask, index: int, drafter: Member, weight: float) -> MemberView:
    scores, position = task.draft.scores[index]
    return MemberView(
        name=drafter.name,
        vocabulary=drafter.vocabulary,
        scores=scores,
        position=position,
        weight=weight,
        own=task.draft.ids[index],
        own_is_best=True,
        following=task.draft.ids[index : len(task.keys)],
        path=task.draft.scores[index : len(task.keys)],
        memo=task._drafter_memo,
    )


def _point(
    task: VerifyTask, index: int, drafter: Member, verifiers: Sequence[Member], weights: Sequence[float]
) -> Point:
    views = [_drafter_view(task, index, drafter, weights[0])]
    for number, verifier in enumerate(verifiers):
        track, scored = task.tracks[number], task._scored[number]
        count = task.count(track, index)
        position = scored.offset + count - scored.first
        own = _own_token(verifier, task, track, index)
        views.append(
            MemberView(
                name=verifier.name,
                vocabulary=verifier.vocabulary,
                scores=scored.scores,
                position=position,
                weight=weights[number + 1],
                own=own,
                own_is_best=own is not None and own == int(scored.scores.top1()[0][position]),
                following=track.alignment.ids[count:],
                path=[(scored.scores, position + k) for k in range(len(track.alignment.ids) - count + 1)],
                after=_asker(verifier, track, count),
                memo=scored.memo,
            )
        )
    rest, is_open = task.rest_of_span(index)
    return Point(views=tuple(views), drafted=task.keys[index], rest=rest, is_open=is_open)


def _asker(verifier: Member, track: Track, count: int) -> Callable[[Sequence[int]], Scores]:
    def after(ids: Sequence[int]) -> Scores:
        return verifier.peek(track.session, count, ids)

    return after


def _reject_or_accept(task: VerifyTask, index: int, point: Point, method: Method) -> tuple[Outcome, bytes]:
    """Speculative sampling at a candidate: keep the drafted token with min(1, P_ens / P_D), else draw the rest.

    Neither C1 nor C2 is used here: with either, the answer would not be distributed as the ensemble's distribution.
    """
    sampling = task.sampling
    target = method.distribution(point, sampling.temperature)
    keys = list(target)
    ensembled = nucleus(np.array(list(target.values())), sampling.top_p)
    scores, position = task.draft.scores[index]
    probs = sampling_probs(scores.dense([position])[0], sampling.temperature, sampling.top_p)
    if task.uniform() * float(probs[task.draft.ids[index]]) < dict(zip(keys, ensembled.tolist(), strict=True)).get(
        point.drafted, 0.0
    ):
        return Outcome.SAMPLED, point.drafted
    ids = [point.drafter.id_of(key) for key in keys]
    mine = probs[[-1 if i is None else i for i in ids]].cpu().numpy()
    rest = residual(ensembled, np.where([i is None for i in ids], 0.0, mine))
    while rest.any():
        chosen = draw(rest, task.uniform())
        if point.spellable(keys[chosen]):
            return Outcome.REPLACED, keys[chosen]
        rest[chosen] = 0.0  # the drafter has no way to write it
    return Outcome.SAMPLED, point.drafted

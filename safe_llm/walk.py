"""The walk through a verified draft, from the left to the first token that the ensemble replaces.

Per drafted token: the boundary check (does the text before it end on a token boundary of every verifier?), then the
method's consensus check. A token that fails neither exemption is where the members' distributions are merged. If the
winner is what was drafted, the rest of the draft stands and the walk goes on; otherwise what follows is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from safe_llm.backends.base import Scores
from safe_llm.events import Decision, Outcome
from safe_llm.member import Member
from safe_llm.methods.base import MemberView, Merged, Method, Point
from safe_llm.sampling import draw, nucleus, residual, sampling_probs
from safe_llm.verification import Track, VerifyTask

__all__ = ["Verdict", "walk"]

_NOBODY: Mapping[str, float] = MappingProxyType({})
_NO_TOPS: Mapping[str, tuple[tuple[bytes, float], ...]] = MappingProxyType({})
_NUM_TOPS = 3


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


def walk(
    task: VerifyTask,
    *,
    drafter: Member,
    weights: Sequence[float],
    method: Method,
    threshold: float,
    clock: Callable[[], float],
) -> Verdict:
    """Go through the draft from the left to the first token that the ensemble replaces (or to its end).

    Args:
        task: The row, after scoring.
        drafter: The drafter.
        weights: The drafter's, then one per verifier that takes part.
        method: How distributions are merged.
        threshold: Of the consensus check.
        clock: Measures the merging.
    """
    decisions: list[Decision] = []
    merges: list[tuple[int, Merged]] = []
    num_accepted, replacement, ensemble_s = len(task.keys), None, 0.0
    for i, key in enumerate(task.keys):
        outcome, point, merged, chosen = task.blocked[i] if task.tracks else Outcome.DRAFTED, None, None, key
        started = clock()
        if outcome is None:
            point = _point(task, i, drafter, weights)
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
        guess=_guess(task) if num_accepted == len(task.draft.ids) else b"",
        ensemble_s=ensemble_s,
    )


def _guess(task: VerifyTask) -> bytes:
    """Text of the token that the first verifier that was asked would put behind the draft; empty for END."""
    heard = task.heard()
    if task.every_token or not heard:
        return b""
    scored = heard[0]
    position = scored.position(len(scored.track.alignment.ids))
    return scored.track.member.vocabulary.surface(int(scored.scores.top1()[0][position]))


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
        memo=task.drafter_memo,
    )


def _own_token(task: VerifyTask, track: Track, index: int) -> int | None:
    if task.every_token:
        return None
    if not task.keys[index]:
        return track.member.vocabulary.symbols.end_id
    return track.alignment.ids[task.count(track, index)]


def _point(task: VerifyTask, index: int, drafter: Member, weights: Sequence[float]) -> Point:
    views = [_drafter_view(task, index, drafter, weights[0])]
    for scored, weight in zip(task.heard(), weights[1:], strict=True):
        track, verifier = scored.track, scored.track.member
        count = task.count(track, index)
        position = scored.position(count)
        own = _own_token(task, track, index)
        views.append(
            MemberView(
                name=verifier.name,
                vocabulary=verifier.vocabulary,
                scores=scored.scores,
                position=position,
                weight=weight,
                own=own,
                own_is_best=own is not None and own == int(scored.scores.top1()[0][position]),
                following=track.alignment.ids[count:],
                path=[(scored.scores, position + k) for k in range(len(track.alignment.ids) - count + 1)],
                after=_asker(track, count),
                memo=scored.memo,
            )
        )
    rest, is_open = task.rest_of_span(index)
    return Point(views=tuple(views), drafted=task.keys[index], rest=rest, is_open=is_open)


def _asker(track: Track, count: int) -> Callable[[Sequence[int]], Scores]:
    def after(ids: Sequence[int]) -> Scores:
        return track.member.peek(track.session, count, ids)

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

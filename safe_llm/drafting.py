"""Drafting: the drafter proposes a few tokens per row, all rows in one batch of single steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from safe_llm.backends.base import Scores
from safe_llm.errors import GenerationError, NonFiniteLogitsError
from safe_llm.grammar import Grammar
from safe_llm.member import Member, Session, Want
from safe_llm.sampling import draw, sampling_probs
from safe_llm.types import SamplingParams

__all__ = ["Draft", "DraftTask", "draft", "top_log_probs"]


@dataclass(slots=True)
class Draft:
    """What the drafter proposes for one row.

    Attributes:
        ids: Drafted ids; the last one may be END.
        scores: Where each id's distribution is: scores and position.
        forced: Whether the grammar allowed nothing but what this id begins.
        num_carried: How many of the ids were drafted in an earlier round already.
        error: Why the row cannot go on (its logits were not finite, its grammar cannot be followed).
    """

    ids: list[int] = field(default_factory=list)
    scores: list[tuple[Scores, int]] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    num_carried: int = 0
    error: GenerationError | None = None

    @property
    def num_new(self) -> int:
        """How many ids were drafted in this round."""
        return max(0, len(self.ids) - self.num_carried)

    def after(self, count: int) -> Draft:
        """What is left once the first `count` ids are committed, for the next round."""
        ids = self.ids[count:]
        return Draft(ids=ids, scores=self.scores[count:], forced=self.forced[count:], num_carried=len(ids))

    def drop_last(self) -> None:
        """Forget the last drafted id."""
        for column in (self.ids, self.scores, self.forced):
            column.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTask:
    """One row's request to the drafter.

    Attributes:
        session: The row's session on the drafter.
        ids: All ids generated so far.
        stable: How many of them are as they were in the last round.
        pending: What an earlier round drafted behind them; it is continued in place.
        lookahead: Most tokens that a draft has, at least 1.
        sampling: How to choose a token.
        uniform: Draws from [0, 1) for this row; used at temperature above 0.
        grammar: Where the row stands in its grammar, if it has one. After drafting it stands there again.
    """

    session: Session
    ids: Sequence[int]
    stable: int
    pending: Draft
    lookahead: int
    sampling: SamplingParams
    uniform: Callable[[], float]
    grammar: Grammar | None = None


def draft(member: Member, tasks: Sequence[DraftTask]) -> list[Draft]:
    """Let the drafter continue every row; a row stops at its lookahead, at END, or when its logits are not finite.

    Raises:
        MemberError: The drafter's forward pass failed.
    """
    drafts = [task.pending for task in tasks]
    for task in tasks:
        if task.grammar is not None:
            task.grammar.advance(_spelled(member, task.pending))
    active = [i for i, task in enumerate(tasks) if _goes_on(member, task)]
    while active:
        wants = [_want(tasks[i], drafts[i]) for i in active]
        scores, _ = member.score(wants)
        _restrict([tasks[i] for i in active], [drafts[i] for i in active], scores)
        ids, finite = _choose(member, [tasks[i] for i in active], [drafts[i] for i in active], scores)
        still = []
        for position, i in enumerate(active):
            if drafts[i].error is not None:
                continue
            if not finite[position]:
                drafts[i].error = NonFiniteLogitsError(member.name, len(tasks[i].session.tokens) - 1)
                continue
            drafts[i].ids.append(ids[position])
            drafts[i].scores.append((scores, position))
            _follow(member, tasks[i], drafts[i], scores, position)
            if _goes_on(member, tasks[i]):
                still.append(i)
        active = still
    for task, proposed in zip(tasks, drafts, strict=True):
        if task.grammar is not None and proposed.error is None:
            task.grammar.rollback(len(_spelled(member, proposed)))
    return drafts


def _spelled(member: Member, proposed: Draft) -> bytes:
    return b"".join(map(member.vocabulary.surface, proposed.ids))


def _goes_on(member: Member, task: DraftTask) -> bool:
    ids = task.pending.ids
    return len(ids) < task.lookahead and not (ids and member.vocabulary.is_end(ids[-1]))


def _want(task: DraftTask, so_far: Draft) -> Want:
    generated = len(task.ids) + len(so_far.ids)
    if so_far.ids:
        return Want(session=task.session, start=generated - 1, tail=so_far.ids[-1:], first=generated)
    return Want(session=task.session, start=task.stable, tail=task.ids[task.stable :], first=generated)


def _restrict(tasks: Sequence[DraftTask], drafts: Sequence[Draft], scores: Scores) -> None:
    """Leave every row with a grammar only what the grammar allows."""
    positions, masks = [], []
    for position, (task, proposed) in enumerate(zip(tasks, drafts, strict=True)):
        if task.grammar is None:
            continue
        try:
            mask = task.grammar.allowed()
        except GenerationError as error:
            proposed.error = error
            continue
        if not mask.any():
            proposed.error = GenerationError(
                "the drafter has no token for what the grammar demands next", hint="allow other characters there"
            )
            continue
        positions.append(position)
        masks.append(mask)
    if positions:
        scores.restrict(positions, np.stack(masks))


def _follow(member: Member, task: DraftTask, proposed: Draft, scores: Scores, position: int) -> None:
    """Move the row's grammar over the last drafted id, and note whether the grammar left any choice."""
    grammar, key = task.grammar, member.vocabulary.surface(proposed.ids[-1])
    if grammar is None:
        proposed.forced.append(False)
    elif not key:  # END: forced if it is all that is left
        proposed.forced.append(bool(np.isneginf(scores.top_k([position], 2)[1][0, -1])))
    else:
        proposed.forced.append(grammar.forced().startswith(key))
        try:
            grammar.advance(key)
        except GenerationError as error:
            proposed.error = error


def _choose(
    member: Member, tasks: Sequence[DraftTask], drafts: Sequence[Draft], scores: Scores
) -> tuple[list[int], Sequence[bool]]:
    """Pick the next id of every row: the argmax, or a draw from the tempered nucleus."""
    early = [
        i for i, (t, d) in enumerate(zip(tasks, drafts, strict=True)) if len(t.ids) + len(d.ids) < t.sampling.min_tokens
    ]
    if early and member.vocabulary.symbols.end_ids:
        scores.forbid_end(early)
    best, finite = scores.top1()
    ids: list[int] = best.tolist()
    for i, task in enumerate(tasks):
        if task.sampling.temperature > 0.0 and finite[i]:
            probs = sampling_probs(scores.dense([i])[0], task.sampling.temperature, task.sampling.top_p)
            ids[i] = draw(probs, task.uniform())
    return ids, finite.tolist()


def top_log_probs(scores: Scores, position: int, count: int) -> tuple[list[int], list[float]]:
    """Return the `count` best ids that can be chosen at a position and their log-probabilities, best first."""
    if count == 0:
        return [], []
    ids: list[int] = scores.top_k([position], count)[0][0].tolist()
    values: list[float] = scores.log_probs([position] * len(ids), ids).tolist()
    num_possible = sum(value > -np.inf for value in values)  # a grammar may leave fewer
    return ids[:num_possible], values[:num_possible]

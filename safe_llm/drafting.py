"""Drafting: the drafter proposes a few tokens per row, all rows in one batch.

A pass may try several tokens of a row: guesses (see `safe_llm.lookup`, and what a verifier would say next), of which
those are kept that the drafter chooses itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from safe_llm.backends.base import Scores
from safe_llm.errors import GenerationError, NonFiniteLogitsError
from safe_llm.grammar import Grammar
from safe_llm.lookahead import Lookahead
from safe_llm.lookup import Lookup
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
        confidences: Each id's probability; empty unless the row's lookahead needs them.
        size: How many of the ids are to be verified in this round.
        num_carried: How many of the ids were drafted in an earlier round already.
        error: Why the row cannot go on (its logits were not finite, its grammar cannot be followed).
    """

    ids: list[int] = field(default_factory=list)
    scores: list[tuple[Scores, int]] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    size: int = 0
    num_carried: int = 0
    error: GenerationError | None = None

    @property
    def num_new(self) -> int:
        """How many ids were drafted in this round."""
        return max(0, len(self.ids) - self.num_carried)

    def after(self, count: int) -> Draft:
        """What is left once the first `count` ids are committed, for the next round."""
        ids = self.ids[count:]
        return Draft(
            ids=ids,
            scores=self.scores[count:],
            forced=self.forced[count:],
            confidences=self.confidences[count:],
            num_carried=len(ids),
        )

    def drop_last(self) -> None:
        """Forget the last id that is to be verified, and what was drafted behind it."""
        self.size -= 1
        for column in (self.ids, self.scores, self.forced, self.confidences):
            del column[self.size :]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTask:
    """One row's request to the drafter.

    Attributes:
        session: The row's session on the drafter.
        ids: All ids generated so far.
        stable: How many of them are as they were in the last round.
        draft: What an earlier round drafted behind them; it is continued in place.
        limit: Most tokens that a draft may have, at least 1.
        lookahead: How many of them should be verified together.
        first: How many ids at the draft's beginning are out of the question, being verified just now.
        sampling: How to choose a token.
        uniform: Draws from [0, 1) for this row; used at temperature above 0.
        lookup: Guesses at what comes next; None for none.
        guess: Another guess: ids that may follow `ids`.
        grammar: Where the row stands in its grammar, if it has one. After drafting it stands there again.
    """

    session: Session
    ids: Sequence[int]
    stable: int
    draft: Draft
    limit: int
    lookahead: Lookahead
    sampling: SamplingParams
    uniform: Callable[[], float]
    first: int = 0
    lookup: Lookup | None = None
    guess: Sequence[int] = ()
    grammar: Grammar | None = None

    @property
    def num_ids(self) -> int:
        """How many ids there are, drafted ones included."""
        return len(self.ids) + len(self.draft.ids)

    def enough(self) -> int | None:
        """How many of the ids from `first` on to verify together, or None while there should be more."""
        num_drafted = len(self.draft.ids) - self.first
        return self.lookahead.enough(num_drafted, self.draft.confidences[self.first :])


def draft(member: Member, tasks: Sequence[DraftTask]) -> list[bool]:
    """Let the drafter continue every row's draft as far as its lookahead, END, its limit, or an error of its own.

    Rows of a batch want drafts of different lengths. Once half of them are done the others are left as they are, to go
    on in the next round: where a draft ends must not depend on who shares the batch.

    Returns:
        Which rows are done.

    Raises:
        MemberError: The drafter's forward pass failed.
    """
    for task in tasks:
        if task.grammar is not None:
            task.grammar.advance(_spelled(member, task.draft))
    active = [task for task in tasks if _goes_on(member, task)]
    while len(active) > len(tasks) // 2:
        guesses = [_guess(task, member.backend.cheap_tokens // len(active) - 1) for task in active]
        scores, offsets = member.score([_want(task, guess) for task, guess in zip(active, guesses, strict=True)])
        _restrict(member, active, scores, offsets)
        _take(member, active, guesses, scores, offsets)
        active = [task for task in active if _goes_on(member, task)]
    for task in tasks:
        if task.grammar is not None and task.draft.error is None:
            task.grammar.rollback(len(_spelled(member, task.draft)))
    return [not _goes_on(member, task) for task in tasks]


def _spelled(member: Member, proposed: Draft) -> bytes:
    return b"".join(map(member.vocabulary.surface, proposed.ids))


def _goes_on(member: Member, task: DraftTask) -> bool:
    proposed = task.draft
    if proposed.error is not None or len(proposed.ids) >= task.limit:
        return False
    if proposed.ids and member.vocabulary.is_end(proposed.ids[-1]):
        return False
    return task.enough() is None


def _guess(task: DraftTask, room: int) -> Sequence[int]:
    """Ids that may come next, at most `room`; none in a grammar, whose masks are made token by token."""
    room = min(room, task.limit - len(task.draft.ids) - 1)
    if room < 1 or task.lookup is None or task.grammar is not None:
        return ()
    looked_up = task.lookup.guess(task.draft.ids)
    return (looked_up or (() if task.draft.ids else task.guess))[:room]


def _want(task: DraftTask, guess: Sequence[int]) -> Want:
    start = task.num_ids - 1 if task.draft.ids else task.stable
    last = task.draft.ids[-1:] or task.ids[start:]
    return Want(session=task.session, start=start, tail=[*last, *guess], first=task.num_ids)


def _restrict(member: Member, tasks: Sequence[DraftTask], scores: Scores, offsets: Sequence[int]) -> None:
    """Leave every row with a grammar only what the grammar allows."""
    positions, masks, restricted = [], [], []
    for task, offset in zip(tasks, offsets, strict=True):
        if task.grammar is None:
            continue
        try:
            mask = task.grammar.allowed()
        except GenerationError as error:
            task.draft.error = error
            continue
        if not mask.any():
            task.draft.error = GenerationError(
                "the drafter has no token for what the grammar demands next", hint="allow other characters there"
            )
            continue
        positions.append(offset)
        masks.append(mask)
        restricted.append(task)
    if not positions:
        return
    scores.restrict(positions, np.stack(masks))
    if not member.backend.has_dense_scores:
        for task, (best,) in zip(restricted, scores.top_k(positions, 1)[1], strict=True):
            if np.isneginf(best):  # what is left is no choice of the drafter's
                task.draft.error = GenerationError(
                    "the grammar allows none of the tokens that the drafter's server names",
                    hint="raise the drafter's server.top_k, or take another drafter",
                )


def _take(
    member: Member, tasks: Sequence[DraftTask], guesses: Sequence[Sequence[int]], scores: Scores, offsets: Sequence[int]
) -> None:
    """Append to every row what the drafter chooses: guesses that it would choose itself, then one token more."""
    early = [
        offset + i
        for task, guess, offset in zip(tasks, guesses, offsets, strict=True)
        for i in range(min(len(guess) + 1, task.sampling.min_tokens - task.num_ids))
    ]
    if early and member.vocabulary.symbols.end_ids:
        scores.forbid_end(early)
    best, finite = scores.top1()
    taken: list[tuple[Draft, int, int]] = []
    for task, guess, offset in zip(tasks, guesses, offsets, strict=True):
        if task.draft.error is not None:
            continue
        broken = np.flatnonzero(~finite[offset : offset + len(guess) + 1])
        if len(broken):  # behind a wrong guess, too: a rollback would leave the NaN in the row's cache
            num_before = len(task.session.tokens) - 1 - len(guess) + int(broken[0])
            task.draft.error = NonFiniteLogitsError(member.name, num_before)
            continue
        for position, guessed in enumerate((*guess, None), offset):
            token_id = _chosen(task, scores, position, int(best[position]))
            task.draft.ids.append(token_id)
            task.draft.scores.append((scores, position))
            _follow(member, task)
            if task.lookahead.needs_confidences:
                taken.append((task.draft, position, token_id))
            if token_id != guessed or member.vocabulary.is_end(token_id):
                break
        if guess and task.lookup is not None:
            task.lookup.learn(len(guess), position - offset)
    if taken:
        drafts, positions, ids = zip(*taken, strict=True)
        for proposed, log_prob in zip(drafts, scores.log_probs(positions, ids).tolist(), strict=True):
            proposed.confidences.append(math.exp(log_prob))


def _chosen(task: DraftTask, scores: Scores, position: int, best: int) -> int:
    """The argmax, or a draw from the tempered nucleus."""
    if task.sampling.temperature == 0.0:
        return best
    probs = sampling_probs(scores.dense([position])[0], task.sampling.temperature, task.sampling.top_p)
    return draw(probs, task.uniform())


def _follow(member: Member, task: DraftTask) -> None:
    """Move the row's grammar over the last drafted id, and note whether the grammar left any choice."""
    grammar, key = task.grammar, member.vocabulary.surface(task.draft.ids[-1])
    if grammar is None:
        task.draft.forced.append(False)
    elif not key:  # END: forced if it is all that is left
        task.draft.forced.append(int(np.count_nonzero(grammar.allowed())) == 1)
    else:
        task.draft.forced.append(grammar.forced().startswith(key))
        try:
            grammar.advance(key)
        except GenerationError as error:
            task.draft.error = error


def top_log_probs(scores: Scores, position: int, count: int) -> tuple[list[int], list[float]]:
    """Return the `count` best ids that can be chosen at a position and their log-probabilities, best first."""
    if count == 0:
        return [], []
    ids: list[int] = scores.top_k([position], count)[0][0].tolist()
    values: list[float] = scores.log_probs([position] * len(ids), ids).tolist()
    num_possible = sum(value > -np.inf for value in values)  # a grammar may leave fewer
    return ids[:num_possible], values[:num_possible]

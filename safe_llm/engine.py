"""SAFE decoding (arXiv 2510.15346): the round, for a batch of rows that join and leave between rounds.

    1. draft        the drafter proposes a few tokens per row (`safe_llm.lookahead` says how many)
    2. retokenize   every verifier's tokens of the text, draft included; boundary check
    3. score        one forward pass per verifier over what its cache does not hold yet
    4. walk         merge at each drafted token on which the ensemble must act, up to the first that it replaces
    5. commit       keep what was accepted, and where the ensemble chose another token, that in place of the rest
    6. roll back    happens by itself: a cache holds what the next round asks it to hold

The engine owns no thread and no lock; `safe_llm.ensemble` drives it for many callers.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from safe_llm.alignment import Alignment
from safe_llm.config import EnsembleConfig
from safe_llm.drafting import DraftTask, draft
from safe_llm.errors import ConfigError, MemberError
from safe_llm.events import Timings, added
from safe_llm.grammar import Grammar
from safe_llm.lookahead import AdaptiveLookahead, FixedLookahead, Lookahead, verify_cost
from safe_llm.lookup import Lookup
from safe_llm.member import Member
from safe_llm.methods import make_method
from safe_llm.methods.base import Method
from safe_llm.row import Committed, Row
from safe_llm.types import FinishDetail
from safe_llm.verification import Track, VerifyTask, align, find_non_finite, score
from safe_llm.walk import walk

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)
_REST_S = 30.0
"""For how long a verifier that failed is not asked again, where requests may go on without it."""


class Engine:
    """Decodes rows with one drafter and its verifiers.

    Attributes:
        drafter: Proposes, and its ids are the master record of the text.
        verifiers: Check. Empty in mode `drafter`.
        weights: One per member, drafter first, summing to 1.
        method: How distributions are merged.
        runs_ahead: Whether the drafter goes on while verifiers check. Only the time that takes depends on it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        config: EnsembleConfig,
        *,
        method: Method | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.weights = config.normalized_weights(len(members))
        self.drafter = members[0]
        self.verifiers = () if config.mode == "drafter" else tuple(members[1:])
        self.method = method or make_method(config)
        elsewhere = any(verifier.device != self.drafter.device for verifier in self.verifiers)
        self.runs_ahead = config.mode == "safe" and (elsewhere if config.run_ahead is None else config.run_ahead)
        self._clock = clock
        self._resting: dict[str, tuple[float, str]] = {}  # verifiers that failed: until when, and how
        lacking = [m.name for m in self.members if not m.backend.has_dense_scores]
        if self.verifiers and self.method.needs_dense and lacking:
            raise ConfigError(
                f"method {config.method!r} needs full rows of scores, which {lacking} cannot give",
                hint="use method='unite'",
            )

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that take part, the drafter first."""
        return (self.drafter, *self.verifiers)

    # ------------------------------------------------------------------ rows

    def join(self, row: Row) -> None:
        """Encode the prompt for every member and bring it into the caches.

        Raises:
            ConfigError: The request samples, and the drafter cannot.
            PromptError: The prompt does not fit a member, or a template refuses it. Nothing stays allocated.
            MemberError: A forward pass failed. Nothing stays allocated.
        """
        if row.request.sampling.temperature > 0.0 and not self.drafter.backend.has_dense_scores:
            raise ConfigError(
                f"member {self.drafter.name!r} gives no full rows of scores, which sampling needs",
                hint="use temperature=0, or another drafter",
            )
        if row.request.grammar is not None and self.drafter.vocabulary.symbols.end_id is None:
            raise ConfigError(
                f"member {self.drafter.name!r} has no end token, so it cannot end an answer that follows a grammar",
                hint="use another drafter, or no schema, grammar or tools",
            )
        started = self._clock()
        request = row.request
        prompts = [member.prompter.encode(request.prompt, request.tools) for member in self.members]
        for member, prompt in zip(self.members, prompts, strict=True):
            member.check_prompt(prompt)
        encoded = self._clock()
        row.lookahead = self._lookahead()
        if self.config.lookup and self.config.mode != "every-token":
            row.lookup = Lookup(prompts[0])
        row.forwards_before = {member.name: member.backend.num_forwards for member in self.members}
        row.weight = self.weights[0]
        try:
            row.grammar = self._grammar(row, self.drafter)
            row.session = self.drafter.open(prompts[0])
            self.drafter.prefill(row.session, share=self.config.prefix_caching)
            for verifier, weight, prompt in zip(self.verifiers, self.weights[1:], prompts[1:], strict=False):
                self._let_in(row, verifier, weight, prompt)
        except BaseException:
            self.leave(row)
            raise
        row.spent = Timings(tokenize_s=encoded - started, prefill_s=self._clock() - encoded)

    def _let_in(self, row: Row, verifier: Member, weight: float, prompt: Sequence[int]) -> None:
        """Bring a row's prompt into a verifier, unless that has just failed and the row may do without it."""
        until, reason = self._resting.get(verifier.name, (-math.inf, ""))
        if self._clock() < until:
            row.lose(verifier.name, reason)
            return
        grammar = self._grammar(row, verifier)
        with self._surviving(verifier, [row]):
            track = Track(verifier, weight, verifier.open(prompt), Alignment(verifier.vocabulary), grammar)
            row.tracks.append(track)
            verifier.prefill(track.session, share=self.config.prefix_caching)

    @staticmethod
    def _grammar(row: Row, member: Member) -> Grammar | None:
        return None if row.request.grammar is None else member.follow(row.request.grammar)

    def leave(self, row: Row) -> None:
        """Free the row's caches, whatever state it is in; the last row's are kept for a prompt that begins alike."""
        keep = self.config.prefix_caching and row.error is None  # what failed may hold a NaN
        if row.session is not None:
            self.drafter.close(row.session, keep=keep)
        for track in row.tracks:
            track.member.close(track.session, keep=keep)
        row.session, row.tracks = None, []

    def release(self) -> None:
        """Free what was kept of rows that have left."""
        for member in self.members:
            member.release()

    # ------------------------------------------------------------------ the round

    def round(self, rows: Sequence[Row]) -> None:
        """Run one round for every row; events are appended to the rows.

        A row that fails alone (non-finite logits) gets its error; the others go on.

        Raises:
            MemberError: A member's forward pass failed, which concerns every row of the batch.
        """
        marks = [self._clock()]
        everybody, rows = rows, self._draft(rows)
        marks.append(self._clock())
        tasks = [self._task(row) for row in rows]
        marks.append(self._clock())
        for verifier in self.verifiers:
            with self._surviving(verifier, rows):
                score(verifier, [task for task in tasks if task.error is None])
        ahead_s = self._run_ahead(rows) if self.runs_ahead else 0.0
        self._hear(rows, tasks)
        committed: list[tuple[Row, Committed]] = []
        for row, task in zip(rows, tasks, strict=True):
            error = task.error or row.draft.error
            if error is not None or not task.keys:
                row.error, row.finished = error, None if error else FinishDetail.CONTEXT
                continue
            verdict = walk(
                task,
                drafter=self.drafter,
                weights=row.weights,
                method=self.method,
                threshold=self.config.consensus_threshold,
                clock=self._clock,
            )
            committed.append((row, row.commit(verdict, self.drafter, self._clock())))
        marks.append(self._clock())
        waiting = [row for row in everybody if row not in rows and not row.is_done]
        self._report(committed, waiting, marks, ahead_s)
        for row in rows:
            if row.finished is not None and row.error is None:
                row.finish(self.members, self._clock())

    def _hear(self, rows: Sequence[Row], tasks: Sequence[VerifyTask]) -> None:
        """Wait for the verifiers' passes. Scores that are not finite are a failure in that row alone."""
        for verifier in self.verifiers:
            with self._surviving(verifier, rows):
                for i, error in find_non_finite(verifier, tasks):
                    if self.config.on_verifier_failure == "fail":
                        tasks[i].error = tasks[i].error or error
                    else:
                        self._lose(verifier, [rows[i]], error)

    @contextmanager
    def _surviving(self, verifier: Member, rows: Sequence[Row]) -> Iterator[None]:
        """Let the rows go on without the verifier if it fails inside, and it may (`on_verifier_failure`)."""
        try:
            yield
        except MemberError as error:
            if self.config.on_verifier_failure == "fail":
                raise
            self._resting[verifier.name] = self._clock() + _REST_S, str(error)
            self._lose(verifier, rows, error)

    @staticmethod
    def _lose(verifier: Member, rows: Sequence[Row], error: MemberError) -> None:
        _LOG.warning("going on without a verifier in %d answers: %s", len(rows), error)
        for row in rows:
            for track in row.tracks:
                if track.member is verifier:
                    verifier.close(track.session)
            row.lose(verifier.name, str(error))

    def _draft(self, rows: Sequence[Row]) -> list[Row]:
        """Step 1, and which rows to verify. Rows without room end here; rows whose logits are not finite fail here."""
        tasks = {}
        for row in rows:
            task = self._draft_task(row)
            if task is None:
                row.finished = FinishDetail.CONTEXT
                row.finish(self.members, self._clock())
            else:
                tasks[row] = task
        are_done = draft(self.drafter, list(tasks.values()))
        for row, task in tasks.items():
            row.error = row.draft.error
            row.draft.size = min(len(row.draft.ids), task.enough() or task.limit)
        return [row for row, is_done in zip(tasks, are_done, strict=True) if is_done and row.error is None]

    def _run_ahead(self, rows: Sequence[Row]) -> float:
        """Let the drafter go on behind the drafts that are being verified; return the seconds that took.

        Verifiers on other devices are at work meanwhile. What is drafted in vain is dropped with the rest of its draft.
        """
        started = self._clock()
        tasks = [self._draft_task(row, first=row.draft.size) for row in rows]
        draft(self.drafter, [task for task in tasks if task is not None])
        return self._clock() - started

    def _draft_task(self, row: Row, first: int = 0) -> DraftTask | None:
        """Return what to ask the drafter for, or None if the row has no room for more."""
        limit = self._limit(row)
        if limit < 1 or row.session is None:
            return None
        return DraftTask(
            session=row.session,
            ids=row.ids,
            stable=row.stable,
            draft=row.draft,
            limit=limit,
            lookahead=row.lookahead,
            first=first,
            sampling=row.request.sampling,
            uniform=row.uniform,
            lookup=row.lookup,
            guess=row.guess,
            grammar=row.grammar,
        )

    def _lookahead(self) -> Lookahead:
        """Return a new row's rule for the length of drafts."""
        if self.config.mode == "every-token" or (self.config.lookahead == "adaptive" and not self.verifiers):
            return FixedLookahead(1)  # without a verifier, a round costs nothing, and a stream comes token by token
        if self.config.lookahead != "adaptive":
            return FixedLookahead(self.config.lookahead)
        return AdaptiveLookahead(verify_cost([member.num_bytes for member in self.members]))

    def _limit(self, row: Row) -> int:
        """Most tokens that a draft may have: what is left of max_tokens, and of every member's context window.

        Never fewer than are drafted already: those did fit.
        """
        if row.session is None:
            return 0
        rooms = [self.drafter.room(row.session, len(row.ids))]
        rooms += [track.room for track in row.tracks]
        return max(min(row.request.sampling.max_tokens - len(row.ids), *rooms), len(row.draft.ids))

    def _task(self, row: Row) -> VerifyTask:
        """Step 2. The draft is shortened until the text fits every verifier's context window."""
        task = self._new_task(row)
        if not self.verifiers:
            return task
        every_token = self.config.mode == "every-token"
        while task.keys:
            length = len(row.text)
            row.text += b"" if every_token else b"".join(task.keys)
            try:
                align(task, row.text, row.unchanged)
            finally:
                del row.text[length:]
            row.unchanged = length
            if all(track.room >= 0 for track in row.tracks):
                break
            row.draft.drop_last()
            task = self._new_task(row)
        return task

    def _new_task(self, row: Row) -> VerifyTask:
        keys = [self.drafter.vocabulary.surface(token_id) for token_id in row.draft.ids[: row.draft.size]]
        offsets = [len(row.text)]
        for key in keys[:-1]:
            offsets.append(offsets[-1] + len(key))
        return VerifyTask(
            draft=row.draft,
            keys=keys,
            offsets=offsets,
            tracks=row.tracks,
            position=len(row.ids),
            sampling=row.request.sampling,
            uniform=row.uniform,
            every_token=self.config.mode == "every-token",
            detailed=row.detailed,
        )

    def _reason(self, row: Row) -> str:
        if row.request.sampling.temperature > 0.0:
            return "rejected"
        return "every-token" if self.config.mode == "every-token" else "no-consensus"

    def _report(
        self,
        committed: Sequence[tuple[Row, Committed]],
        waiting: Sequence[Row],
        marks: Sequence[float],
        ahead_s: float,
    ) -> None:
        """Charge the round's phases to every row, since all of them waited for it, and emit their events."""
        drafting, tokenizing, verifying = (b - a for a, b in itertools.pairwise(marks))
        merging = sum(done.verdict.ensemble_s for _, done in committed)
        took = Timings(
            draft_s=drafting + ahead_s,
            tokenize_s=tokenizing,
            verify_s=verifying - merging - ahead_s,
            ensemble_s=merging,
            total_s=marks[-1] - marks[0],
        )
        for row in waiting:
            row.spent = added(row.spent, took)
        for row, done in committed:
            row.spent = added(row.spent, took)
            row.report(done, self._reason(row), took)

"""One request while it runs: its text, its ids on every member, and what it will report."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from safe_llm.detokenization import TextStream
from safe_llm.drafting import Draft, top_log_probs
from safe_llm.errors import GenerationError, SafeLLMError
from safe_llm.events import (
    Counters,
    EnsemblePoint,
    Event,
    GenerationFinished,
    LostVerifier,
    Result,
    RoundFinished,
    TextDelta,
    Timings,
)
from safe_llm.grammar import Grammar
from safe_llm.lookahead import FixedLookahead, Lookahead
from safe_llm.lookup import Lookup
from safe_llm.member import Member, Session
from safe_llm.types import FinishDetail, GenerationRequest, TokenLogprob, Usage
from safe_llm.verification import Track
from safe_llm.walk import Verdict

__all__ = ["Committed", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a round did to one row.

    Attributes:
        verdict: The verdict.
        num_draft_tokens: How many tokens were drafted.
        num_tokens: How many were committed, END included.
        data: Their bytes.
        text: The text that became final.
    """

    verdict: Verdict
    num_draft_tokens: int
    num_tokens: int
    data: bytes
    text: str


@dataclass(slots=True, eq=False)  # a row is itself, whatever it looks like
class Row:
    """One request's state between rounds.

    Attributes:
        request: What was asked.
        index: Its number in events.
        submitted_s: Clock when it was submitted.
        detailed: Somebody reads the events: report what the decisions did not need, too.
        session: The drafter's session; None before the row has joined.
        tracks: The row on each verifier that takes part.
        weight: The drafter's.
        grammar: Where the row stands in its grammar, in the drafter's tokens; None without one.
        ids: Generated drafter ids, END excluded.
        text: Their bytes: the truth that every member's ids are views of.
        stable: How many of `ids` were committed before the last round.
        draft: What was drafted behind `ids` and not yet decided.
        lookahead: How far it should go.
        lookup: Guesses at what comes next; None for none.
        guess: Ids that a verifier would put behind `ids`.
        unchanged: Bytes of `text` that no verifier's tokens need to be looked at again for.
        events: Events that nobody has taken yet.
        finished: Why the answer ended; None while it runs.
        has_result: The result has been emitted.
        error: Why the row failed, if it did.
        seed: What sampling was seeded with; None when greedy.
        spent: Seconds per phase so far.
        forwards_before: The members' forward passes when the row joined.
    """

    request: GenerationRequest
    index: int
    submitted_s: float
    detailed: bool = False
    session: Session | None = None
    tracks: list[Track] = field(default_factory=list)
    weight: float = 1.0
    grammar: Grammar | None = None
    ids: list[int] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    stable: int = 0
    draft: Draft = field(default_factory=Draft)
    lookahead: Lookahead = field(default_factory=lambda: FixedLookahead(1))
    lookup: Lookup | None = None
    guess: Sequence[int] = ()
    unchanged: int = 0
    events: deque[Event] = field(default_factory=deque)
    finished: FinishDetail | None = None
    has_result: bool = False
    error: BaseException | None = None
    seed: int | None = None
    spent: Timings = field(default_factory=Timings)
    forwards_before: dict[str, int] = field(default_factory=dict)
    _rng: np.random.Generator | None = None
    _stream: TextStream = field(init=False)
    _answer: list[str] = field(default_factory=list)
    _points: list[EnsemblePoint] = field(default_factory=list)
    _outcomes: Counter[str] = field(default_factory=Counter)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _lost: list[LostVerifier] = field(default_factory=list)
    _num_rounds: int = 0
    _num_drafted: int = 0
    _num_accepted: int = 0
    _num_tokens: int = 0
    _ttft_s: float | None = None

    def __post_init__(self) -> None:
        self._stream = TextStream(self.request.sampling.stop)
        if self.request.sampling.temperature > 0.0:
            seed = self.request.sampling.seed
            self.seed = secrets.randbits(32) if seed is None else seed
            self._rng = np.random.default_rng(self.seed)

    @property
    def is_done(self) -> bool:
        """Whether nothing more will happen to this row: its result is out, or it failed."""
        return self.has_result or self.error is not None

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of those who take part, the drafter's first; their sum is 1."""
        weights = (self.weight, *(track.weight for track in self.tracks))
        return tuple(weight / sum(weights) for weight in weights) if self._lost else weights

    def uniform(self) -> float:
        """Draw from [0, 1) with this row's own generator, whoever shares the batch."""
        if self._rng is None:
            raise SafeLLMError("a greedy row draws nothing")
        return float(self._rng.random())

    # ------------------------------------------------------------------ commit

    def commit(self, verdict: Verdict, member: Member, now: float) -> Committed:
        """Append what a round decided, token by token, up to the first thing that ends the answer.

        Args:
            verdict: What verification made of the draft.
            member: The drafter.
            now: Clock.
        """
        draft, before, self.stable = self.draft, len(self.text), len(self.ids)
        text, count = "", 0
        for token_id in [*draft.ids[: verdict.num_accepted], *self._replacement(member, verdict)]:
            # only the first piece of a replacement stands where the drafter was asked
            self._log(member, draft, count, token_id, known=count <= verdict.num_accepted)
            count += 1
            if member.vocabulary.is_end(token_id):
                self.finished = FinishDetail.END
                break
            surface = member.vocabulary.surface(token_id)
            self.ids.append(token_id)
            self.text += surface
            text += self._stream.feed(surface)
            if self._stream.stopped:
                self.finished = FinishDetail.STOP_STRING
                break
            if self._num_tokens + count >= self.request.sampling.max_tokens:
                self.finished = FinishDetail.MAX_TOKENS
                break
        try:
            for grammar in self._grammars():
                grammar.advance(bytes(self.text[before:]))
        except GenerationError as error:
            self.error = error
        self._count(draft, verdict, count)
        self._go_on(verdict, member)
        if self._ttft_s is None:
            self._ttft_s = now - self.submitted_s
        return Committed(
            verdict=verdict,
            num_draft_tokens=draft.num_new,
            num_tokens=count,
            data=bytes(self.text[before:]),
            text=text,
        )

    def _grammars(self) -> list[Grammar]:
        return [g for g in (self.grammar, *(track.grammar for track in self.tracks)) if g is not None]

    def lose(self, verifier: str, reason: str) -> None:
        """Go on without a verifier for the rest of the answer.

        Args:
            verifier: Its name; it need not have joined.
            reason: What happened to it.
        """
        self._lost.append(LostVerifier(member=verifier, position=len(self.ids), reason=reason))
        # a task under way shares this list
        self.tracks[:] = [track for track in self.tracks if track.member.name != verifier]

    def _go_on(self, verdict: Verdict, member: Member) -> None:
        """Keep what was drafted and not decided, and learn from what was."""
        draft, was_replaced = self.draft, verdict.replacement is not None
        num_done = draft.size if was_replaced else verdict.num_accepted
        self.lookahead.learn(
            draft.confidences[:num_done], num_decided=len(verdict.decisions), was_replaced=was_replaced
        )
        if self.lookup is not None:
            self.lookup.extend(self.ids[self.stable :])
            self.guess = member.vocabulary.ids_of(verdict.guess) if verdict.guess else ()
        self.draft = Draft() if was_replaced else draft.after(verdict.num_accepted)

    def report(self, committed: Committed, reason: str, timings: Timings) -> None:
        """Emit a round's events: its ensemble points, the round, the text it made visible.

        Args:
            committed: What the round did.
            reason: Why the ensemble acts, where it does.
            timings: What the round took.
        """
        verdict = committed.verdict
        decided = verdict.decisions[: committed.num_tokens]
        for decision, merged in ((decided[i], merged) for i, merged in verdict.merges if i < len(decided)):
            point = EnsemblePoint(
                index=self.index,
                position=decision.position,
                byte_offset=decision.byte_offset,
                drafted=decision.token if merged.drafted is None else merged.drafted,
                chosen=merged.chosen,
                reason=reason,
                probabilities=decision.probabilities,
                candidates=merged.candidates,
            )
            self._points.append(point)
            self.events.append(point)
        self.events.append(
            RoundFinished(
                index=self.index,
                decisions=decided,
                num_draft_tokens=committed.num_draft_tokens,
                committed=committed.data,
                timings=timings,
            )
        )
        self._emit_text(committed.text)

    @staticmethod
    def _replacement(member: Member, verdict: Verdict) -> Sequence[int]:
        if verdict.replacement is None:
            return []
        end_id = member.vocabulary.symbols.end_id
        if not verdict.replacement and end_id is not None:
            return [end_id]
        return member.vocabulary.ids_of(verdict.replacement)

    def _log(self, member: Member, draft: Draft, number: int, token_id: int, *, known: bool) -> None:
        count = self.request.sampling.logprobs
        if count is None:
            return
        token = member.vocabulary.surface(token_id)
        if not known:
            self._logprobs.append(TokenLogprob(token=token, logprob=None))
            return
        scores, position = draft.scores[number]
        ids, values = top_log_probs(scores, position, count)
        top = tuple(zip(map(member.vocabulary.surface, ids), values, strict=True))
        logprob = float(scores.log_probs([position], [token_id])[0])
        self._logprobs.append(TokenLogprob(token=token, logprob=logprob, top=top))

    def _count(self, draft: Draft, verdict: Verdict, committed: int) -> None:
        self._num_rounds += 1
        self._num_drafted += draft.num_new
        decided = verdict.decisions[:committed]
        self._num_accepted += sum(1 for d in decided if d.outcome != "replaced")
        self._outcomes.update(d.outcome.value for d in decided)
        self._num_tokens += committed

    def _emit_text(self, text: str) -> None:
        if text:
            self._answer.append(text)
            self.events.append(TextDelta(index=self.index, text=text))

    # ------------------------------------------------------------------ end

    def finish(self, members: Sequence[Member], now: float) -> None:
        """Flush the text and emit the last event."""
        detail = self.finished or FinishDetail.END
        self._emit_text(self._stream.finish())
        if self._stream.stopped:
            detail = FinishDetail.STOP_STRING
        visible = self._stream.num_bytes
        points = tuple(p for p in self._points if not self._stream.stopped or p.byte_offset < visible)
        result = Result(
            text="".join(self._answer),
            finish_reason=detail.reason,
            finish_detail=detail,
            usage=Usage(
                prompt_tokens=0 if self.session is None else self.session.prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=0 if self.session is None else self.session.reused,
            ),
            points=points,
            counters=self._counters(members),
            timings=replace(
                self.spent,
                total_s=now - self.submitted_s,
                ttft_s=self._ttft_s,
                num_tokens=self._num_tokens,
            ),
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
            seed=self.seed,
            lost=tuple(self._lost),
        )
        self.events.append(GenerationFinished(index=self.index, result=result))
        self.has_result = True

    def _counters(self, members: Sequence[Member]) -> Counters:
        forwards: Mapping[str, int] = {
            m.name: m.backend.num_forwards - self.forwards_before.get(m.name, 0) for m in members
        }
        return Counters(
            num_rounds=self._num_rounds,
            num_draft_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            num_tokens=self._num_tokens,
            num_ensembled=len(self._points),
            num_replaced=sum(1 for point in self._points if point.replaced),
            outcomes=dict(self._outcomes),
            num_forwards=forwards,
        )

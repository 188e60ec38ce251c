"""One model with its vocabulary and its rows: the only owner of mutable model state.

A `Session` is one request on one member: the ids of its prompt and of the generated text, and how many of them the
cache holds. `Member.score` makes the cache hold given ids and returns scores; append, rollback and re-scoring are all
this one operation.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from safe_llm.backends.base import Backend, Feed, Scores
from safe_llm.backends.kinds import KINDS
from safe_llm.config import MemberConfig
from safe_llm.errors import ContextOverflowError, UnsupportedModelError
from safe_llm.grammar import Grammar, GrammarTokenizer
from safe_llm.prompting import Prompter, load_tokenizer
from safe_llm.vocabulary import Vocabulary

__all__ = ["Member", "Session", "Want"]

# A pass over fewer ids costs hardly more than the pass over one id that is due anyway: there is nothing to save.
_MIN_SHARED = 32


@dataclass(slots=True)
class Session:
    """One request's ids on one member.

    Attributes:
        row: The backend's handle.
        tokens: Prompt ids, then the ids of the generated text.
        prompt_tokens: How many of them are the prompt.
        resident: How many of them the cache holds.
        reused: How many prompt ids were taken over from another session instead of computed.
    """

    row: int
    tokens: list[int]
    prompt_tokens: int
    resident: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Scores that are wanted of one session.

    Attributes:
        session: The session.
        start: Generated ids before this index are as they were at the last call.
        tail: The generated ids from `start` on.
        first: Scores are wanted after `first` generated ids and after every later one.
    """

    session: Session
    start: int
    tail: Sequence[int]
    first: int


class Member:
    """A model that takes part in an ensemble.

    Attributes:
        name: How errors, events and traces call it.
        backend: Where its scores come from.
        vocabulary: What its ids mean.
        prompter: How it reads prompts.
        fingerprint: Identity of its weights, for cache keys and traces.
        licence: Of the weights, as far as known.
        dtype: Of the weights, as far as known.
        device: Where they are, as far as known.
        num_bytes: Of the weights, as far as known.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        vocabulary: Vocabulary,
        *,
        prompter: Prompter | None = None,
        fingerprint: str | None = None,
        licence: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        num_bytes: int | None = None,
    ) -> None:
        if backend.width != vocabulary.width:
            raise UnsupportedModelError(
                f"member {name!r}: the model has {backend.width} columns, its vocabulary {vocabulary.width}"
            )
        self.name = name
        self.backend = backend
        self.vocabulary = vocabulary
        self.prompter = prompter or Prompter(vocabulary)
        self.fingerprint = fingerprint or f"{name}:{secrets.token_hex(8)}"  # unknown weights are nobody else's
        self.licence = licence
        self.dtype = dtype
        self.device = device
        self.num_bytes = num_bytes
        self._grammar_tokenizer: GrammarTokenizer | None = None
        self._sessions: dict[int, Session] = {}  # open ones by row
        self._idle: Session | None = None  # the last one, closed, whose row is still there

    @classmethod
    def load(cls, config: MemberConfig, *, device: str | None = None, progress: bool = True) -> Member:
        """Fetch (if need be) and load the member that `config` describes.

        Args:
            config: Which model.
            device: Where to put it if `config` does not say.
            progress: Show progress bars on a terminal.

        Raises:
            ModelError: It cannot be had, is damaged, or cannot be a member.
        """
        from safe_llm.models import resolve
        from safe_llm.models.verdicts import Verdict

        kind = KINDS[config.backend]
        resolved = resolve(config, needs=kind.needs, progress=progress)
        model = kind.open_model(config, resolved.weights, device)
        files = load_tokenizer(
            resolved.path,
            canonical=resolved.source in ("demo", "gguf"),
            trust_remote_code=config.trust_remote_code,
        )
        ends = [*model.end_ids, *([] if files.eos_id is None else [files.eos_id])]
        vocabulary = Vocabulary(files.spec, width=model.width, end_ids=ends)
        fingerprint = f"{resolved.fingerprint}:{model.identity}"
        verdict = Verdict(fingerprint, str(model.device))
        backend = model.connect(vocabulary.symbols, config.self_check and not verdict.passed)
        if config.self_check:
            verdict.remember()
        return cls(
            config.display_name,
            backend,
            vocabulary,
            prompter=Prompter(vocabulary, files.template, config.template_kwargs),
            fingerprint=fingerprint,
            licence=resolved.licence,
            dtype=model.dtype,
            device=model.device,
            num_bytes=model.num_bytes,
        )

    # ------------------------------------------------------------------ sessions

    def follow(self, grammar: str) -> Grammar:
        """Return the beginning of a grammar, with masks over this member's tokens."""
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = GrammarTokenizer(self.vocabulary)
        return Grammar(self._grammar_tokenizer, grammar)

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise ContextOverflowError unless the prompt and one more token fit."""
        if len(prompt_ids) >= self.backend.max_context:
            raise ContextOverflowError(self.name, len(prompt_ids), self.backend.max_context)

    @property
    def num_sessions(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """Start a session; nothing is computed yet. It takes the row of a kept session if that begins alike."""
        self.check_prompt(prompt_ids)
        session = self._taken_over(prompt_ids)
        if session is None:
            self.release()
            session = Session(self.backend.open(), list(prompt_ids), len(prompt_ids))
        self._sessions[session.row] = session
        return session

    def _taken_over(self, prompt_ids: Sequence[int]) -> Session | None:
        idle = self._idle
        if idle is None:
            return None
        shared = _common_prefix(idle.tokens[: idle.resident], prompt_ids[:-1])
        if shared < _MIN_SHARED:
            return None
        self._idle = None
        self.backend.rollback(idle.row, shared)
        return Session(idle.row, list(prompt_ids), len(prompt_ids), resident=shared, reused=shared)

    def prefill(self, session: Session, *, share: bool = True) -> None:
        """Bring all but the last prompt id into the cache; the last one goes with the first scores that are wanted.

        Args:
            session: A session that was just opened.
            share: A beginning that another open session holds, as its prompt or its answer, is taken over instead of
                computed. A session whose scores were not finite has to be closed before: its NaN would be taken over.
        """
        ids = session.tokens[:-1]
        source, shared = self._longest_shared(ids) if share and not session.reused else (None, 0)
        if source is not None:
            session.resident = session.reused = self.backend.share(session.row, source.row, shared)
        if session.resident < len(ids):
            self.backend.forward([Feed(row=session.row, ids=ids[session.resident :])])
            session.resident = len(ids)

    def _longest_shared(self, ids: Sequence[int]) -> tuple[Session | None, int]:
        """Return the open session whose cache begins with the most of `ids`, and with how many; None if too few."""
        source, longest = None, _MIN_SHARED - 1
        for session in self._sessions.values():
            held = session.tokens[: session.resident]
            # the slices spare most sessions the slow comparison
            if held[: longest + 1] == ids[: longest + 1] and (shared := _common_prefix(held, ids)) > longest:
                source, longest = session, shared
        return source, longest

    def close(self, session: Session, *, keep: bool = False) -> None:
        """Give the session's cache row back.

        Args:
            session: An open session.
            keep: Keep its row, if it is the last one, for a next prompt that begins alike (an agent's next step).
        """
        del self._sessions[session.row]
        if keep and not self._sessions:
            self._idle = session
        else:
            self.backend.close(session.row)

    def release(self) -> None:
        """Give the row back that a closed session has left, if one has."""
        idle, self._idle = self._idle, None
        if idle is not None:
            self.backend.close(idle.row)

    def room(self, session: Session, generated: int) -> int:
        """How many more ids than `generated` fit behind the prompt."""
        return self.backend.max_context - session.prompt_tokens - generated

    def score(self, wants: Sequence[Want]) -> tuple[Scores, list[int]]:
        """Make each session hold its ids, in one ragged forward pass, and return the wanted scores.

        Returns:
            The scores of all sessions, and for each want the index of its first position in them.

        Raises:
            MemberError: The model failed. Every session is still consistent with its cache.
        """
        feeds: list[Feed] = []
        offsets: list[int] = []
        total = 0
        for want in wants:
            feed = self._plan(want)
            feeds.append(feed)
            offsets.append(total)
            total += feed.keep
        scores = self.backend.forward(feeds)
        for want in wants:
            want.session.resident = len(want.session.tokens)
        return scores, offsets

    def _plan(self, want: Want) -> Feed:
        session = want.session
        tokens = session.tokens
        at = session.prompt_tokens + want.start
        same = _common_prefix(tokens[at:], want.tail)
        tokens[at + same :] = want.tail[same:]
        first_kept = session.prompt_tokens + want.first - 1
        session.resident = min(session.resident, at + same, first_kept)
        self.backend.rollback(session.row, session.resident)
        return Feed(row=session.row, ids=tokens[session.resident :], keep=len(tokens) - first_kept)

    def peek(self, session: Session, generated: int, ids: Sequence[int]) -> Scores:
        """Return the scores after `ids`, had they followed the first `generated` ids. One forward pass.

        The cache is rolled back; what it loses is fed again when it is next wanted.
        """
        known = session.prompt_tokens + generated
        session.resident = min(session.resident, known)
        self.backend.rollback(session.row, session.resident)
        scores = self.backend.forward([Feed(row=session.row, ids=[*session.tokens[session.resident : known], *ids])])
        self.backend.rollback(session.row, known)
        session.resident = known
        return scores


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids two sequences have in common at their beginnings."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same

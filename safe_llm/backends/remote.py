"""Members whose weights a server holds: what vLLM and SGLang have in common.

A row is a list of ids here, and nothing there: every call carries the whole text, and the server's prefix cache spares
it the part that it has computed before. Rolling back is free. What a server has said of a row's text is remembered, so
that a drafter asked token by token calls once for several.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from safe_llm.backends.base import Feed, Symbols
from safe_llm.backends.feeds import check_feeds
from safe_llm.backends.sparse import Position, SparseScores
from safe_llm.errors import MemberError, SafeLLMError

__all__ = ["Answer", "Question", "RemoteBackend", "Server", "position"]

_REMEMBERED = 256
"""Positions back from a row's end that are remembered; the engine asks for those of one draft again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One call.

    Attributes:
        ids: The whole text of a row.
        first: Scores are wanted after the first `first` ids (at least 1), and after every later one.
        num_new: Ids to generate behind it, greedily, at least 1.
        session: Names the row, so that a router can send all its calls to the machine that has its prefix.
    """

    ids: Sequence[int]
    first: int
    num_new: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server says.

    Attributes:
        positions: One for each length of the text from the question's `first` on, through the generated ids but the
            last: len(ids) - first + len(generated).
        generated: At least one id.
        num_computed: How many ids of the text it had to compute for that.
    """

    positions: Sequence[Position]
    generated: Sequence[int]
    num_computed: int


class Server(Protocol):
    """A server and its protocol.

    Attributes:
        name: The member, for errors.
        top_k: How many ids it names at every position.
        context: Ids that a text and what is generated behind it may have together.
    """

    name: str
    top_k: int
    context: int

    def ask(self, question: Question) -> Answer:
        """Make one call, from any thread.

        Raises:
            SafeLLMError: There is no usable answer.
        """
        ...


@dataclass(slots=True)
class _Row:
    """A row.

    Attributes:
        ids: What it holds.
        session: Its name for routers.
        asked: The last question and its answer, until that is taken in.
        path: The text of which something is known; it may go on behind `ids`, where the server has generated.
        known: What comes after the first n ids of `path`.
    """

    ids: list[int] = field(default_factory=list)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    asked: tuple[Question, Future[Answer]] | None = None
    path: list[int] = field(default_factory=list)
    known: dict[int, Position] = field(default_factory=dict)

    def take_in(self) -> None:
        """Remember the last answer, if there is one by now."""
        if self.asked is None or not self.asked[1].done():
            return
        (question, future), self.asked = self.asked, None
        if future.exception() is None:
            answer = future.result()
            self.path = [*question.ids, *answer.generated]
            self.known |= dict(enumerate(answer.positions, question.first))

    def cut(self, length: int) -> None:
        """Forget what is known of the path behind its first `length` ids; then the path is `ids`."""
        self.path = self.ids.copy()
        self.known = {at: known for at, known in self.known.items() if at <= length}

    def follow(self) -> None:
        """Forget what is known of another text than `ids`, and of what is far behind."""
        if self.path[: len(self.ids)] != self.ids:
            pairs = zip(self.path, self.ids, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.cut(same)
        oldest = len(self.ids) - _REMEMBERED
        if min(self.known, default=oldest) < oldest - _REMEMBERED:
            self.known = {at: known for at, known in self.known.items() if at >= oldest}


class RemoteBackend:
    """A `Backend` on a server.

    `forward` sends one call per row, all at once, and does not wait: the first method of its scores does, and raises
    what went wrong. Until then rows are as if it had gone well, which does no harm, since every call is complete.

    Attributes:
        num_calls: Calls so far; a forward pass is one call per row, and none for a row whose answer is known.
        num_sent: Ids sent with them.
        num_computed: Ids that the server had to compute, by its own account.
    """

    has_dense_scores = False
    cheap_tokens = 1  # a guess would be a call of its own, in place of an answer that is there for several tokens

    def __init__(
        self,
        server: Server,
        symbols: Symbols,
        *,
        max_context: int | None = None,
        tokens_per_call: int = 1,
    ) -> None:
        """Connect rows to a server.

        Args:
            server: The server.
            symbols: Which ids it can name, and what they mean.
            max_context: Lowers the server's own limit.
            tokens_per_call: Ids to ask for where only the text's last position is wanted, as a drafter does.
        """
        self.name = server.name
        self.width = len(symbols.usable)
        self.max_context = min(server.context - 1, max_context or server.context)  # one has to be generated
        self.num_forwards = self.num_calls = self.num_sent = self.num_computed = 0
        self._server = server
        self._symbols = symbols
        self._tokens_per_call = tokens_per_call
        self._rows: dict[int, _Row] = {}
        self._handles = itertools.count()
        self._clock = _Clock()
        self._counting = threading.Lock()

    @property
    def forward_s(self) -> float:
        """Seconds in which at least one call was under way; does not wait for those that are."""
        return self._clock.seconds()

    def open(self) -> int:
        """Take a new empty row."""
        row = next(self._handles)
        self._rows[row] = _Row()
        return row

    def close(self, row: int) -> None:
        """Give a row back. A call under way goes on, and its answer is dropped."""
        del self._rows[row]

    def length(self, row: int) -> int:
        """Return how many ids the row holds."""
        return len(self._rows[row].ids)

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first `length` ids of a row."""
        held = self._rows[row].ids
        if not 0 <= length <= len(held):
            raise ValueError(f"cannot roll a row of {len(held)} ids back to {length}")
        del held[length:]

    def share(self, row: int, source: int, length: int) -> int:
        """Return 0: the server finds shared beginnings by itself."""
        held, given = self.length(row), self.length(source)
        if held or not 0 <= length <= given:
            raise ValueError(f"cannot give a row of {held} ids the first {length} ids of a row of {given}")
        return 0

    def forward(self, feeds: Sequence[Feed]) -> SparseScores:
        """Append the feeds' ids and ask for the scores; see `Backend.forward`. Does not wait for them."""
        check_feeds(self, feeds, num_ids=self.width)
        before = self.num_calls
        answers = [self._answer(feed) for feed in feeds]
        self.num_forwards += self.num_calls > before

        def wait_for_all() -> list[Position]:
            return [known for answer in answers for known in answer()]

        return SparseScores(sum(feed.keep for feed in feeds), self._symbols, wait_for_all)

    def _answer(self, feed: Feed) -> Callable[[], Sequence[Position]]:
        """Append one feed, ask the server for what is not known yet, and return what waits for the kept positions."""
        row = self._rows[feed.row]
        is_prompt = not row.ids
        row.take_in()
        row.ids += map(int, feed.ids)
        row.follow()
        lengths = range(len(row.ids) - feed.keep + 1, len(row.ids) + 1)
        known = [row.known[length] for length in itertools.takewhile(row.known.__contains__, lengths)]
        if len(known) == len(lengths):
            return lambda: known
        room = self._server.context - len(row.ids)
        question = Question(
            ids=tuple(row.ids),
            first=lengths[len(known)],
            # nobody reads what comes behind a prompt without its last id, which is what a row begins with
            num_new=1 if is_prompt or feed.keep > 1 else min(self._tokens_per_call, room),
            session=row.session,
        )
        future = self._call(question, None if row.asked is None else row.asked[1])
        row.asked = (question, future)
        row.cut(len(row.ids))
        return lambda: [*known, *future.result().positions[: len(lengths) - len(known)]]

    def _call(self, question: Question, earlier: Future[Answer] | None) -> Future[Answer]:
        """Ask in a thread of its own; after the row's earlier call, whose prefix the server can then use."""
        future: Future[Answer] = Future()

        def run() -> None:
            try:
                if earlier is not None:
                    wait([earlier])
                future.set_result(self._checked(question, self._server.ask(question)))
            except MemberError as error:
                future.set_exception(error)
            except SafeLLMError as error:
                failed = MemberError(self.name, str(error.args[0]), hint=error.hint)
                failed.__cause__ = error
                future.set_exception(failed)
            except BaseException as error:  # whatever it is, the reader of the scores must not wait for ever
                future.set_exception(error)
            finally:
                self._clock.stop()

        self.num_calls += 1
        self.num_sent += len(question.ids)
        self._clock.start()
        threading.Thread(target=run, name=f"safe-llm call to {self.name}", daemon=True).start()
        return future

    def _checked(self, question: Question, answer: Answer) -> Answer:
        """Return the answer if it says as much as was asked for."""
        wanted = len(question.ids) - question.first + len(answer.generated)
        if not answer.generated or len(answer.positions) != wanted:
            raise MemberError(
                self.name,
                f"its server gives the scores of {len(answer.positions)} positions where {wanted} were asked for",
                hint="see the server's version",
            )
        fewest = min(len(named.ids) for named in answer.positions)
        if fewest < min(self._server.top_k, self.width):
            raise MemberError(
                self.name, f"its server names {fewest} ids at a position where {self._server.top_k} were asked for"
            )
        if max(int(named.ids.max()) for named in answer.positions) >= self.width:
            raise MemberError(
                self.name,
                f"its server names an id outside of the vocabulary of {self.width}",
                hint="give the tokenizer that belongs to the server's model",
            )
        with self._counting:
            self.num_computed += answer.num_computed
        return answer


class _Clock:
    """Seconds in which anything was under way, however much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = self._since = 0.0
        self._running = 0

    def start(self) -> None:
        """Something begins."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1

    def stop(self) -> None:
        """Something ends."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._total += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the sum so far."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._running else 0.0)


def position(name: str, named: Mapping[int, float], top_k: int) -> Position:
    """Return what is known of a position.

    Args:
        name: The member.
        named: Log-probabilities of the `top_k` most likely ids, and maybe of others.
        top_k: How many are surely the most likely ones.

    Raises:
        MemberError: A log-probability is none.
    """
    log_probs = np.array(list(named.values()), dtype=np.float64)
    if not np.isfinite(log_probs).all():
        raise MemberError(name, "its server gives NaN or infinite log-probabilities", hint="see the server's dtype")
    if log_probs.max(initial=0.0) > 1e-3:
        raise MemberError(
            name, "its server gives log-probabilities above 0", hint="start it with raw log-probabilities"
        )
    if (ids := np.array(list(named), dtype=np.int64)).min(initial=0) < 0:
        raise MemberError(name, "its server names a negative id")
    bound = np.sort(log_probs)[::-1][min(top_k, len(log_probs)) - 1] if len(log_probs) else 0.0
    return Position(ids, log_probs, float(bound))

"""`Scores` over the few log-probabilities per position that a server names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from safe_llm.backends.base import FloatArray, IntArray, Ints, Symbols

__all__ = ["Position", "SparseScores"]

_ROUNDING = float(np.finfo(np.float32).eps)
"""Servers compute in float32: their probabilities sum to 1 up to this, so that less than this is never left over."""

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """What a server says of one position: the ids that it names and their log-probabilities, in no particular order.

    Attributes:
        ids: Distinct ids [K].
        log_probs: Finite, float64 [K].
        bound: No id that is not named has a log-probability above this.
    """

    ids: IntArray
    log_probs: FloatArray
    bound: float


class SparseScores:
    """`Scores` over the named ids of N positions; the first method that needs them waits for the server.

    A logit is the server's log-probability. What the named ids leave of a position's mass is spread evenly over the
    ids that can be chosen there and were not named, each of which gets no more than the server says is possible. Such a
    guess has a logit and a probability, but `top_k` does not name it: it fills up with -inf.
    """

    def __init__(self, num_positions: int, symbols: Symbols, wait: Callable[[], Sequence[Position]]) -> None:
        """Promise scores.

        Args:
            num_positions: N.
            symbols: What can be chosen.
            wait: Returns the N positions; what it raises surfaces in every method.
        """
        self._length = num_positions
        self._symbols = symbols
        self._wait = wait
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """Return N; does not wait."""
        return self._length

    def top1(self) -> tuple[IntArray, BoolArray]:
        """Return the argmax id [N], and True for every position where any id can be chosen [N]."""
        best = [row.best() for row in self._all()]
        return np.array(best, dtype=np.int64), np.array([row.mass > -np.inf for row in self._all()])

    def log_probs(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return log P(ids[i]) at positions[i], float64 [P]."""
        masses: FloatArray = np.array([self._all()[int(at)].mass for at in positions], dtype=np.float64)
        log_probs: FloatArray = self.logits(positions, ids) - masses
        return log_probs

    def logits(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return the logit of ids[i] at positions[i], float64 [P]."""
        rows = self._all()
        places = [int(positions[0])] * len(ids) if len(positions) == 1 else [int(at) for at in positions]
        return np.array([rows[at].logit(int(i)) for at, i in zip(places, ids, strict=True)], dtype=np.float64)

    def top_k(self, positions: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
        """Return ids [P, k] and logits [P, k] of named ids, best first; -inf behind the last one that can be chosen."""
        rows = self._all()
        tops = [rows[at].top(min(k, len(self._symbols.usable))) for at in positions]
        return np.array([ids for ids, _ in tops], dtype=np.int64), np.array([logits for _, logits in tops])

    def forbid_end(self, positions: Sequence[int]) -> None:
        """Set END to -inf at these positions, for all later calls."""
        end_id = self._symbols.end_id
        if end_id is None:
            return
        others = np.ones(len(self._symbols.usable), dtype=np.bool_)
        others[end_id] = False
        for at in positions:
            self._all()[at].restrict(others)

    def restrict(self, positions: Sequence[int], allowed: BoolArray) -> None:
        """Set ids that are not `allowed` [P, W] to -inf at these positions, for all later calls."""
        for at, mask in zip(positions, allowed, strict=True):
            self._all()[at].restrict(mask)

    def dense(self, positions: Sequence[int]) -> NoReturn:
        """Not there: a server names only the most likely ids."""
        raise NotImplementedError("a server gives no full rows of scores")

    def _all(self) -> list[_Row]:
        if not self._rows:
            self._rows = [_Row(position, self._symbols) for position in self._wait()]
        return self._rows


class _Row:
    """One position.

    Attributes:
        mass: Log of the softmax denominator.
    """

    def __init__(self, position: Position, symbols: Symbols) -> None:
        self._open = symbols.usable.copy()
        self._open[list(symbols.end_ids[1:])] = False
        named = dict(zip(position.ids.tolist(), position.log_probs.tolist(), strict=True))
        left = max(1.0 - math.fsum(map(math.exp, named.values())), _ROUNDING)
        ends = [named.pop(end_id) for end_id in symbols.end_ids if end_id in named]
        if ends:
            named[symbols.end_ids[0]] = float(np.logaddexp.reduce(ends))
        self._named: dict[int, float] = named
        num_others = int(np.count_nonzero(self._open)) - sum(bool(self._open[token_id]) for token_id in named)
        self._guess: float = min(math.log(left / num_others), position.bound) if num_others else -math.inf
        self._settle()

    def restrict(self, allowed: BoolArray) -> None:
        """Take the other ids away."""
        self._open &= allowed
        self._settle()

    def best(self) -> int:
        """Return the argmax: of the named ids, as far as there are some, else the lowest id that can be chosen."""
        return next(iter(self._named), int(self._open.argmax()))

    def logit(self, token_id: int) -> float:
        """Return an id's logit."""
        named = self._named.get(token_id)
        if named is None:
            return self._guess if self._open[token_id] else -math.inf
        return named

    def top(self, k: int) -> tuple[list[int], list[float]]:
        """Return the k best named ids and their logits, filled up with the lowest other ids at -inf."""
        ids, logits = list(self._named)[:k], list(self._named.values())[:k]
        if missing := k - len(ids):
            # of the k lowest ids, at most len(ids) are there already
            ids += [i for i in range(k) if i not in self._named][:missing]
            logits += [-math.inf] * missing
        return ids, logits

    def _settle(self) -> None:
        """Sort what can be chosen, best first, ties to the lowest id, and sum its mass up."""
        can_be = [(i, logit) for i, logit in self._named.items() if self._open[i]]
        self._named = dict(sorted(can_be, key=lambda pair: (-pair[1], pair[0])))
        num_others = int(np.count_nonzero(self._open)) - len(self._named)
        logits = list(self._named.values())
        if num_others:
            logits.append(self._guess + math.log(num_others))
        self.mass = float(np.logaddexp.reduce(logits)) if logits else -math.inf

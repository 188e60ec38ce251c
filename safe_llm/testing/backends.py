"""Test doubles for the backend seam."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from safe_llm.backends.base import Feed, FloatArray, Symbols
from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.errors import ContextOverflowError, MemberError

__all__ = ["NextLogits", "ScriptedBackend", "plain_symbols", "scripted"]

NextLogits = Callable[[tuple[int, ...]], "Sequence[float] | npt.NDArray[np.floating]"]
"""From all ids of a row to the logits [W] of the id that comes next."""


class ScriptedBackend:
    """A `Backend` whose logits are a function of the row's ids: no model, no state, no surprises.

    Attributes:
        calls: What was fed, one tuple of feeds per `forward`, failed ones included.
    """

    has_dense_scores = True
    cheap_tokens = 32

    def __init__(
        self,
        next_logits: NextLogits,
        width: int,
        symbols: Symbols | None = None,
        name: str = "scripted",
        max_context: int = 4096,
    ) -> None:
        """Script a backend.

        Args:
            next_logits: Called once per kept position; what it raises surfaces as `MemberError`.
            width: Length of what `next_logits` returns (W).
            symbols: By default every id is usable and none is END.
            name: For errors.
            max_context: Most ids a row can hold.
        """
        self.name = name
        self.width = width
        self.max_context = max_context
        self.num_forwards = 0
        self.forward_s = 0.0
        self.calls: list[tuple[Feed, ...]] = []
        self._next_logits = next_logits
        self._columns = SymbolColumns.of(symbols or plain_symbols(width), "cpu")
        self._rows: dict[int, tuple[int, ...]] = {}
        self._handles = count()

    def open(self) -> int:
        """Take a new empty row."""
        row = next(self._handles)
        self._rows[row] = ()
        return row

    def close(self, row: int) -> None:
        """Give a row back."""
        del self._rows[row]

    def length(self, row: int) -> int:
        """Return how many ids the row holds."""
        return len(self._rows[row])

    def ids(self, row: int) -> tuple[int, ...]:
        """Return what the row holds; for assertions."""
        return self._rows[row]

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first `length` ids of a row."""
        held = self._rows[row]
        if not 0 <= length <= len(held):
            raise ValueError(f"cannot roll a row of {len(held)} ids back to {length}")
        self._rows[row] = held[:length]

    def share(self, row: int, source: int, length: int) -> int:
        """Take over the first `length` ids of another row."""
        held, given = self._rows[row], self._rows[source]
        if held or not 0 <= length <= len(given):
            raise ValueError(f"cannot give a row of {len(held)} ids the first {length} ids of a row of {len(given)}")
        self._rows[row] = given[:length]
        return length

    def forward(self, feeds: Sequence[Feed]) -> DenseScores:
        """Append the feeds' ids and return the scripted scores of the kept positions."""
        self.calls.append(tuple(Feed(row=feed.row, ids=tuple(feed.ids), keep=feed.keep) for feed in feeds))
        grown: dict[int, tuple[int, ...]] = {}
        for feed in feeds:
            if feed.row in grown or not 1 <= feed.keep <= len(feed.ids):
                raise ValueError("a row is fed at most once, and 1 to len(ids) positions are kept")
            grown[feed.row] = self._rows[feed.row] + tuple(feed.ids)
            if len(grown[feed.row]) > self.max_context:
                raise ContextOverflowError(self.name, len(grown[feed.row]), self.max_context)
        started = time.perf_counter()
        logits = self._logits(feeds, grown)
        self._rows.update(grown)
        self.num_forwards += 1
        self.forward_s += time.perf_counter() - started
        return DenseScores(logits, self._columns)

    def _logits(self, feeds: Sequence[Feed], grown: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        """Ask the script for every kept position [N, W]."""
        table = np.empty((sum(feed.keep for feed in feeds), self.width), dtype=np.float32)
        prefixes = (
            grown[feed.row][: len(grown[feed.row]) - back] for feed in feeds for back in range(feed.keep - 1, -1, -1)
        )
        try:
            for position, prefix in enumerate(prefixes):
                table[position] = np.asarray(self._next_logits(prefix), dtype=np.float32).reshape(self.width)
        except Exception as error:
            raise MemberError(self.name, f"its script raised {type(error).__name__}") from error
        return torch.from_numpy(table)


def plain_symbols(width: int, end_ids: tuple[int, ...] = (), unusable: Sequence[int] = ()) -> Symbols:
    """Return `Symbols` for `width` ids, all usable but `unusable`."""
    usable = np.ones(width, dtype=np.bool_)
    usable[list(unusable)] = False
    return Symbols(end_ids=end_ids, usable=usable)


def scripted(
    width: int, script: Mapping[tuple[int, ...], int | Mapping[int, float]], *, peak: float = 0.9
) -> NextLogits:
    """Make a `next_logits` from a table of what comes after what.

    The longest key that the row ends with decides, so `()` says what comes by default, `(7,)` what comes after id 7,
    and the whole row what comes exactly there. A row that no key matches has uniform logits.

    Args:
        width: Number of ids (W).
        script: Ending of the row -> the next id, or the probability of several ids.
        peak: Probability of the next id where the script gives one id.

    Returns:
        A function whose logits are log-probabilities: what an entry leaves over is spread evenly over the other ids.
    """

    def next_logits(ids: tuple[int, ...]) -> FloatArray:
        entry = next((script[ids[start:]] for start in range(len(ids) + 1) if ids[start:] in script), {})
        chosen = dict(entry) if isinstance(entry, Mapping) else {entry: peak}
        left_over = max(0.0, 1.0 - sum(chosen.values()))
        probs = np.full(width, left_over / max(1, width - len(chosen)))
        probs[list(chosen)] = list(chosen.values())
        with np.errstate(divide="ignore"):
            logits: FloatArray = np.log(probs)
        return logits

    return next_logits

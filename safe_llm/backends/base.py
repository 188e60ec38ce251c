"""The backend seam: `Scores`, not logits, cross it.

A backend holds one model and the state (KV cache) of any number of rows. The engine sees ids going in and `Scores`
coming out. Whatever a backend computes on stays on its device until a `Scores` method asks for a few numbers.

A new backend is one file that implements `Backend`, passes `safe_llm.testing.BackendConformance`, and has a function
`open_model`; `safe_llm.backends.kinds` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

__all__ = ["Backend", "Feed", "FloatArray", "IntArray", "Ints", "OpenModel", "Scores", "Symbols"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Ints = Sequence[int] | IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """Which columns of the logits can be chosen, applied before any softmax is taken.

    Attributes:
        end_ids: Ids that end an answer. They are one symbol: the first id stands for all of them and carries their
            summed mass (log-sum-exp of their logits), the others get -inf. May be empty.
        usable: Boolean [W], W the width of the logits: False for ids without bytes (padding rows of a matrix wider
            than the tokenizer, unused ids) and for control tokens; their logits become -inf. True for `end_ids`.
    """

    end_ids: tuple[int, ...]
    usable: npt.NDArray[np.bool_]

    @property
    def end_id(self) -> int | None:
        """The id that stands for END, or None where a model has none."""
        return self.end_ids[0] if self.end_ids else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Ids to append to one row.

    Attributes:
        row: Handle from `Backend.open`.
        ids: New ids, at least one.
        keep: For how many of the last ids scores are wanted, 1 to len(ids).
    """

    row: int
    ids: Sequence[int]
    keep: int = 1


class Scores(Protocol):
    """Next-token scores at N positions, after `Symbols` were applied.

    Positions are numbered 0 to N-1 in the order of the feeds, within a feed in text order. Small host arrays come out;
    probabilities are float64 computed from float32 logits; ties go to the lowest id.
    """

    def __len__(self) -> int:
        """Return N."""
        ...

    def top1(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the argmax id [N] and whether the position's scores are finite [N]: False if any logit is NaN or
        +inf, or all are -inf.
        """
        ...

    def log_probs(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return log P(ids[i]) at positions[i] under the full softmax [P]; -inf for an unusable id.

        One position may stand for all ids, which may be many.
        """
        ...

    def top_k(self, positions: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
        """Return ids [P, k] and logits [P, k], best first, ties to the lowest id; k is clipped to the width.

        Where a server names only the most likely ids, these come first, and what is not named has -inf here.
        """
        ...

    def logits(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return the logit of ids[i] at positions[i] [P]; -inf for an unusable id. One position may stand for all."""
        ...

    def forbid_end(self, positions: Sequence[int]) -> None:
        """Set END to -inf at these positions, for all later calls (min_tokens)."""
        ...

    def restrict(self, positions: Sequence[int], allowed: npt.NDArray[np.bool_]) -> None:
        """Set ids that are not `allowed` [P, W] to -inf at these positions, for all later calls (grammars)."""
        ...

    def dense(self, positions: Sequence[int]) -> torch.Tensor:
        """Return full float32 logits [P, W] on the backend's device. Only where `Backend.has_dense_scores`."""
        ...


class Backend(Protocol):
    """One model and its rows.

    Attributes:
        name: For errors.
        width: Columns of the logits (W); may exceed the tokenizer's size.
        max_context: Most ids a row can hold.
        has_dense_scores: Whether `Scores.dense` exists.
        cheap_tokens: Up to about this many tokens, rows times tokens per row, a pass costs little more than one with a
            token per row, so that a drafter may check guesses with it; 1 if it pays for every token.
    """

    name: str
    width: int
    max_context: int
    has_dense_scores: bool
    cheap_tokens: int

    @property
    def num_forwards(self) -> int:
        """Forward passes so far."""
        ...

    @property
    def forward_s(self) -> float:
        """Wall-clock seconds inside them so far, device work included."""
        ...

    def open(self) -> int:
        """Take a new empty row and return its handle."""
        ...

    def close(self, row: int) -> None:
        """Give a row back. Its handle is dead; others stay valid."""
        ...

    def length(self, row: int) -> int:
        """Return how many ids the row holds. Costs no device synchronisation."""
        ...

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first `length` ids of a row, any depth, O(1)."""
        ...

    def share(self, row: int, source: int, length: int) -> int:
        """Let an empty row take over the first `length` ids of another open row, without a forward pass.

        Costs a copy at most. The rows are independent afterwards. A backend that cannot, or whose server caches
        prefixes by itself, returns 0.

        Returns:
            How many ids the row holds now, at most `length`; the caller feeds the others.

        Raises:
            ValueError: The row is not empty, or the source holds fewer ids. No row has changed.
            MemberError: There is no memory for it. No row has changed.
        """
        ...

    def forward(self, feeds: Sequence[Feed]) -> Scores:
        """Append each feed's ids to its row (a row at most once) and return the kept positions' scores.

        The only call that runs the model. A short feed on every row is one pass; a long one may be cut into chunks.
        A backend whose model runs elsewhere need not wait for it: then the first method of the scores that needs them
        waits, and raises the `MemberError`, with the rows at their new lengths; what they hold is fed again for free.

        Raises:
            MemberError: The model raised (its exception is the cause). No row has changed its length.
            ContextOverflowError: A row would exceed `max_context`. No row has changed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that is loaded, or a server that answers, before it is known what its ids mean.

    Attributes:
        width: Columns of its logits; may exceed its tokenizer's size.
        end_ids: Ids that end an answer, as far as the model says.
        connect: Makes the backend; its second argument asks for a self-check of the cache.
        identity: What tells its scores from those of the same files elsewhere: type of the weights, server.
        dtype: Of the weights, as far as known.
        device: Where they are, as far as known.
        num_bytes: Of the weights, as far as known.
    """

    width: int
    end_ids: Sequence[int]
    connect: Callable[[Symbols, bool], Backend]
    identity: str
    dtype: str | None = None
    device: str | None = None
    num_bytes: int | None = None

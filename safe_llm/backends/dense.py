"""`Scores` over dense logits that stay on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from safe_llm.backends.base import FloatArray, IntArray, Ints, Symbols

__all__ = ["DenseScores", "SymbolColumns"]

_INF = float("inf")
# top_k takes this many more than asked for, so that a tie at the boundary is usually seen whole.
_TIE_MARGIN = 16
_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolColumns:
    """`Symbols` as index tensors on the device of the logits; made once, used by every forward pass.

    Attributes:
        hidden: Ids that cannot be chosen, int64 [U].
        ends: All ids that stand for END, int64 [E].
        end_id: The id that carries END's mass, or None.
    """

    hidden: torch.Tensor
    ends: torch.Tensor
    end_id: int | None

    @classmethod
    def of(cls, symbols: Symbols, device: torch.device | str) -> SymbolColumns:
        """Copy `symbols` to `device`."""
        return cls(
            hidden=torch.from_numpy(np.flatnonzero(~symbols.usable)).to(device),
            ends=torch.tensor(symbols.end_ids, dtype=torch.long, device=device),
            end_id=symbols.end_id,
        )


class DenseScores:
    """`Scores` over logits [N, W] of any float type, on any device.

    Takes the logits over: they are cast to float32 once and changed in place. A position is normalised over the
    vocabulary when a probability there is first asked for. Every method makes one transfer to the host.
    """

    @torch.inference_mode()
    def __init__(self, logits: torch.Tensor, columns: SymbolColumns) -> None:
        self._logits = logits.float()
        self._end_id = columns.end_id
        # Masking must not hide a NaN: the largest value of the masked columns is kept, and NaN counts as largest.
        self._hidden_max = _row_max(self._logits.index_select(1, columns.hidden))
        if len(columns.ends) > 1:
            mass = self._logits.index_select(1, columns.ends).logsumexp(dim=1)
            self._logits.index_fill_(1, columns.ends, -_INF)
            self._logits[:, columns.end_id] = mass
        self._logits.index_fill_(1, columns.hidden, -_INF)
        self._top1: tuple[IntArray, npt.NDArray[np.bool_]] | None = None
        self._best_log_probs: FloatArray | None = None  # came with top1, on a GPU
        self._log_mass: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        """Return N."""
        return len(self._logits)

    def top1(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the argmax id [N] and whether the position's raw logits are usable [N] (see `Scores.top1`)."""
        if self._top1 is None:
            self._top1 = self._host_top1() if self._logits.device.type == "cpu" else self._device_top1()
        return self._top1

    def log_probs(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return log P(ids[i]) at positions[i] under the full softmax, float64 [P]."""
        if self._top1 is not None and self._best_log_probs is not None:
            asked = np.asarray(positions, dtype=np.int64)
            if np.array_equal(self._top1[0][asked], ids):
                return self._best_log_probs[asked]
        logits = self._picked(positions, ids)
        return cast(FloatArray, _host(logits.double() - self._log_masses(positions)))

    def logits(self, positions: Ints, ids: Ints) -> FloatArray:
        """Return the logit of ids[i] at positions[i], float64 [P]."""
        return cast(FloatArray, _host(self._picked(positions, ids)).astype(np.float64))

    def top_k(self, positions: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
        """Return ids [P, k] and logits [P, k], best first, ties to the lowest id."""
        width = self._logits.shape[1]
        k = min(k, width)
        rows = self._rows(positions)
        taken = min(width, k + _TIE_MARGIN)
        # Ids are exact in float32 (W < 2**24), so that values and ids travel together.
        values, ids = _host(torch.stack([part.float() for part in _top_k(rows, taken)])).astype(np.float64)
        order = np.lexsort((ids, -values), axis=-1)[:, :k]
        best_ids = np.take_along_axis(ids, order, axis=1).astype(np.int64)
        best = np.take_along_axis(values, order, axis=1)
        if taken < width:
            # The tie at the boundary may go on beyond what was taken (not "==": a NaN must not pass for settled).
            for row in np.flatnonzero(~(values[:, k - 1] > values[:, -1])):
                best_ids[row], best[row] = _exact_top_k(rows[row], k, float(values[row, k - 1]))
        return best_ids, best

    @torch.inference_mode()
    def forbid_end(self, positions: Sequence[int]) -> None:
        """Set END to -inf at these positions, for all later calls."""
        if self._end_id is None or not positions:
            return
        rows = self._indices(positions)[0]
        ends = self._logits[rows, self._end_id]
        self._hidden_max[rows] = torch.maximum(self._hidden_max[rows], ends)
        self._logits[rows, self._end_id] = -_INF
        self._forget()

    @torch.inference_mode()
    def restrict(self, positions: Sequence[int], allowed: npt.NDArray[np.bool_]) -> None:
        """Set ids that are not `allowed` [P, W] to -inf at these positions, for all later calls."""
        rows = self._indices(positions)[0]
        logits = self._logits[rows]
        kept = torch.from_numpy(allowed).to(logits.device)
        hidden = _row_max(logits.masked_fill(kept, -_INF))  # a NaN among them still fails the position
        self._hidden_max[rows] = torch.maximum(self._hidden_max[rows], hidden)
        self._logits[rows] = logits.masked_fill(~kept, -_INF)
        self._forget()

    def dense(self, positions: Sequence[int]) -> torch.Tensor:
        """Return a copy of the full rows, float32 [P, W], on the logits' device."""
        return self._logits[self._indices(positions)[0]]

    def _picked(self, positions: Ints, ids: Ints) -> torch.Tensor:
        """Return the logits of ids[i] at positions[i] [P]."""
        if len(positions) == 1:
            # 4 times faster than an index of two dimensions where there are many ids
            return self._logits[int(positions[0])].index_select(0, self._indices(ids)[0])
        rows, columns = self._indices(positions, ids)
        return self._logits[rows, columns]

    def _rows(self, positions: Ints) -> torch.Tensor:
        """Return the full rows [P, W], not to be changed: a single one is no copy."""
        return (
            self._logits[int(positions[0])][None] if len(positions) == 1 else self._logits[self._indices(positions)[0]]
        )

    def _indices(self, *parts: Ints) -> torch.Tensor:
        return torch.from_numpy(np.array(parts, dtype=np.int64)).to(self._logits.device, non_blocking=True)

    def _host_top1(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        # numpy's argmax is vectorised, torch's is not: 10 times faster over a large vocabulary. Both return the
        # first maximum, and the first NaN if there is one.
        table = self._logits.numpy()
        ids = table.argmax(axis=1)
        best = table[np.arange(len(ids)), ids]
        return ids, np.isfinite(best) & (self._hidden_max.numpy() < _INF)

    def _device_top1(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        values, ids = self._logits.max(dim=1)
        # float64 holds ids and float32 values exactly; the log-probabilities are asked for next, and cost no transfer
        log_probs = values.double() - self._log_masses(range(len(self)))
        columns = torch.stack([values.double(), ids.double(), self._hidden_max.double(), log_probs])
        best, best_ids, hidden, self._best_log_probs = _host(columns).astype(np.float64)
        return best_ids.astype(np.int64), np.isfinite(best) & (hidden < _INF)

    def _log_masses(self, positions: Ints) -> torch.Tensor:
        """Return the log of the softmax denominator at each of these positions, float64 [P] (each is computed once)."""
        new = sorted({*map(int, positions)} - self._log_mass.keys())
        if new:
            self._log_mass.update(zip(new, _log_mass(self._rows(new)), strict=True))
        return torch.stack([self._log_mass[int(row)] for row in positions])

    def _forget(self) -> None:
        """Drop what was derived from logits that have changed."""
        self._top1 = self._best_log_probs = None
        self._log_mass.clear()


def _log_mass(rows: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of each row [P, W] -> [P], summed in float64."""
    peak = rows.amax(dim=1, keepdim=True)
    shifted = rows - peak
    if rows.device.type == "cpu":
        np.exp(shifted.numpy(), out=shifted.numpy())  # twice as fast as torch's
    else:
        shifted.exp_()
    return shifted.sum(dim=1, dtype=torch.float64).log() + peak[:, 0].double()


def _top_k(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows.topk(k)`; on a CPU 4 times faster where rows are long.

    The k best values of a row are in the k blocks of it whose maxima are the best.
    """
    num_rows, width = rows.shape
    num_blocks = width // _BLOCK
    if num_blocks <= k or rows.device.type != "cpu":
        return rows.topk(k, dim=1)
    whole = num_blocks * _BLOCK
    blocks = rows[:, :whole].view(num_rows, num_blocks, _BLOCK).amax(dim=2).topk(k, dim=1)[1]
    columns = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    columns = torch.cat([columns, torch.arange(whole, width).expand(num_rows, -1)], dim=1)
    values, places = rows.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, places)


def _row_max(columns: torch.Tensor) -> torch.Tensor:
    """Return the maximum of each row [N, U] -> [N], NaN if one is NaN, -inf if there are no columns."""
    if columns.shape[1] == 0:
        return columns.new_full((len(columns),), -_INF)
    return columns.amax(dim=1)


def _exact_top_k(row: torch.Tensor, k: int, threshold: float) -> tuple[IntArray, FloatArray]:
    """Return the ids [k] and logits [k] of a row [W] whose k-th best value is `threshold`, however wide the tie."""
    ids = (~(row < threshold)).nonzero()[:, 0]  # ascending, so that a stable sort sends ties to the lowest id
    values, order = row[ids].sort(descending=True, stable=True)
    found = _host(torch.stack([values[:k], ids[order[:k]].float()])).astype(np.float64)
    return found[1].astype(np.int64), found[0]


def _host(tensor: torch.Tensor) -> npt.NDArray[np.float32 | np.float64]:
    """Copy a small tensor to the host."""
    return cast("npt.NDArray[np.float32 | np.float64]", tensor.cpu().numpy())

"""A GGUF file behind the backend seam, run by llama.cpp as it is.

A row is a sequence of one llama.cpp context, whose cells all rows share. A context cannot grow: where its cells or
sequences do not suffice, everything moves to one of twice the size.

llama.cpp hands out cells that a sliding window has left behind, even where others are free; a deep rollback would then
find nothing. It spares cells that two sequences hold, so that rows of such models are two sequences that are always the
same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path

import numpy as np
import torch

from safe_llm.backends.base import Backend, Feed, OpenModel, Symbols
from safe_llm.backends.clock import PassClock
from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.backends.feeds import check_feeds
from safe_llm.backends.llama_library import MAX_BATCH, CacheType, LlamaContext, LlamaModel, Tokens, library
from safe_llm.backends.selfcheck import check_cache
from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, MemberError, UnsupportedModelError

__all__ = ["LlamaCppBackend", "open_model"]

_MIN_CELLS = 1024  # not below MAX_BATCH: llama.cpp would lower that too
_MIN_ROWS = 4
_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Row:
    """A row: its number decides its sequences."""

    number: int
    length: int = 0


class LlamaCppBackend:
    """`Backend` over a `LlamaModel`.

    Not safe for concurrent calls. Logits are copied out of llama.cpp and scored on the CPU.
    """

    has_dense_scores = True

    def __init__(
        self,
        model: LlamaModel,
        symbols: Symbols,
        name: str,
        max_context: int | None = None,
        *,
        num_threads: int | None = None,
        cache_type: CacheType = "float16",
        on_gpu: bool = False,
        self_check: bool = True,
    ) -> None:
        """Wrap a loaded model. Allocates nothing until the first pass.

        Args:
            model: The weights.
            symbols: END and unusable ids, over the model's width.
            name: For errors.
            max_context: Lowers the model's own context length.
            num_threads: By default as many as torch uses.
            cache_type: Of keys and values.
            on_gpu: The layers are on a GPU; then the cache is too.
            self_check: Compare logits after rollbacks with those of a fresh row now.

        Raises:
            UnsupportedModelError: Its state cannot be rolled back, or the self-check failed.
            ConfigError: `symbols` have another width.
        """
        model.refuse_unsupported(name)
        self.name = name
        self.width = model.width
        self.max_context = _context_limit(model, name, max_context)
        if len(symbols.usable) != self.width:
            raise ConfigError(
                f"member {name!r}: symbols for {len(symbols.usable)} ids, but its logits have {self.width}"
            )
        self.num_forwards = 0
        self._model = model
        self._num_threads = num_threads or torch.get_num_threads()
        self._cache_type = cache_type
        self._on_gpu = on_gpu
        self.cheap_tokens = 32 if on_gpu else 1  # quantized weights are unpacked for every token on a CPU
        self._per_row = 2 if model.window else 1
        self._max_rows = int(library().llama_max_parallel_sequences()) // self._per_row
        self._columns = SymbolColumns.of(symbols, _CPU)
        self._context: LlamaContext | None = None
        self._handles = count()
        self._rows: dict[int, _Row] = {}
        self._free_numbers = list(range(self._max_rows))  # a heap
        self._clock = PassClock()
        if self_check:
            check_cache(
                self,
                self._uncached,
                symbols=symbols,
                num_ids=self.width,
                kind=model.architecture,
                is_half_precision=cache_type != "float32" or not model.is_float32,
            )
            self.num_forwards, self._clock = 0, PassClock()

    @property
    def forward_s(self) -> float:
        """Seconds inside passes so far."""
        return self._clock.seconds()

    def open(self) -> int:
        """Take a new empty row.

        Raises:
            MemberError: llama.cpp has no further sequences.
        """
        if not self._free_numbers:
            raise MemberError(
                self.name,
                f"llama.cpp holds at most {self._max_rows} rows of this model at once",
                hint=f"set max_batch_size below {self._max_rows}",
            )
        row = next(self._handles)
        self._rows[row] = _Row(heapq.heappop(self._free_numbers))
        return row

    def close(self, row: int) -> None:
        """Give a row back. With the last row, a context that has grown goes too."""
        self.rollback(row, 0)
        heapq.heappush(self._free_numbers, self._rows.pop(row).number)
        if not self._rows and self._context is not None and self._context.num_cells > _MIN_CELLS:
            self._context.free()
            self._context = None

    def length(self, row: int) -> int:
        """Return how many ids the row holds."""
        return self._rows[row].length

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first `length` ids of a row."""
        state = self._rows[row]
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot roll a row of {state.length} ids back to {length}")
        if length < state.length:
            self._remove(state, length)
            state.length = length

    def share(self, row: int, source: int, length: int) -> int:
        """Let the row hold the first `length` ids of another one too; no keys or values are copied."""
        target, giver = self._rows[row], self._rows[source]
        if target.length or not 0 <= length <= giver.length:
            raise ValueError(
                f"cannot give a row of {target.length} ids the first {length} ids of a row of {giver.length}"
            )
        if length:
            context = self._reserve(length)
            for sequence in self._sequences(target):
                context.copy(self._sequences(giver)[0], sequence, length)
            target.length = length
        return length

    def forward(self, feeds: Sequence[Feed]) -> DenseScores:
        """Append the feeds' ids; see `Backend.forward`. Up to 512 ids of all rows together share a pass."""
        check_feeds(self, feeds, num_ids=self.width)
        tokens = self._tokens(feeds)
        context = self._reserve(len(tokens))
        try:
            logits = self._decode(context, tokens)
        except BaseException:
            for feed in feeds:
                self._remove(self._rows[feed.row], self._rows[feed.row].length)
            raise
        for feed in feeds:
            self._rows[feed.row].length += len(feed.ids)
        return self.scores(logits)

    def scores(self, logits: torch.Tensor) -> DenseScores:
        """Wrap raw logits [N, W] of this model, which are taken over."""
        return DenseScores(logits, self._columns)

    def _tokens(self, feeds: Sequence[Feed]) -> Tokens:
        rows = [self._rows[feed.row] for feed in feeds]
        sizes = [len(feed.ids) for feed in feeds]
        ends = [range(row.length, row.length + size) for row, size in zip(rows, sizes, strict=True)]
        kept = [np.arange(size) >= size - feed.keep for size, feed in zip(sizes, feeds, strict=True)]
        sequences = np.array([self._sequences(row) for row in rows], dtype=np.int32)
        return Tokens(
            ids=np.concatenate([np.asarray(feed.ids, dtype=np.int32) for feed in feeds]),
            positions=np.concatenate([np.asarray(end, dtype=np.int32) for end in ends]),
            sequences=np.repeat(sequences, sizes, axis=0),
            is_kept=np.concatenate(kept).astype(np.int8),
        )

    def _decode(self, context: LlamaContext, tokens: Tokens) -> torch.Tensor:
        """Run the passes over all tokens and return the kept positions' logits, float32 [N, W]."""
        logits = torch.empty(int(tokens.is_kept.sum()), self.width)
        table, done = logits.numpy(), 0
        for begin in range(0, len(tokens), MAX_BATCH):
            piece = tokens.piece(begin, begin + MAX_BATCH)
            num_kept = int(piece.is_kept.sum())
            with self._clock.measure(_CPU):
                status = context.decode(piece)
                if status == 0 and num_kept:
                    table[done : done + num_kept] = context.logits(num_kept)
            if status != 0:
                raise MemberError(self.name, f"llama_decode failed with status {status}")
            self.num_forwards += 1
            done += num_kept
        return logits

    def _uncached(self, text: list[int]) -> DenseScores:
        """Return the scores after each id of a text, by one pass over a fresh row."""
        row = self.open()
        scores = self.forward([Feed(row=row, ids=text, keep=len(text))])
        self.close(row)
        return scores

    def _sequences(self, row: _Row) -> range:
        """Return the sequences that hold a row."""
        return range(row.number * self._per_row, (row.number + 1) * self._per_row)

    def _remove(self, row: _Row, start: int) -> None:
        """Forget what a row holds from position `start` on, counted or not."""
        if self._context is not None and not self._context.remove(self._sequences(row), start):
            raise MemberError(self.name, "llama.cpp cannot roll this model's state back")

    def _reserve(self, new: int) -> LlamaContext:
        """Return a context with room for `new` more ids, whatever the rows share, and for all rows."""
        cells = new + sum(row.length for row in self._rows.values())
        sequences = (1 + max(row.number for row in self._rows.values())) * self._per_row
        old = self._context
        if old is not None and cells <= old.num_cells and sequences <= old.num_sequences:
            return old
        num_cells, num_sequences = (old.num_cells, old.num_sequences) if old else (0, 0)
        try:
            grown = LlamaContext(
                self._model,
                num_cells=max(num_cells, _power_of_two(max(cells, _MIN_CELLS))),
                num_sequences=max(num_sequences, _power_of_two(max(sequences, _MIN_ROWS * self._per_row))),
                num_threads=self._num_threads,
                cache_type=self._cache_type,
                on_gpu=self._on_gpu,
            )
            if old is not None and not old.copy_to(grown):
                raise MemoryError
        except MemoryError:
            raise MemberError(
                self.name,
                f"there is no memory for {cells} ids in {len(self._rows)} rows",
                hint="use fewer rows, shorter prompts or a smaller max_context",
            ) from None
        if old is not None:
            old.free()
        self._context = grown
        return grown


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _context_limit(model: LlamaModel, name: str, lowered: int | None) -> int:
    """Return the most ids a row may hold: what the model was built for, or `lowered` if that is less."""
    limits = [limit for limit in (model.max_context, model.short_context, lowered) if limit]
    if not limits:
        raise UnsupportedModelError(
            f"the file of model {name!r} has no context length", hint="set max_context for this member"
        )
    return min(limits)


def open_model(config: MemberConfig, path: Path, device: str | None) -> OpenModel:
    """Load a GGUF file.

    Raises:
        ConfigError: llama-cpp-python is missing, or has no support for the device that `config` asks for.
        ModelCorruptError: The file is damaged.
        UnsupportedModelError: llama.cpp cannot load it, or it cannot be a member.
    """
    gpu = _gpu(config, device)
    model = LlamaModel(path, gpu=gpu)
    model.refuse_unsupported(config.display_name)
    cache_type: CacheType = config.dtype if config.dtype != "auto" else "float32" if model.is_float32 else "float16"

    def connect(symbols: Symbols, self_check: bool) -> Backend:
        return LlamaCppBackend(
            model,
            symbols,
            config.display_name,
            config.max_context,
            num_threads=config.num_threads,
            cache_type=cache_type,
            on_gpu=gpu is not None,
            self_check=self_check,
        )

    return OpenModel(
        width=model.width,
        end_ids=model.end_ids(),
        connect=connect,
        identity=f"llama.cpp {version('llama-cpp-python')}, {model.dtype}, cache {cache_type}",
        dtype=model.dtype,
        device="cpu" if gpu is None else f"cuda:{gpu}",
        num_bytes=model.num_bytes,
    )


def _gpu(config: MemberConfig, device: str | None) -> int | None:
    """Return the number of the GPU to use, None for the CPU: also where nobody asked and llama.cpp sees no GPU."""
    can_use_gpus = bool(library().llama_supports_gpu_offload())
    kind, _, number = (config.device or device or "cpu").partition(":")
    if kind == "cpu" or (config.device is None and not can_use_gpus):
        return None
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"unknown device {config.device!r}", hint="use 'cpu', 'cuda' or 'cuda:N'")
    if not can_use_gpus:
        raise ConfigError(
            f"device {config.device!r}: this llama-cpp-python was built without support for GPUs",
            hint='build it again with CMAKE_ARGS="-DGGML_CUDA=on", or use device "cpu"',
        )
    return int(number or 0)

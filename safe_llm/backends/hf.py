"""A transformers model behind the backend seam, with the slot cache.

Only the model's public forward is called, with explicit positions and explicit masks. Masks are left out where the
plain causal kernel gives the same: a lone row's next token, and the first chunk of a fresh row's prompt.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from safe_llm.backends.attention import use_packed_attention
from safe_llm.backends.base import Backend, Feed, OpenModel, Symbols
from safe_llm.backends.clock import PassClock
from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.backends.feeds import check_feeds
from safe_llm.backends.graphs import MOST_TOKENS, CudaCapture, GraphedPasses, bucket_of, kv_bucket_of
from safe_llm.backends.layers import (
    FULL,
    SLIDING,
    Layers,
    Masks,
    build_masks,
    context_limit,
    refuse_unsupported,
)
from safe_llm.backends.loading import end_ids_of, load_model
from safe_llm.backends.selfcheck import check_cache
from safe_llm.backends.slots import SlotCache, SlotPass
from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, MemberError, UnsupportedModelError

__all__ = ["HFBackend", "open_model"]

# Feeds up to this long share one ragged pass; what is shorter is padded to the longest.
_MAX_SHARED = 32
# Longer feeds run alone, in chunks of this many ids: bounds the mask and the activations.
_CHUNK = 1024


class HFBackend:
    """`Backend` over a `PreTrainedModel`.

    Not safe for concurrent calls. A row whose scores were not finite may keep NaN in its cache: close it.
    """

    has_dense_scores = True
    cheap_tokens = 32

    def __init__(
        self,
        model: PreTrainedModel,
        symbols: Symbols,
        name: str,
        max_context: int | None = None,
        self_check: bool = True,
        fixed_shapes: bool = False,
    ) -> None:
        """Take over a loaded model: it is put into eval mode, and SDPA attention is exchanged for a faster variant.

        Args:
            model: A decoder-only language model.
            symbols: For its logits; `usable` is `HFBackend.width_of(model)` long.
            name: For errors.
            max_context: Lowers the model's own context length.
            self_check: Compare cached with uncached logits now.
            fixed_shapes: Pad passes over few tokens to a few shapes; on a GPU they are then replayed as graphs.

        Raises:
            UnsupportedModelError: Its state cannot be rolled back, or the self-check failed.
            ConfigError: `symbols` have another width.
        """
        refuse_unsupported(model, name)
        config = model.config.get_text_config(decoder=True)
        self.name = name
        self.width = self.width_of(model)
        self.max_context = context_limit(config, name, max_context)
        if len(symbols.usable) != self.width:
            raise ConfigError(
                f"member {name!r}: symbols for {len(symbols.usable)} ids, but its logits have {self.width}"
            )
        use_packed_attention(model)
        self._model = model.eval()
        self._call = _Call(model, name)
        self._layers = Layers.of(config)
        self._mask_dtype = model.dtype if config._attn_implementation == "eager" else None
        self._embeddings = model.get_input_embeddings().weight
        self._symbols = symbols
        self._columns: SymbolColumns | None = None
        # Padding tokens of a shared pass are written past the end of a full row too.
        self._cache = SlotCache(self._layers.is_sliding, self.max_context + _MAX_SHARED)
        self._fixed_shapes = fixed_shapes
        self._graphs: GraphedPasses | None = None
        if fixed_shapes and model.device.type == "cuda":
            self._graphs = GraphedPasses(self._cache, CudaCapture(model.device))
        self._clock = PassClock()
        self.num_forwards = 0
        if self_check:
            check_cache(
                self,
                self._uncached,
                symbols=symbols,
                num_ids=len(self._embeddings),
                kind=model.config.model_type,
                is_half_precision=torch.finfo(model.dtype).bits < 32,
            )
            self.num_forwards, self._clock = 0, PassClock()

    @staticmethod
    def width_of(model: PreTrainedModel) -> int:
        """Return how many columns a model's logits have; may exceed its tokenizer's size."""
        return len(model.get_output_embeddings().weight)

    @property
    def model(self) -> PreTrainedModel:
        """The model, for looking at; what changes it changes the scores."""
        return self._model

    @property
    def forward_s(self) -> float:
        """Seconds inside forward passes so far, device work included; waits for passes that still run."""
        return self._clock.seconds()

    def open(self) -> int:
        """Take a new empty row."""
        return self._cache.open()

    def close(self, row: int) -> None:
        """Give a row back."""
        self._cache.close(row)

    def length(self, row: int) -> int:
        """Return how many ids the row holds."""
        return self._cache.length(row)

    def rollback(self, row: int, length: int) -> None:
        """Forget all but the first `length` ids of a row."""
        self._cache.rollback(row, length)

    def share(self, row: int, source: int, length: int) -> int:
        """Copy the keys and values of the first `length` ids of another row; they must have been finite."""
        try:
            self._cache.share(row, source, length)
        except torch.OutOfMemoryError as error:
            raise self._failed(error, "copying a prompt's keys and values") from error
        return length

    def forward(self, feeds: Sequence[Feed]) -> DenseScores:
        """Append the feeds' ids; see `Backend.forward`. Feeds of up to 32 ids share a pass, longer ones run alone."""
        check_feeds(self, feeds, num_ids=len(self._embeddings))
        try:
            logits = self._logits(feeds)
        except Exception as error:
            raise self._failed(error, "its forward pass") from error
        for feed in feeds:
            self._cache.advance(feed.row, len(feed.ids))
        return self.scores(logits)

    def scores(self, logits: torch.Tensor) -> DenseScores:
        """Wrap raw logits [N, W] of this model, which are taken over."""
        if self._columns is None or self._columns.hidden.device != logits.device:
            self._columns = SymbolColumns.of(self._symbols, logits.device)
        return DenseScores(logits, self._columns)

    @torch.inference_mode()
    def _uncached(self, text: list[int]) -> DenseScores:
        """Return the scores after each id of a text, by the model alone."""
        ids = torch.tensor([text], device=self._model.device)
        return self.scores(self._model(input_ids=ids, use_cache=False).logits[0])

    def _failed(self, error: Exception, what: str) -> MemberError:
        """Free what `what` held when it failed, also through its traceback, and return the error to raise."""
        traceback.clear_frames(error.__traceback__)
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if out_of_memory:
            self._cache.shrink()
            torch.cuda.empty_cache()
        hint = "use fewer rows, shorter prompts or a smaller max_context" if out_of_memory else ""
        return MemberError(self.name, f"{what} raised {type(error).__name__}", hint=hint)

    @torch.inference_mode()
    def _logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Run the model over all feeds and return the kept positions' logits [N, W] in their order."""
        if self._fixed_shapes and all(len(feed.ids) <= MOST_TOKENS for feed in feeds):
            return self._run_shared(feeds, fixed=True)
        shared = [feed for feed in feeds if len(feed.ids) <= _MAX_SHARED]
        if len(shared) == len(feeds) > 1:
            return self._run_shared(feeds)
        parts: dict[int, torch.Tensor] = {}
        if len(shared) > 1:
            # First, because it pads rows that it does not feed as well, past the end that they have now.
            kept = torch.split(self._run_shared(shared), [feed.keep for feed in shared])
            parts = {feed.row: part for feed, part in zip(shared, kept, strict=True)}
        ordered = [parts[feed.row] if feed.row in parts else self._run_alone(feed) for feed in feeds]
        return ordered[0] if len(ordered) == 1 else torch.cat(ordered)

    def _run_alone(self, feed: Feed) -> torch.Tensor:
        """Append one feed to its row, chunk by chunk; return [keep, W]."""
        slot, held, total = self._cache.slot(feed.row), self._cache.length(feed.row), len(feed.ids)
        kept = []
        for begin in range(0, total, _CHUNK):
            ids = torch.tensor([feed.ids[begin : begin + _CHUNK]])
            start, stop = held + begin, held + begin + ids.shape[1]
            now = SlotPass(first=slot, stop=slot + 1, start=start, kv_stop=stop, window_start=self._window_start(start))
            keep = min(ids.shape[1], feed.keep - (held + total - stop))
            logits = self._run(now, ids, torch.arange(start, stop)[None], keep=max(1, keep), end=stop)
            if keep > 0:
                kept.append(logits[0])
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def _run_shared(self, feeds: Sequence[Feed], *, fixed: bool = False) -> torch.Tensor:
        """Append short feeds in one pass over all slots between them; return [N, W] in the feeds' order.

        Rows are aligned at the right, so that the last `keep` columns are what is kept. What is left of a shorter feed
        is padding, and so is a row without a feed: written after the row's end, where nothing looks, and seeing what
        a real token sees, so that it stays finite. With `fixed` shapes there is more padding of both kinds.
        """
        slots = [self._cache.slot(feed.row) for feed in feeds]
        first, stop = min(slots), max(slots) + 1
        held = self._cache.lengths[first:stop]
        longest, keep = max(len(feed.ids) for feed in feeds), max(feed.keep for feed in feeds)
        starts = [held[slot - first] for slot in slots]
        kv_stop = max(start + len(feed.ids) for start, feed in zip(starts, feeds, strict=True))
        aligned = stop - first == len(feeds) and len({*starts}) == 1 == len({len(feed.ids) for feed in feeds})
        if fixed:
            longest = keep = bucket_of(longest)
            kv_stop, aligned = kv_bucket_of(kv_stop, self.max_context + _MAX_SHARED), False
        table = np.empty((3, stop - first, longest), dtype=np.int64)
        ids, see, write = table
        ids[:], see[:], write[:] = 0, min(starts), np.asarray(held)[:, None] + np.arange(longest)
        for slot, start, feed in zip(slots, starts, feeds, strict=True):
            row, pad, end = slot - first, longest - len(feed.ids), start + len(feed.ids)
            ids[row, pad:], see[row, :pad], see[row, pad:] = feed.ids, end - 1, np.arange(start, end)
            write[row] = np.roll(write[row], pad)
        on_device = torch.from_numpy(table).to(self._embeddings.device)
        now = SlotPass(
            first=first,
            stop=stop,
            start=max(starts),
            kv_stop=kv_stop,
            window_start=0 if fixed else self._window_start(min(starts)),
            write=None if aligned else on_device[2],
        )
        end = max(held) + longest
        if fixed:
            logits = self._run_fixed(now, on_device, end=max(end, kv_stop))
        else:
            logits = self._run(now, on_device[0], on_device[1, : 1 if aligned else None], keep=keep, end=end)
        rows = [slot - first for slot, feed in zip(slots, feeds, strict=True) for _ in range(feed.keep)]
        columns = [column for feed in feeds for column in range(keep - feed.keep, keep)]
        if len(rows) == logits.shape[0] * keep and rows == sorted(rows):
            return logits.flatten(0, 1)
        return logits[rows, columns]

    def _window_start(self, start: int) -> int:
        """Return the first position that a token at `start` sees in a sliding layer."""
        return max(0, start + 1 - self._layers.window) if self._layers.window else 0

    def _run(self, now: SlotPass, ids: torch.Tensor, see: torch.Tensor, *, keep: int, end: int) -> torch.Tensor:
        """Run one pass.

        Args:
            now: What it reads and writes.
            ids: New ids [B, T].
            see: Their positions [B, T], or [1, T] if they are the same in all rows.
            keep: For how many of the last columns logits are wanted.
            end: One past the last position written.

        Returns:
            Logits [B, keep, W].
        """
        device = self._embeddings.device
        ids, see = ids.to(device), see.to(device)
        with self._clock.measure(device):
            self._cache.begin(now, end)
            logits = self._call(ids, see.expand(len(ids), -1), self._masks(now, see), self._cache, keep)
        self.num_forwards += 1
        return logits

    def _run_fixed(self, now: SlotPass, table: torch.Tensor, *, end: int) -> torch.Tensor:
        """Run one pass of a fixed shape.

        Args:
            now: What it reads and writes.
            table: Ids, positions seen, positions written [3, B, T].
            end: Positions that there must be memory for.

        Returns:
            Logits [B, T, W].
        """

        def compute(now: SlotPass, ids: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
            return self._call(ids, see, self._masks(now, see), self._cache, ids.shape[1])

        with self._clock.measure(table.device):
            self._cache.begin(now, end)
            logits = self._graphs.run(now, table, compute) if self._graphs else compute(now, table[0], table[1])
        self.num_forwards += 1
        return logits

    def _masks(self, now: SlotPass, see: torch.Tensor) -> Masks:
        """Return the explicit masks, or None where the kernel's own rule (causal, or all for one token) is the same."""
        queries, layers = see.shape[1], self._layers
        plain = now.write is None and (queries == 1 or (now.start == 0 and self._mask_dtype is None))
        if plain and (queries == 1 or not layers.window or queries <= layers.window):
            return {FULL: None, SLIDING: None} if layers.by_type else None
        masks = build_masks(
            see, layers=layers, kv_stop=now.kv_stop, window_start=now.window_start, dtype=self._mask_dtype
        )
        if plain and isinstance(masks, dict):
            masks[FULL] = None
        return masks


class _Call:
    """The model's forward, whose keyword for the cache depends on the version it was written for."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        known = inspect.signature(type(model).forward).parameters
        self._cache_word = next((word for word in ("cache", "past_key_values") if word in known), "")
        if not self._cache_word or "position_ids" not in known:
            raise UnsupportedModelError(
                f"model {name!r} (type {model.config.model_type!r}) takes no cache or no explicit positions"
            )
        self._keeps = "logits_to_keep" in known
        self._model = model

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: Masks, cache: SlotCache, keep: int
    ) -> torch.Tensor:
        """Return logits [B, keep, W] for ids [B, T] at positions [B, T]."""
        options: dict[str, Any] = {self._cache_word: cache}
        if self._keeps:
            options["logits_to_keep"] = keep
        output = self._model(input_ids=ids, attention_mask=masks, position_ids=positions, use_cache=True, **options)
        logits: torch.Tensor = output.logits
        return logits[:, -keep:]


def open_model(config: MemberConfig, path: Path, device: str | None) -> OpenModel:
    """Load a model from a folder; see `load_model` for the errors."""
    model = load_model(path, config=config, device=device)

    def connect(symbols: Symbols, self_check: bool) -> Backend:
        return HFBackend(
            model,
            symbols=symbols,
            name=config.display_name,
            max_context=config.max_context,
            self_check=self_check,
            fixed_shapes=config.cuda_graphs,
        )

    return OpenModel(
        width=HFBackend.width_of(model),
        end_ids=end_ids_of(model),
        connect=connect,
        identity=str(model.dtype),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        num_bytes=sum(weight.nbytes for weight in model.parameters()),
    )

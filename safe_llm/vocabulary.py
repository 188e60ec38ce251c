"""What a member's ids mean: exact id <-> bytes tables, END, control and unusable ids, encoding without control tokens.

Surface forms come from the tokenizer's tables, never from `decode([id])`, which drops spaces and merges broken
characters. Encoding here never yields a control id: control tokens are renamed, in a private copy of the tokenizer, to
strings that nobody can type, so that their spelling in a text is ordinary text.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from safe_llm import tokenizer_tables as tables
from safe_llm.backends.base import IntArray, Symbols
from safe_llm.errors import UnsupportedModelError

__all__ = ["NOT_EXACT", "Pieces", "Vocabulary"]

NOT_EXACT = -1
"""In `Pieces.ends`: this id does not end where the text can be cut, its tokens do not spell the text exactly."""

TURN_ENDS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|endofturn|>",
        "[|endofturn|]",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    )
)
"""Spellings of control tokens that end a turn, for models whose configuration names only one of several."""

_INVALID_UTF8 = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tokenized stretch of bytes.

    Attributes:
        ids: Token ids.
        ends: For each id the byte offset at which it ends, or NOT_EXACT.
        heads: For each id whether it begins a stretch that the tokenizer cuts off before it looks for tokens (a word, a
            group of digits): encoding from there on gives the same ids.
    """

    ids: list[int]
    ends: list[int]
    heads: list[bool]


class Vocabulary:
    """One tokenizer as the engine sees it.

    Attributes:
        width: Columns of the logits; at least the tokenizer's size.
        tokens: id -> bytes [width]; None for END, control tokens, unk and ids without a token.
        ids: bytes -> lowest id.
        symbols: END and usable ids, for the backend.
        bos_ids: Ids that the tokenizer puts before a plain text (usually one BOS or none).
        control_ids: Control token's spelling -> id.
        control_names: Control token's spelling -> the name that stands for it in `encode_prompt`. Nobody can guess it.
        kind: "byte-level", "sentencepiece", "wordpiece" or "plain": how surfaces were derived.
    """

    def __init__(
        self, tokenizer: Tokenizer | dict[str, Any], *, width: int | None = None, end_ids: Iterable[int] = ()
    ) -> None:
        """Read the tables of `tokenizer` (it is not changed).

        Args:
            tokenizer: The member's tokenizer, or the parsed content of its `tokenizer.json`.
            width: Columns of the model's logits; None takes the tokenizer's size.
            end_ids: The model's own end ids; well-known turn ends among the control tokens are added.
        """
        spec = json.loads(tokenizer.to_str()) if isinstance(tokenizer, Tokenizer) else tokenizer
        self.width = max(tables.texts(spec)) + 1 if width is None else width
        spec = tables.within(spec, self.width)
        texts = tables.texts(spec)
        if max(texts) >= self.width:
            raise UnsupportedModelError(
                f"the tokenizer has {max(texts) + 1} ids, the model only {self.width} columns",
                hint="they do not belong together",
            )
        self.kind = tables.kind_of(spec)
        end_ids = tuple(end_ids)
        self.control_ids = tables.control_tokens(spec, end_ids)
        self.control_names = tables.private_names(self.control_ids)
        declared = [i for i in dict.fromkeys(end_ids) if 0 <= i < self.width]
        known = [i for text, i in self.control_ids.items() if text in TURN_ENDS]
        ends = tuple(dict.fromkeys([*declared, *known]))
        self.tokens = tables.surfaces(texts, spec, self.kind, self.width)
        for i in (*self.control_ids.values(), *ends):
            self.tokens[i] = None
        usable = np.fromiter((token is not None for token in self.tokens), dtype=np.bool_, count=self.width)
        usable[list(ends)] = True
        self.symbols = Symbols(end_ids=ends, usable=usable)
        self.ids = _first_ids(self.tokens, tables.byte_fallback_ids(spec))
        if not self.ids:
            raise UnsupportedModelError("the tokenizer has no usable token")
        self.bos_ids = tables.bos_ids(spec)
        self._byte_ids = [self.ids.get(bytes([b])) for b in range(256)]
        self._unk_id = tables.unk_id(spec)
        self._continuation = tables.plain_tokenizer(spec, self.control_names, prefix=False)
        self._start = (
            tables.plain_tokenizer(spec, self.control_names, prefix=True)
            if tables.has_prefix(spec)
            else self._continuation
        )
        self._spellings: dict[bytes, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ encoding

    def encode(self, data: bytes | bytearray) -> Pieces:
        """Tokenize generated bytes as a continuation: no special tokens, no dummy prefix, no control ids.

        Bytes that are not UTF-8 become byte tokens. Where the tokens do not spell the text (a normalizer changed it,
        a character is unknown) `ends` is NOT_EXACT: the member cannot represent that span.
        """
        try:
            return self._encode_text(data.decode("utf-8"), data)
        except UnicodeDecodeError:
            return self._encode_broken(data)

    def _encode_text(self, text: str, data: bytes | bytearray) -> Pieces:
        with self._lock:  # a Rust tokenizer shared by threads is not safe to rely on
            encoding = self._continuation.encode(text, add_special_tokens=False)
        ids = encoding.ids
        words = encoding.word_ids
        heads = list(map(operator.ne, words, itertools.chain((None,), words)))
        surfaces = [self.tokens[i] or b"" for i in ids]
        if b"".join(surfaces) == data and all(surfaces):
            return Pieces(ids, list(itertools.accumulate(map(len, surfaces))), heads)
        return Pieces(ids, _exact_ends(text, encoding.offsets, surfaces), heads)

    def _encode_broken(self, data: bytes | bytearray) -> Pieces:
        ids: list[int] = []
        ends: list[int] = []
        heads: list[bool] = []
        offset = 0
        follows_gap = False
        text = data.decode("utf-8", errors="surrogateescape")
        for part in re.split(f"({_INVALID_UTF8.pattern})", text):
            raw = part.encode("utf-8", errors="surrogateescape")
            if not part:
                continue
            if not _INVALID_UTF8.match(part):
                pieces = self._encode_text(part, raw)
                ids += pieces.ids
                heads += pieces.heads
                exact = [end if end == NOT_EXACT else end + offset for end in pieces.ends]
                ends += [NOT_EXACT, *exact[1:]] if follows_gap and exact else exact
                follows_gap = follows_gap and not exact
            elif (byte_id := self._byte_ids[raw[0]]) is not None:
                ids.append(byte_id)
                ends.append(NOT_EXACT if follows_gap else offset + 1)
                follows_gap = False
            elif self._unk_id is not None:
                ids.append(self._unk_id)
                ends.append(NOT_EXACT)
                follows_gap = False
            else:
                follows_gap = True  # nothing stands for this byte: the next piece does not begin where the last ended
            offset += len(raw)
            heads += [True] * (len(ids) - len(heads))
        return Pieces(ids, ends, heads)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokenize a prompt as the member's own tokenizer does, but without special tokens that it would add.

        Only the names in `control_names` become control ids, what is spelled like a control token does not.
        """
        with self._lock:
            ids: list[int] = self._start.encode(text, add_special_tokens=False).ids
        return ids

    # ------------------------------------------------------------------ lookups

    def surface(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for END and for ids without bytes."""
        return self.tokens[token_id] or b""

    def is_end(self, token_id: int) -> bool:
        """Whether the id is one of the END ids."""
        return token_id in self.symbols.end_ids

    def ids_of(self, data: bytes) -> Sequence[int]:
        """Return the token with exactly these bytes, else their encoding; empty if they cannot be spelled.

        Spellings are remembered: other members' tokens are asked about again and again.
        """
        known = self._spellings.get(data)
        if known is None:
            known = self._spellings[data] = self._spell(data)
        return known

    def _spell(self, data: bytes) -> tuple[int, ...]:
        if (token_id := self.ids.get(data)) is not None:
            return (token_id,)
        pieces = self.encode(data)
        is_exact = pieces.ends and pieces.ends[-1] == len(data) and NOT_EXACT not in pieces.ends
        return tuple(pieces.ids) if is_exact else ()

    @functools.cached_property
    def sorted_ids(self) -> IntArray:
        """Usable ids with bytes, sorted by their bytes (then id) [S]: tokens with a common prefix are neighbours."""
        order = sorted((token, i) for i, token in enumerate(self.tokens) if token)
        return np.array([i for _, i in order], dtype=np.int64)

    @functools.cached_property
    def _sorted_surfaces(self) -> list[bytes]:
        return [self.surface(int(i)) for i in self.sorted_ids]

    def prefix_range(self, prefix: bytes) -> tuple[int, int]:
        """Return the half-open range of `sorted_ids` whose bytes start with `prefix`."""
        surfaces = self._sorted_surfaces
        low = bisect_left(surfaces, prefix)
        successor = prefix.rstrip(b"\xff")
        if not successor:
            return low, len(surfaces)
        return low, bisect_left(surfaces, successor[:-1] + bytes([successor[-1] + 1]))

    def ids_with(self, data: bytes) -> Sequence[int]:
        """Return all ids whose bytes are exactly `data`."""
        if (several := self._twins.get(data)) is not None:
            return several
        return [self.ids[data]] if data in self.ids else []

    @functools.cached_property
    def _twins(self) -> dict[bytes, list[int]]:
        """Bytes that several ids have, with these ids."""
        twins: dict[bytes, list[int]] = {}
        for i, token in enumerate(self.tokens):
            if token and self.ids[token] != i:
                twins.setdefault(token, [self.ids[token]]).append(i)
        return twins

    def same_as(self, other: Vocabulary) -> bool:
        """Whether every id means the same in both (padding columns aside): content is compared, not sizes."""
        if self is other:
            return True
        if set(self.symbols.end_ids) != set(other.symbols.end_ids):
            return False
        pairs = itertools.zip_longest(self.tokens, other.tokens)
        return all(a == b for a, b in pairs)


def _first_ids(tokens: Sequence[bytes | None], last_resort: set[int]) -> dict[bytes, int]:
    """Map bytes to the lowest id that has them; a byte-fallback id only where there is no other."""
    ids: dict[bytes, int] = {}
    for preferred in (False, True):
        for i in range(len(tokens) - 1, -1, -1):
            if (token := tokens[i]) is not None and (i not in last_resort) == preferred:
                ids[token] = i
    return ids


def _exact_ends(text: str, offsets: Sequence[tuple[int, int]], surfaces: Sequence[bytes]) -> list[int]:
    """Byte ends of the tokens where the surfaces spell the text, else NOT_EXACT.

    Tokens whose character ranges overlap (parts of one character, or of one normalized cluster) form a group. A group
    covers the text from the last group's end, so gaps (dropped white space) count against it, and it is exact if its
    surfaces are those bytes.
    """
    ends = [NOT_EXACT] * len(surfaces)
    first, done_chars, done_bytes = 0, 0, 0
    for i, (_, stop) in enumerate(offsets):
        stop = max(stop, *(offsets[k][1] for k in range(first, i + 1)))
        if i + 1 < len(offsets) and offsets[i + 1][0] < stop:
            continue  # the next token overlaps: same group
        raw = text[done_chars:stop].encode("utf-8")
        group = surfaces[first : i + 1]
        if all(group) and b"".join(group) == raw:
            ends[first : i + 1] = [done_bytes + n for n in itertools.accumulate(map(len, group))]
        first, done_chars, done_bytes = i + 1, max(stop, done_chars), done_bytes + len(raw)
    return ends

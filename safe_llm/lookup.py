"""Guesses at what the drafter will say next, which it checks many at a time in one pass.

An answer repeats its prompt and itself: where the last tokens have occurred before, what followed them then is a guess.
The drafter's own choice decides at every token, so nothing but the number of its passes changes (prompt lookup
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Lookup"]

_SIZES = (4, 3, 2)
"""Lengths of the token sequences that are looked for, the most telling first."""
_FEWEST, _MOST = 2, 15
"""Bounds of a guess's length. Up to 16 tokens a pass costs little more than one token does."""


class Lookup:
    """One row's tokens so far, by what came before them."""

    def __init__(self, ids: Sequence[int]) -> None:
        """Index a prompt's ids."""
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # tokens -> where they ended last, the end of the text aside
        self._length = 4
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids that were committed."""
        for token_id in ids:
            end = len(self._ids)
            for size in _SIZES:
                if end >= size:
                    self._ends[tuple(self._ids[end - size : end])] = end
            self._ids.append(token_id)

    def guess(self, drafted: Sequence[int]) -> list[int]:
        """Return ids that may come next behind the text and `drafted`; none where nothing like it has occurred."""
        last = [*self._ids[-_SIZES[0] :], *drafted][-_SIZES[0] :]
        for size in _SIZES:
            end = self._ends.get(tuple(last[-size:])) if len(last) >= size else None
            if end is not None:
                return self._ids[end : end + self._length]
        return []

    def learn(self, num_guessed: int, num_right: int) -> None:
        """Guess more after a guess that was right to its end, and fewer after one that was wrong at once."""
        if num_right == num_guessed:
            self._length = min(2 * self._length, _MOST)
        elif not num_right:
            self._length = max(self._length // 2, _FEWEST)

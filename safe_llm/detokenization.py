"""Committed bytes as text deltas: valid Unicode, nothing that later bytes can change, stop strings held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """Turns an answer's bytes into text that is final as soon as it is returned.

    A character is returned when it is complete; bytes that are not UTF-8 become U+FFFD. The longest end of the text
    that may still become a stop string is held back. Of several stop strings the one that is complete first counts,
    so the text does not depend on how its bytes were cut.

    Attributes:
        stopped: Whether a stop string was found. The text ends right before its first occurrence; bytes fed
            afterwards are ignored.
        num_bytes: How many bytes were fed before the stop string began; all of them without one.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self.num_bytes = 0
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._raw = bytearray()  # the bytes of `_held`, and those of an incomplete character
        self._released_bytes = 0

    def feed(self, data: bytes) -> str:
        """Take the next bytes and return the text that has become final, "" if none."""
        if self.stopped:
            return ""
        self.num_bytes += len(data)
        self._raw += data
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held back: the answer is over. An incomplete character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, text: str) -> str:
        pending = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            released, self._held = pending[: min(found)[1]], ""
            self.num_bytes = self._released_bytes + _num_bytes(self._raw, released)
            return released
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        released, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        count = _num_bytes(self._raw, released)
        self._released_bytes += count
        del self._raw[:count]
        return released


def _num_bytes(raw: bytearray, text: str) -> int:
    """How many of the first bytes of `raw` were read as `text`, with U+FFFD for what is not UTF-8."""
    plain = text.encode("utf-8")
    if raw.startswith(plain):
        return len(plain)
    return next(n for n in range(len(raw), 0, -1) if raw[:n].decode("utf-8", errors="replace") == text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

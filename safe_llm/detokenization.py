"""Committed bytes as text deltas: valid Unicode, nothing that later bytes can change, stop strings held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """Turns an answer's bytes into text that is final as soon as it is returned.

    A character is returned when it is complete; bytes that are not UTF-8 become U+FFFD. The longest end of the text
    that may still become a stop string is held back.

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
        self._released_bytes = 0

    def feed(self, data: bytes) -> str:
        """Take the next bytes and return the text that has become final, "" if none."""
        if self.stopped:
            return ""
        self.num_bytes += len(data)
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
        found = [at for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            self.num_bytes = self._released_bytes + len(pending[: min(found)].encode("utf-8"))
            return pending[: min(found)]
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        released = pending[: len(pending) - keep]
        self._held = pending[len(pending) - keep :]
        self._released_bytes += len(released.encode("utf-8"))
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

"""Text that models wrote, made safe to look at: nothing in it drives a terminal or reorders a line."""

from __future__ import annotations

import re

__all__ = ["harmless", "label"]

# C0 but tab and newline, DEL, C1, and what reorders or breaks lines invisibly.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SIGNS = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})
END = "END"


def harmless(text: str) -> str:
    r"""Replace control characters by visible escapes (`\x1b`); newline and tab stay, CR LF becomes a newline."""
    return _CONTROL.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def label(token: bytes) -> str:
    r"""Return a token on one line: white space as signs, bytes that are no characters as `\xff`, END if empty."""
    if not token:
        return END
    return _CONTROL.sub(_escape, token.decode("utf-8", errors="backslashreplace").translate(_SIGNS))

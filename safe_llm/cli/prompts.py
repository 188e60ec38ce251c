"""What the user wrote: literal text, text with escapes, or the bytes of stdin."""

from __future__ import annotations

import re
import sys

from safe_llm.errors import ConfigError, PromptError
from safe_llm.types import Message, Prompt, check_text

__all__ = ["build_prompt", "decode", "read_text", "unescape"]

_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.|$)", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", '"': '"', "'": "'"}


def read_text(argument: str | None, *, escape: bool) -> str:
    """Return the text that an argument stands for: itself, or for `-` all of stdin, which is never interpreted.

    Raises:
        PromptError: There is none, it is empty, or it is not valid Unicode.
        ConfigError: A bad escape.
    """
    if argument is None:
        raise PromptError("there is no prompt", hint="give it as an argument, or - to read it from stdin")
    text = _read_stdin() if argument == "-" else unescape(argument) if escape else argument
    if not text:
        raise PromptError("the prompt is empty", hint="give at least one character")
    check_text(text, "the prompt")
    return text


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PromptError("stdin is closed", hint="pipe the prompt into it, or give it as an argument")
    return decode(sys.stdin.buffer.read())


def decode(data: bytes) -> str:
    """Decode UTF-8 exactly: a byte order mark, CR LF and a final newline stay.

    Raises:
        PromptError: It is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"stdin is not valid UTF-8: byte {error.start} cannot be decoded",
            hint="convert it first, for instance with iconv",
        ) from None


def unescape(text: str) -> str:
    r"""Interpret backslash escapes: `\n`, `\t`, `\r`, `\0`, `\\`, quotes, `\xHH`, `\uHHHH`, `\UHHHHHHHH`.

    Raises:
        ConfigError: An escape that is none of these.
    """
    return _ESCAPE.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    code = match[1]
    if code in _SIMPLE:
        return _SIMPLE[code]
    if len(code) > 1 and int(code[1:], 16) < 0x110000:
        return chr(int(code[1:], 16))
    raise ConfigError(
        f"--escape: there is no escape like the one at character {match.start()}",
        hint=r"known are \n \t \r \0 \\ \" \' \xHH \uHHHH \UHHHHHHHH; write \\ for a backslash",
    )


def build_prompt(text: str, *, system: str | None, raw: bool) -> Prompt:
    """Return plain text if `raw`, else a conversation with the text as its user message.

    Raises:
        ConfigError: A system message for a plain text.
    """
    if not raw:
        return [*system_messages(system), Message(role="user", content=text)]
    if system is not None:
        raise ConfigError("--raw has no place for a system message", hint="leave out --raw or --system")
    return text


def system_messages(system: str | None) -> list[Message]:
    """Return the beginning of a conversation: the system message, if there is one."""
    return [] if system is None else [Message(role="system", content=system)]

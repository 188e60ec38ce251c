"""The conversation loop of `safe-llm chat`.

Ctrl-C during an answer stops it; what came until then stays in the conversation (a turn without any text is
forgotten). A second Ctrl-C, or one at the prompt, ends the program. A turn that fails is reported and forgotten.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from safe_llm.cli import terminal
from safe_llm.cli.answering import answer
from safe_llm.cli.options import OutputFlags
from safe_llm.cli.prompts import decode, system_messages
from safe_llm.errors import SafeLLMError
from safe_llm.types import Message

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble
    from safe_llm.trace import TraceWriter

__all__ = ["converse"]

_PROMPT = "> "


def converse(
    ensemble: Ensemble,
    params: Mapping[str, Any],
    output: OutputFlags,
    system: str | None,
    trace: TraceWriter | None = None,
) -> int:
    """Answer line by line until `/exit` or the end of stdin.

    Returns:
        0, or 2 if stdin is no terminal and a turn failed.
    """
    history = system_messages(system)
    num_failed = 0
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            history = system_messages(system)
        elif line.strip():
            try:
                text = decode(line.encode("utf-8", errors="surrogateescape"))
                history = _turn(ensemble, history, text, params, output, trace)
            except SafeLLMError as error:
                num_failed += 1
                terminal.say_error(str(error.args[0]), error.hint)
    return 2 if num_failed and not sys.stdin.isatty() else 0


def _turn(
    ensemble: Ensemble,
    history: list[Message],
    line: str,
    params: Mapping[str, Any],
    output: OutputFlags,
    trace: TraceWriter | None,
) -> list[Message]:
    """Print the answer to one line and return the conversation that it leaves."""
    asked = [*history, Message(role="user", content=line)]
    with _cancel_on_interrupt() as cancel:
        text = answer(ensemble, asked, params, output, cancel, trace)
    if not sys.stdout.isatty() and not output.as_json:
        terminal.write("\n")
    return [*asked, Message(role="assistant", content=text)] if text else history


@contextmanager
def _cancel_on_interrupt() -> Iterator[threading.Event]:
    """Make the first Ctrl-C set an event, which ends the answer between two rounds; the second one raises."""
    cancel = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, previous)


def _lines() -> Iterator[str]:
    """Yield the lines of stdin without their line ends, what is not UTF-8 as surrogates.

    A person at a terminal gets a prompt and line editing.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        yield from _edited_lines()
        return
    while True:
        if sys.stdin.isatty():
            print(_PROMPT, end="", file=sys.stderr, flush=True)
        data = sys.stdin.buffer.readline()
        if not data:
            return
        yield data.decode("utf-8", errors="surrogateescape").removesuffix("\n").removesuffix("\r")


def _edited_lines() -> Iterator[str]:
    import readline  # noqa: F401 - gives input() line editing and history

    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            terminal.write("\n")
            return

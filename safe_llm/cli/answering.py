"""One prompt, one answer on stdout: as text while it comes, or as one JSON object."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_llm.cli import terminal
from safe_llm.cli.options import OutputFlags
from safe_llm.errors import Cancelled, ConfigError, TraceError
from safe_llm.events import EnsemblePoint, Event, GenerationFinished, Result, RoundFinished, TextDelta
from safe_llm.types import FinishDetail, Prompt

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble
    from safe_llm.trace import TraceWriter

__all__ = ["Marker", "answer", "check_output", "check_trace", "json_line", "tracing"]


def check_output(flags: OutputFlags) -> None:
    """Raise ConfigError where the flags do not go together."""
    if flags.as_json and flags.show:
        raise ConfigError("give --json or --show, not both", hint="the JSON object has all that --show shows")
    if flags.trace_prompt and flags.trace is None:
        raise ConfigError("--trace-prompt needs --trace", hint="name the file with --trace FILE")


def check_trace(flags: OutputFlags) -> None:
    """Raise TraceError where the file of `--trace` cannot be written, before weights are read.

    A pipe is left alone: whoever reads it would take our closing it for the end.
    """
    if flags.trace is None or Path(flags.trace).is_fifo():
        return
    try:
        open(flags.trace, "a").close()
    except OSError as error:
        raise TraceError(f"cannot write the trace {flags.trace!r}: {error.strerror}") from None


def tracing(ensemble: Ensemble, flags: OutputFlags) -> contextlib.AbstractContextManager[TraceWriter | None]:
    """Begin the trace that the flags ask for, in place of what the file held; None where they ask for none."""
    if flags.trace is None:
        return contextlib.nullcontext()
    from safe_llm.trace import TraceWriter

    return TraceWriter(flags.trace, ensemble, include_prompt=flags.trace_prompt)


def answer(
    ensemble: Ensemble,
    prompt: Prompt,
    params: Mapping[str, Any],
    output: OutputFlags,
    cancel: threading.Event | None = None,
    trace: TraceWriter | None = None,
) -> str:
    """Print the answer and return its text; what came until `cancel` was set, where it was.

    Text goes to stdout byte for byte as it becomes final. On a terminal it is made harmless and ends with a newline;
    into a pipe nothing is added. Counters go to stderr.
    """
    if output.as_json:
        return _answer_in_json(ensemble, prompt, params, cancel, trace)
    if trace is None:
        events = ensemble.stream(prompt, events=True, detailed=False, cancel=cancel, **params)
    else:
        events = trace.stream(prompt, cancel=cancel, **params)
    text, result = _answer_in_text(events, output.show)
    if sys.stdout.isatty() and not text.endswith("\n"):
        terminal.write("\n")
    if result is None:
        terminal.say("(stopped)")
    elif output.show:
        _say_summary(result)
    elif result.finish_detail is FinishDetail.MAX_TOKENS and sys.stdout.isatty() and not output.quiet:
        terminal.say(f"(cut at {result.usage.completion_tokens} tokens; --max-tokens sets the limit)")
    return text


def _answer_in_text(stream: Iterator[Event], show: bool) -> tuple[str, Result | None]:
    marker = Marker() if show and sys.stdout.isatty() else None
    parts: list[str] = []
    result = None
    with contextlib.suppress(Cancelled), contextlib.closing(stream) as events:  # type: ignore[type-var]
        for event in events:
            if isinstance(event, TextDelta):
                parts.append(event.text)
                for piece, mark in marker.split(event.text) if marker else [(event.text, None)]:
                    terminal.write(piece, mark)
            elif isinstance(event, GenerationFinished):
                result = event.result
            elif marker:
                marker.see(event)
    return "".join(parts), result


def _answer_in_json(
    ensemble: Ensemble,
    prompt: Prompt,
    params: Mapping[str, Any],
    cancel: threading.Event | None,
    trace: TraceWriter | None,
) -> str:
    from safe_llm.ensemble import result_as_dict

    try:
        result: Result = (trace or ensemble).generate(prompt, cancel=cancel, **params)
    except Cancelled:
        terminal.say("(stopped)")
        return ""
    sys.stdout.write(json_line(result_as_dict(result) | _identity(ensemble)))
    sys.stdout.flush()
    return result.text


def _identity(ensemble: Ensemble) -> dict[str, Any]:
    """What answered: members (the drafter first), configuration, and the fingerprint of both."""
    members = [
        {
            "name": member.name,
            "fingerprint": member.fingerprint,
            "licence": member.licence,
            "max_context": member.backend.max_context,
        }
        for member in ensemble.members
    ]
    return {
        "members": members,
        "config": ensemble.config.model_dump(mode="json"),
        "fingerprint": ensemble.fingerprint,
    }


def json_line(values: Mapping[str, Any]) -> str:
    """Return one line of JSON: readable Unicode, but nothing that a terminal would obey."""
    text = json.dumps(values, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):04x}", text) + "\n"


class Marker:
    """Finds the text of ensemble points: a fold of the event stream.

    Points count in generated bytes, deltas in characters, and bytes that are not UTF-8 become U+FFFD; so the deltas
    are walked along the committed bytes.
    """

    def __init__(self) -> None:
        self._committed = bytearray()
        self._at = 0
        self._points: list[tuple[int, int, str]] = []

    def see(self, event: Event) -> None:
        """Take an event that is no text."""
        if isinstance(event, EnsemblePoint):
            mark = "replaced" if event.replaced else "confirmed"
            self._points.append((event.byte_offset, event.byte_offset + len(event.chosen), mark))
        elif isinstance(event, RoundFinished):
            self._committed += event.committed

    def split(self, text: str) -> list[tuple[str, str | None]]:
        """Cut the next delta into pieces with their marks: `replaced`, `confirmed` or None."""
        marks = [(char, self._mark_of(char)) for char in text]
        return [("".join(char for char, _ in group), mark) for mark, group in groupby(marks, key=lambda pair: pair[1])]

    def _mark_of(self, char: str) -> str | None:
        start = self._at
        self._at += self._num_bytes(char)
        self._points = [point for point in self._points if point[1] > start]
        return next((mark for begin, end, mark in self._points if begin < self._at and end > start), None)

    def _num_bytes(self, char: str) -> int:
        """How many committed bytes became this character."""
        encoded = char.encode()
        if self._committed.startswith(encoded, self._at):
            return len(encoded)
        try:
            self._committed[self._at : self._at + 4].decode()
        except UnicodeDecodeError as error:
            return error.end - error.start
        return 1


def _say_summary(result: Result) -> None:
    counters, timings = result.counters, result.timings
    if sys.stdout.isatty() and sys.stderr.isatty():
        legend = [terminal.marked(f"{mark} by the ensemble", mark) for mark in terminal.MARKS]
        terminal.say(", ".join(legend))
    facts = [
        f"{counters.num_tokens} tokens ({result.finish_detail})",
        f"{counters.num_ensembled} ensemble points, {counters.num_replaced} replaced",
        f"{counters.num_accepted_tokens} of {counters.num_draft_tokens} drafted tokens accepted",
        f"first token {_seconds(timings.ttft_s)}, per token {_seconds(timings.tpot_s)}, total {timings.total_s:.2f} s",
    ]
    terminal.say("; ".join(facts))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"

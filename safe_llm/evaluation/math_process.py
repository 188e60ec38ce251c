"""math-verify in a process of its own, which can be ended.

An answer can be a power tower that no computer evaluates. math-verify bounds its time with an alarm signal, which
works in a main thread only and not inside one long multiplication; a process can be stopped from any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading

from safe_llm.errors import ConfigError, EvaluationError

__all__ = ["MathProcess", "same_by_math_verify"]

LIMIT_S = 10.0
"""Seconds for one comparison; what takes longer is not the same."""

START_LIMIT_S = 120.0
"""Seconds until the process has imported its libraries."""

COMMAND = ("-P", "-m", "safe_llm.evaluation.math_worker")
"""What Python is started with; `-P`: the folder that we are in has no say."""


class MathProcess:
    """A process that compares answers, one after the other; started when it is first asked, and again after a stop."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def same(self, answer: str, gold: str) -> bool:
        """Say whether two LaTeX expressions are equal; False also where that takes longer than the limit.

        Raises:
            ConfigError: math-verify is not installed.
            EvaluationError: The process cannot be started.
        """
        with self._lock:
            child = self._child = self._child or _started()
            line = child.ask(json.dumps([answer, gold]), self._limit_s)
            if not line:  # it takes too long, or too much memory
                self._stop()
            return line == "true\n"

    def close(self) -> None:
        """End the process; a later question starts another."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """A started process: a line is a question, a line is an answer."""

    def __init__(self) -> None:
        # It finds what this process finds, wherever it was started from.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, *COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def answer(self, limit_s: float) -> str:
        """Return its next line, "" when it has ended or none comes in time."""
        try:
            return self._lines.get(timeout=limit_s)
        except queue.Empty:
            return ""

    def ask(self, question: str, limit_s: float) -> str:
        """Return the line that answers a line, "" when it has ended or none comes in time."""
        stdin = self.process.stdin
        assert stdin is not None  # it is a pipe
        try:
            stdin.write(question + "\n")
            stdin.flush()
        except BrokenPipeError:
            return ""
        return self.answer(limit_s)

    def end(self) -> None:
        """Kill it and leave nothing open."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a question that was not sent any more
            self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def _started() -> _Child:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("scoring mathematics needs math-verify", hint='pip install "safe-llm-ensemble[eval]"')
    child = _Child()
    if child.answer(START_LIMIT_S) != "ready\n":
        child.end()
        raise EvaluationError("math-verify did not start", hint="try `python -c 'import math_verify'`")
    return child


_SHARED = MathProcess()
atexit.register(_SHARED.close)


def same_by_math_verify(answer: str, gold: str) -> bool:
    """Say whether two LaTeX expressions are equal, in a process that all callers share; see `MathProcess.same`."""
    return _SHARED.same(answer, gold)

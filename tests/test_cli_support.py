"""For the tests of the command line: runs it in this process with streams of our own, on scripted ensembles."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field

from safe_llm.cli import loading, main
from safe_llm.config import EnsembleSpec
from safe_llm.ensemble import Ensemble
from safe_llm.testing.members import scripted_ensemble

QUESTION = "What is the answer?"
RIGHT, WRONG = "The answer is 42, not 1850.", "The answer is 41, not 1850."


class Stream(io.TextIOWrapper):
    def __init__(self, data: bytes = b"", *, tty: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", newline="")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def fileno(self) -> int:
        raise OSError("no file behind it")

    @property
    def data(self) -> bytes:
        self.flush()
        return self.buffer.getvalue()


@dataclass
class Run:
    code: int
    stdout: bytes
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        return self.stderr.splitlines()


def run(*args: str, stdin: bytes = b"", tty: bool = False) -> Run:
    """Run `safe-llm args`; with `tty`, all three streams say that they are a terminal."""
    streams = Stream(stdin, tty=tty), Stream(tty=tty), Stream(tty=tty)
    saved = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        code = main(args)
    finally:
        sys.stdin, sys.stdout, sys.stderr = saved
    return Run(code, streams[1].data, streams[2].data.decode())


@dataclass
class Scripted:
    """Takes the place of `load_ensemble` and remembers what it was asked for."""

    drafter: dict[str, str]
    verifier: dict[str, str] | None = None
    specs: list[EnsembleSpec] = field(default_factory=list)
    progress: list[bool] = field(default_factory=list)
    ensembles: list[Ensemble] = field(default_factory=list)

    def __call__(self, spec: EnsembleSpec, *, progress: bool) -> Ensemble:
        self.specs.append(spec)
        self.progress.append(progress)
        self.ensembles.append(scripted_ensemble(self.drafter, self.verifier, **spec.ensemble.model_dump()))
        return self.ensembles[-1]


def install(monkeypatch, drafter: dict[str, str], verifier: dict[str, str] | None = None) -> Scripted:
    scripted = Scripted(drafter, verifier)
    monkeypatch.setattr(loading, "load_ensemble", scripted)
    return scripted


def refuse_to_load(monkeypatch) -> None:
    def load(spec, *, progress):
        raise AssertionError("loaded weights before the input was checked")

    monkeypatch.setattr(loading, "load_ensemble", load)

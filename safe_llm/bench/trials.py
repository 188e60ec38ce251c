"""One contender on one prompt: what it did and when."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safe_llm.bench.workloads import Conversation

__all__ = ["Contender", "Counts", "PeakMemory", "Run", "Step", "Trial", "Unavailable"]


class Unavailable(Exception):  # noqa: N818 - not a failure: the contender does not apply here, and is left out
    """A contender cannot take part; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A moment at which tokens became final.

    Attributes:
        num_tokens: Tokens that were there then.
        seconds: Since the prompt was handed over.
    """

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What does not depend on the machine; None where the contender has no such thing.

    Attributes:
        num_forwards: Forward passes by member name, those over the prompt included.
        num_draft_tokens: Tokens drafted.
        num_rounds: Rounds.
        num_ensembled: Ensemble points.
        num_replaced: Ensemble points that chose another token.
    """

    num_forwards: Mapping[str, int]
    num_draft_tokens: int | None = None
    num_rounds: int | None = None
    num_ensembled: int | None = None
    num_replaced: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer.

    Attributes:
        num_tokens: Tokens of the answer, an END included.
        total_s: From handing over the prompt to the end.
        steps: When the tokens came, in order; the last one has all of them.
        counts: What happened meanwhile.
        phases: Seconds by phase; empty where the contender does not say.
    """

    num_tokens: int
    total_s: float
    steps: tuple[Step, ...]
    counts: Counts
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens over all of the time, the prompt's included."""
        return self.num_tokens / self.total_s

    @property
    def ttft_s(self) -> float:
        """Seconds until the first tokens were final."""
        return self.steps[0].seconds

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first tokens; None where there are no others.

        A round's tokens come at once, so those of the first one are not among the tokens that are counted here.
        """
        first, last = self.steps[0], self.steps[-1]
        later = last.num_tokens - first.num_tokens
        return (last.seconds - first.seconds) / later if later else None


class Contender(Protocol):
    """One way to answer, on loaded models.

    Attributes:
        name: As it was asked for.
    """

    name: str

    def run(self, prompt: Conversation, max_tokens: int) -> Run:
        """Answer greedily.

        Raises:
            Unavailable: It turns out not to apply here.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with its circumstances.

    Attributes:
        workload: Of the prompt.
        contender: Who.
        round: Number of the round, in which every contender has the same prompt.
        turn: When in the round it was its turn, from 0.
        run: What happened.
        peak_bytes: Most memory in use meanwhile, as `PeakMemory` counts it.
    """

    workload: str
    contender: str
    round: int
    turn: int
    run: Run
    peak_bytes: int


class PeakMemory:
    """Most memory in use since the last `restart`.

    On GPUs what torch has allocated on all of them, else the resident memory of the whole process, so that on a CPU
    every contender's figure holds the weights of all models.

    Attributes:
        kind: What is counted, for people.
    """

    def __init__(self, devices: Sequence[str], *, status: Path = Path("/proc/self/status")) -> None:
        self._gpus = sorted({device for device in devices if device.startswith("cuda")})
        self._status = status
        self.kind = "CUDA memory" if self._gpus else "resident memory"
        if not self._gpus and not self._forget():
            self.kind = "resident memory since the process began"

    def restart(self) -> None:
        """Begin to look for the peak anew."""
        if not self._gpus:
            self._forget()
            return
        import torch

        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    @property
    def peak_bytes(self) -> int:
        """The peak so far."""
        if self._gpus:
            import torch

            return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus)
        if self.kind == "resident memory":
            found = re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text(encoding="ascii"))
            return 1024 * int(found[1]) if found else 0
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _forget(self) -> bool:
        """Ask the kernel (Linux) to forget the peak of this process; return whether it did."""
        try:
            (self._status.parent / "clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

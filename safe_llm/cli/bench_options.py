"""The flags of `safe-llm bench`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

from safe_llm.cli.options import _flag

__all__ = ["BenchFlags"]

_bench = functools.partial(_flag, panel="Benchmark")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What is measured, how, and where the results go."""

    contenders: Annotated[
        list[str] | None,
        _bench(
            "Who takes part: safe, every-token, drafter, generate (transformers, the drafter alone), assisted "
            "(transformers' assisted generation). The first three with changes: safe:lookahead=5,method=gac.",
            default="all that apply",
            metavar="NAME...",
        ),
    ] = None
    workload: Annotated[list[str] | None, _bench("What is asked.", default="maths", metavar="maths|rag|chat...")] = None
    data: Annotated[
        str | None, _bench("Further prompts, JSON Lines: messages, prompt, or items of `eval`.", metavar="FILE")
    ] = None
    rounds: Annotated[int, _bench("Trials of each contender on each workload.", default=5, metavar="N")] = 5
    tokens: Annotated[int, _bench("Most tokens of an answer.", default=64, metavar="N")] = 64
    batch: Annotated[
        list[int] | None, _bench("Measure batches of so many rows too, for instance 1 4 16.", metavar="N...")
    ] = None
    own_time: Annotated[
        bool, _bench("Measure the engine's own time per round instead, without the models.", "--own-time")
    ] = False
    threads: Annotated[int | None, _bench("Threads of torch.", default="torch's choice", metavar="N")] = None
    seed: Annotated[int, _bench("Of the choice of prompts and of the intervals.", default=0)] = 0
    output: Annotated[str | None, _bench("Write the JSON object to a file too.", metavar="FILE.json")] = None
    plot: Annotated[str | None, _bench("Write a picture.", metavar="FILE.png")] = None
    quiet: Annotated[bool, _bench("No progress on stderr.", "--quiet", "-q")] = False

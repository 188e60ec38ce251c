"""For the tests of the benchmark: runs and trials that nobody ran."""

from __future__ import annotations

from safe_llm.bench.trials import Counts, Run, Step, Trial


def made_run(num_tokens: int = 4, total_s: float = 2.0, *, steps=((1, 0.5), (4, 2.0)), counts=None, **phases) -> Run:
    return Run(
        num_tokens=num_tokens,
        total_s=total_s,
        steps=tuple(Step(num_tokens=n, seconds=s) for n, s in steps),
        counts=counts or Counts(num_forwards={"d": num_tokens}),
        phases=phases,
    )


def made_trial(contender: str, number: int, run: Run, *, turn: int = 0, peak_bytes: int = 0) -> Trial:
    return Trial(workload="w", contender=contender, round=number, turn=turn, run=run, peak_bytes=peak_bytes)

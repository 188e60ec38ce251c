"""The report's tables: counters and times, written out."""

from __future__ import annotations

from safe_llm.record import phase_seconds
from safe_llm.report.view import Answer

__all__ = ["counter_rows", "latency_rows", "milliseconds"]


def counter_rows(answer: Answer) -> list[tuple[str, str]]:
    """Return the counters of an answer that ended, by name."""
    result = answer.request.result
    if result is None:
        return []
    counters, usage = result.counters, result.usage
    rows = [
        ("prompt tokens", str(usage.prompt_tokens)),
        ("answer tokens", f"{counters.num_tokens} ({result.finish_detail})"),
        ("rounds", str(counters.num_rounds)),
        ("drafted tokens", str(counters.num_draft_tokens)),
        ("accepted", f"{counters.num_accepted_tokens} ({counters.acceptance_rate:.0%} of drafted)"),
        ("accepted per round", f"{counters.mean_acceptance_length:.2f}"),
        ("ensemble points", f"{counters.num_ensembled} ({counters.ensemble_rate:.0%} of tokens)"),
        ("replaced", f"{counters.num_replaced} ({counters.replacement_rate:.0%} of tokens)"),
    ]
    rows += [(f"forward passes of {name}", str(count)) for name, count in counters.num_forwards.items()]
    rows += [(f"{lost.member} lost", f"after {lost.position} tokens: {lost.reason}") for lost in result.lost]
    return rows + ([] if result.seed is None else [("seed", str(result.seed))])


def latency_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """Return the times of an answer that ended: name, time, share of the whole."""
    result = answer.request.result
    if result is None:
        return []
    timings = result.timings
    total = timings.total_s or 1.0
    rows = [(name, milliseconds(s), f"{s / total:.0%}") for name, s in phase_seconds(timings).items()]
    rows.append(("total", milliseconds(timings.total_s), ""))
    for name, seconds in (("first token", timings.ttft_s), ("per token after it", timings.tpot_s)):
        rows.append((name, "-" if seconds is None else milliseconds(seconds), ""))
    speed = timings.num_tokens / total if timings.total_s else 0.0
    return [*rows, ("tokens per second", f"{speed:.1f}", "")]


def milliseconds(seconds: float) -> str:
    """Write a time: milliseconds below ten seconds."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"

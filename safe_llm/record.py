"""What a generation did, as plain JSON values: the one form that messages, callbacks and traces carry.

Nothing here holds text of the prompt or of the answer, except the tokens at the ensemble points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from safe_llm.events import EnsemblePoint, Result, Timings
from safe_llm.types import TokenLogprob

__all__ = [
    "PHASES",
    "SCHEMA_VERSION",
    "Totals",
    "logprob_records",
    "phase_seconds",
    "point_record",
    "ratio",
    "safe_record",
    "totals_table",
]

SCHEMA_VERSION = 1

PHASES = ("tokenize", "prefill", "draft", "verify", "ensemble")
"""What a generation spends its time on, in the order of one round."""


def safe_record(result: Result, *, members: Sequence[str], mode: str, method: str, fingerprint: str) -> dict[str, Any]:
    """Return the record of one answer.

    It has strings, floats and lists, so it may stand on one chunk of a stream only: LangChain concatenates the strings
    of merged chunks, adds their integers and refuses their floats.

    Args:
        result: The answer.
        members: Names, the drafter first.
        mode: The ensemble's mode.
        method: The ensemble's method.
        fingerprint: The ensemble's fingerprint.
    """
    counters = result.counters
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "members": list(members),
        "mode": mode,
        "method": method,
        "fingerprint": fingerprint,
        "n_points": counters.num_ensembled,
        "n_replaced": counters.num_replaced,
        "n_rounds": counters.num_rounds,
        "n_tokens": counters.num_tokens,
        "n_draft_tokens": counters.num_draft_tokens,
        "n_accepted_tokens": counters.num_accepted_tokens,
        "acceptance_rate": counters.acceptance_rate,
        "mean_acceptance_length": counters.mean_acceptance_length,
        "ensemble_rate": counters.ensemble_rate,
        "replacement_rate": counters.replacement_rate,
        "outcomes": {str(outcome): count for outcome, count in counters.outcomes.items()},
        "n_forwards": dict(counters.num_forwards),
        "latency_s": _latency(result.timings),
        "finish_detail": str(result.finish_detail),
    }
    if result.seed is not None:
        record["seed"] = result.seed
    if result.lost:
        # positions as text, for the reason above
        record["lost"] = [f"{lost.member} after {lost.position} tokens: {lost.reason}" for lost in result.lost]
    return record


def point_record(point: EnsemblePoint) -> dict[str, Any]:
    """Return the record of one ensemble point; bytes become text, with U+FFFD where they are not UTF-8."""
    # Never a key "index": LangChain merges list items of the same index into one when it adds chunks.
    return {
        "position": point.position,
        "byte_offset": point.byte_offset,
        "token_before": _text(point.drafted),
        "token": _text(point.chosen),
        "replaced": point.replaced,
        "end": not point.chosen,
        "reason": point.reason,
        "probs": _probs(point.probabilities),
        "candidates": [
            {"token": _text(c.token), "prob": float(c.probability), "probs": _probs(c.probabilities)}
            for c in point.candidates
        ],
    }


class Totals(Protocol):
    """Sums over many answers' records."""

    n_tokens: int
    n_points: int
    n_replaced: int
    n_draft_tokens: int
    n_accepted_tokens: int
    latency_s: dict[str, float]
    ttft_s: list[float]


def totals_table(first: Sequence[tuple[str, str, str]], totals: Totals) -> str:
    """Return totals as a small table of plain text, after the rows (label, value, note) that are the caller's own."""
    return "\n".join(f"{label:<10} {value:>10}  {note}".rstrip() for label, value, note in (*first, *_rows(totals)))


def _rows(totals: Totals) -> Iterator[tuple[str, str, str]]:
    yield "tokens", str(totals.n_tokens), ""
    yield "points", str(totals.n_points), f"{ratio(totals.n_points, totals.n_tokens):.1%} of tokens"
    yield "replaced", str(totals.n_replaced), f"{ratio(totals.n_replaced, totals.n_tokens):.1%} of tokens"
    kept = ratio(totals.n_accepted_tokens, totals.n_draft_tokens)
    yield "accepted", str(totals.n_accepted_tokens), f"{kept:.1%} of {totals.n_draft_tokens} drafted"
    total = totals.latency_s["total"]
    yield "seconds", f"{total:.3f}", ""
    for phase in PHASES:
        yield f"  {phase}", f"{totals.latency_s[phase]:.3f}", f"{ratio(totals.latency_s[phase], total):.1%}"
    yield "mean TTFT", f"{sum(totals.ttft_s) / len(totals.ttft_s):.3f}" if totals.ttft_s else "-", ""


def ratio(part: float, whole: float) -> float:
    """Return part over whole; 0 of nothing."""
    return part / whole if whole else 0.0


def logprob_records(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return tokens with their log-probabilities, in the form of OpenAI's `logprobs.content`."""
    return [
        {**_logprob(t.token, t.logprob), "top_logprobs": [_logprob(token, value) for token, value in t.top]}
        for t in logprobs
    ]


def _logprob(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(token), "bytes": list(token), "logprob": logprob}


def phase_seconds(timings: Timings) -> dict[str, float]:
    """Return the seconds of every phase, in the order of `PHASES`."""
    return {phase: getattr(timings, f"{phase}_s") for phase in PHASES}


def _latency(timings: Timings) -> dict[str, float | None]:
    return {
        **phase_seconds(timings),
        "total": timings.total_s,
        "ttft": timings.ttft_s,
        "tpot": timings.tpot_s,
    }


def _text(token: bytes) -> str:
    return token.decode("utf-8", errors="replace")


def _probs(probabilities: Mapping[str, float]) -> dict[str, float]:
    return {member: float(p) for member, p in probabilities.items()}

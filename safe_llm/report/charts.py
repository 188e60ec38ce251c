"""The report's charts: SVG with classes for its style sheet, no library. Nothing in them depends on colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from safe_llm.events import Outcome
from safe_llm.record import phase_seconds
from safe_llm.report.tables import milliseconds
from safe_llm.report.view import Answer
from safe_llm.report.words import look_of, meaning

__all__ = ["Bar", "bars", "ensemble_rate", "outcome_bars", "phase_bars", "rate_chart"]

WIDTH = 360
_ROW = 34
_MAX_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a bar chart.

    Attributes:
        label: What it counts.
        value: How long it is.
        text: The value, written.
        key: CSS class of its fill.
    """

    label: str
    value: float
    text: str
    key: str = "plain"


def phase_bars(answer: Answer) -> list[Bar]:
    """Return where the time of an answer went; nothing if the trace does not say."""
    if answer.request.result is None:
        return []
    timings = answer.request.result.timings
    phases = phase_seconds(timings)
    phases["other"] = max(0.0, timings.total_s - sum(phases.values()))
    total = sum(phases.values()) or 1.0
    return [Bar(label=name, value=s, text=f"{milliseconds(s)} · {s / total:.0%}") for name, s in phases.items()]


def outcome_bars(answer: Answer) -> list[Bar]:
    """Return how often each outcome occurred, in the order of the outcomes."""
    outcomes = [token.decision.outcome for token in answer.tokens]
    return [
        Bar(
            label=meaning(outcome), value=count, text=f"{count} · {count / len(outcomes):.0%}", key=look_of(outcome).key
        )
        for outcome in Outcome
        if (count := outcomes.count(outcome))
    ]


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Draw horizontal bars under their labels."""
    longest = max((row.value for row in rows), default=0.0) or 1.0
    parts = []
    for number, row in enumerate(rows):
        top = number * _ROW
        parts.append(
            Markup(
                '<text class="name" x="0" y="{y}">{label}</text><text class="value" x="{width}" y="{y}">{text}</text>'
                '<rect class="track" x="0" y="{bar}" width="{width}" height="8" rx="2"/>'
                '<rect class="bar {key}" x="0" y="{bar}" width="{length:.1f}" height="8" rx="2"/>'
            ).format(
                y=top + 14,
                bar=top + 20,
                width=WIDTH,
                label=row.label,
                text=row.text,
                key=row.key,
                length=max(2.0, WIDTH * row.value / longest) if row.value else 0.0,
            )
        )
    summary = f"{title}: " + ", ".join(f"{row.label} {row.text}" for row in rows)
    return _svg(summary, _ROW * len(rows), parts)


def ensemble_rate(answer: Answer) -> float:
    """Return the share of the decided tokens at which the ensemble acted."""
    return sum(token.decision.outcome.is_ensembled for token in answer.tokens) / max(1, len(answer.tokens))


def rate_chart(answer: Answer) -> Markup:
    """Draw the share of ensembled tokens along the text: replaced below, confirmed above."""
    outcomes = [token.decision.outcome for token in answer.tokens]
    left, right, top, height = 40, 4, 10, 120
    inner = WIDTH - left - right
    num_bins = min(_MAX_BINS, len(outcomes))
    parts = [_grid(left, top, height, share) for share in (0.0, 0.5, 1.0)]
    for number in range(num_bins):
        first, last = number * len(outcomes) // num_bins, (number + 1) * len(outcomes) // num_bins
        x, bottom = left + inner * number / num_bins, float(top + height)
        for outcome in (Outcome.REPLACED, Outcome.CONFIRMED):
            tall = height * outcomes[first:last].count(outcome) / (last - first)
            bottom -= tall
            if tall:
                parts.append(_column(x + 1, bottom, inner / num_bins - 2, tall, look_of(outcome).key))
    rate = ensemble_rate(answer)
    y = top + height * (1 - rate)
    parts.append(
        Markup('<line class="mean" x1="{a}" y1="{y:.1f}" x2="{b}" y2="{y:.1f}"/>').format(a=left, b=WIDTH - right, y=y)
        + Markup('<text class="axis" x="{x}" y="{y}">token 1</text>').format(x=left, y=top + height + 18)
        + Markup('<text class="axis end" x="{x}" y="{y}">{n}</text>').format(
            x=WIDTH - right, y=top + height + 18, n=len(outcomes)
        )
        + _key(115, top + height + 18, "replaced")
        + _key(215, top + height + 18, "confirmed")
    )
    summary = f"Ensemble rate over the text: {rate:.0%} of {len(outcomes)} tokens in all (the dashed line)"
    return _svg(summary, top + height + 24, parts)


def _grid(left: int, top: int, height: int, share: float) -> Markup:
    y = top + height * (1 - share)
    return Markup(
        '<line class="grid" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>'
        '<text class="axis end" x="{text}" y="{base}">{share}</text>'
    ).format(left=left, right=WIDTH - 4, y=y, text=left - 6, base=y + 4, share=f"{share:.0%}")


def _key(x: int, y: int, key: str) -> Markup:
    return _column(x, y - 9, 10, 10, key) + Markup('<text class="axis" x="{x}" y="{y}">{key}</text>').format(
        x=x + 16, y=y, key=key
    )


def _column(x: float, y: float, width: float, height: float, key: str) -> Markup:
    return Markup('<rect class="bar {key}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>').format(
        key=key, x=x, y=y, width=max(1.0, width), height=height
    )


def _svg(summary: str, height: int, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}">{parts}</svg>').format(
        width=WIDTH, height=height, summary=summary, parts=Markup("").join(parts)
    )

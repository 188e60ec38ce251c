"""The report as one HTML file: style and script inside, nothing fetched, nothing that a model wrote as markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from safe_llm._version import __version__
from safe_llm.report.charts import bars, ensemble_rate, outcome_bars, phase_bars, rate_chart
from safe_llm.report.tables import counter_rows, latency_rows
from safe_llm.report.view import Answer, Cut, Token, answers
from safe_llm.report.words import meaning
from safe_llm.trace import Trace
from safe_llm.visible import END, harmless, label

__all__ = ["render_html"]

_ASSETS = resources.files("safe_llm.report")


def render_html(traces: Sequence[tuple[str, Trace]]) -> str:
    """Return the page for the requests of all traces, which come with their names."""
    style, script = _asset("page.css"), _asset("page.js")
    page = _environment().from_string(_asset("page.html.j2"))
    return page.render(
        answers=answers(traces),
        problems=[(source, trace.problem) for source, trace in traces if trace.problem],
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        version=__version__,
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Allow exactly this style sheet and this script, and nothing to be loaded or sent."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    rules = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:"
    return rules.format(*hashes) + "; base-uri 'none'; form-action 'none'"


def _environment() -> Environment:
    """Escape everything, and make control characters visible in everything, wherever the template shows it."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: harmless(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"label": label, "meaning": meaning, "shown": _shown}
    environment.globals |= {
        "data": _data,
        "charts": _charts,
        "counter_rows": counter_rows,
        "latency_rows": latency_rows,
    }
    return environment


def _shown(token: Token) -> tuple[str, str]:
    """Return a token's characters as the page shows them: what belongs to the answer, and what a stop string cut."""
    if not token.text:  # END, or inside a character
        return ("", "") if token.end > token.start else (END, "")
    text = token.text
    return text[: token.num_kept].replace("\n", "⏎\n"), text[token.num_kept :].replace("\n", "⏎\n")


def _charts(answer: Answer) -> list[tuple[str, Markup]]:
    title = f"Ensemble rate over the text, {ensemble_rate(answer):.0%} overall"
    charts = [(title, rate_chart(answer))] if answer.tokens else []
    for title, rows in (("Outcomes", outcome_bars(answer)), ("Time per phase", phase_bars(answer))):
        if rows:
            charts.append((title, bars(title, rows)))
    return charts


# ---------------------------------------------------------------------- data for the panel


def _data(answer: Answer) -> Markup:
    """Return what the panel shows as JSON that cannot end its element, whatever is in it."""
    members = [{"name": m.name, "weight": m.weight} for m in answer.header.members]
    values = _clean({"members": members, "tokens": [_token_data(answer, token) for token in answer.tokens]})
    text = json.dumps(values, separators=(",", ":"))  # ASCII: no line separator, no surrogate
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _token_data(answer: Answer, token: Token) -> dict[str, Any]:
    decision, point = token.decision, token.point
    names = [member.name for member in answer.header.members]
    return {
        "position": decision.position,
        "byte": token.start,
        "token": label(answer.generated[token.start : token.end]),
        "drafted": label(decision.token),
        "look": token.look.key,
        "acted": point is not None,
        "meaning": meaning(decision.outcome),
        "why": token.why,
        "asked": [decision.probabilities.get(name) for name in names],
        "tops": [[[label(key), p] for key, p in decision.tops.get(name, ())] for name in names],
        "candidates": [
            [label(c.token), c.probability, [c.probabilities.get(name) for name in names]]
            for c in (point.candidates if point else ())
        ],
        "cuts": [_cut_data(answer, token, cut) for cut in answer.cuts(token)],
    }


def _cut_data(answer: Answer, token: Token, cut: Cut) -> list[Any]:
    """Member, whether one of its tokens begins where this one does, and its pieces: text, touched, exact."""
    last = max(token.end, token.start + 1)
    pieces = [
        [label(answer.generated[p.start : p.end]), p.start < last and p.end > token.start, p.is_exact]
        for p in cut.pieces
    ]
    return [cut.member, cut.begins, pieces]

"""The report's vocabulary: what each outcome looks like and why it came about, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from safe_llm.events import Decision, EnsemblePoint, Outcome
from safe_llm.trace import TracedRequest, TraceHeader
from safe_llm.visible import label

__all__ = ["LOOKS", "Look", "look_of", "meaning", "reason"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How tokens of some outcomes look, on every medium.

    Attributes:
        key: CSS class, and name in the data.
        title: In the legend.
        meaning: One sentence.
        style: On a terminal: attributes, no colours, so everybody sees them.
        marks: Around the token where there are no styles.
        outcomes: Which outcomes look like this.
    """

    key: str
    title: str
    meaning: str
    style: str
    marks: tuple[str, str]
    outcomes: tuple[Outcome, ...]


LOOKS = (
    Look(
        key="accepted",
        title="accepted",
        meaning="the verifiers agree, or would not overrule the drafter",
        style="",
        marks=("", ""),
        outcomes=(Outcome.C1, Outcome.C2, Outcome.GATE, Outcome.SAMPLED),
    ),
    Look(
        key="replaced",
        title="replaced",
        meaning="the ensemble acted and chose another token than the drafter",
        style="bold reverse",
        marks=("[[", "]]"),
        outcomes=(Outcome.REPLACED,),
    ),
    Look(
        key="confirmed",
        title="confirmed",
        meaning="the ensemble acted and chose the drafter's token",
        style="underline",
        marks=("[", "]"),
        outcomes=(Outcome.CONFIRMED,),
    ),
    Look(
        key="skipped",
        title="skipped",
        meaning="kept unchecked: a verifier is in the middle of one of its tokens here (OOV-like)",
        style="dim italic",
        marks=("{", "}"),
        outcomes=(Outcome.OOV_LIKE,),
    ),
    Look(
        key="unrepresentable",
        title="not representable",
        meaning="kept unchecked: a verifier's tokenizer cannot spell the text here exactly",
        style="italic strike",
        marks=("{?", "?}"),
        outcomes=(Outcome.UNREPRESENTABLE,),
    ),
    Look(
        key="forced",
        title="forced",
        meaning="the form of the answer (a schema, a tool call) allows nothing else",
        style="dim",
        marks=("<", ">"),
        outcomes=(Outcome.FORCED,),
    ),
    Look(
        key="drafted",
        title="drafted",
        meaning="there is no verifier to ask",
        style="",
        marks=("", ""),
        outcomes=(Outcome.DRAFTED,),
    ),
)

_LOOK_OF = {outcome: look for look in LOOKS for outcome in look.outcomes}

_MEANINGS = {
    Outcome.DRAFTED: "accepted unchecked, no verifier",
    Outcome.OOV_LIKE: "skipped, inside a verifier's token",
    Outcome.UNREPRESENTABLE: "skipped, not representable",
    Outcome.FORCED: "forced by the answer's form",
    Outcome.C1: "accepted, every verifier agrees",
    Outcome.C2: "accepted, mean over the threshold",
    Outcome.GATE: "accepted, the drafter is confident",
    Outcome.SAMPLED: "accepted by the sampling test",
    Outcome.CONFIRMED: "ensembled, drafted token confirmed",
    Outcome.REPLACED: "ensembled, drafted token replaced",
}


def look_of(outcome: Outcome) -> Look:
    """Return how tokens of this outcome look."""
    return _LOOK_OF[outcome]


def meaning(outcome: Outcome) -> str:
    """Return an outcome in a few plain words."""
    return _MEANINGS[outcome]


def reason(
    decision: Decision, point: EnsemblePoint | None, header: TraceHeader, request: TracedRequest, inside: list[str]
) -> str:
    """Say in a sentence or two why this became of a token.

    Args:
        decision: The verdict.
        point: What the ensemble did here, if it acted.
        header: Who answered, and how.
        request: The request.
        inside: Members of whose tokens none begins here, in the final text.
    """
    if point is not None:
        return _why_ensembled(decision, point, header)
    uses_mass = header.config.get("method") == "prefix-mass"
    judges_spans = uses_mass and not request.sampling.get("temperature")
    threshold = header.config.get("consensus_threshold")
    match decision.outcome:
        case Outcome.C1 if uses_mass:
            return "Every verifier gives the drafted text more than half of its probability, however it cuts it (C1)."
        case Outcome.C1:
            return "Every verifier's own token here is its favourite, so nobody had to be asked further (C1)."
        case Outcome.C2:
            return f"A verifier has another favourite, but the weighted mean{_mean(decision, header)} is over the" + (
                f" threshold {threshold} (C2)."
            )
        case Outcome.GATE:
            return "The drafter gives its token at least half of its probability; GaC then keeps it."
        case Outcome.SAMPLED:
            heat = request.sampling.get("temperature")
            return f"Drawn by the drafter at temperature {heat}, and accepted by the test against the ensemble."
        case Outcome.OOV_LIKE:
            who = f" ({', '.join(inside)})" if inside else ""
            judged = (
                "it was judged as a part of the text before it" if judges_spans else "which therefore has no say here"
            )
            return f"The text before it ends inside a token of a verifier{who}, {judged}."
        case Outcome.UNREPRESENTABLE:
            return "A verifier's tokenizer cannot spell the text here exactly, so it abstains."
        case Outcome.FORCED:
            return "The form that the answer must have leaves no other continuation; nobody was asked."
        case _:
            return "There is no verifier in this mode; the drafter's token stands."


def _why_ensembled(decision: Decision, point: EnsemblePoint, header: TraceHeader) -> str:
    why = {
        "no-consensus": "A verifier has another favourite, and the weighted mean"
        f"{_mean(decision, header)} is not over the threshold {header.config.get('consensus_threshold')}.",
        "rejected": "The test against the ensemble's distribution rejected the drafted token.",
        "every-token": "In this mode the members' distributions are merged at every token.",
    }.get(point.reason, point.reason)
    if not point.replaced:
        return f"{why} The ensemble chose the drafted token all the same."
    return f"{why} The ensemble chose {label(point.chosen)} instead of {label(point.drafted)}."


def _mean(decision: Decision, header: TraceHeader) -> str:
    """The mean that C2 compares, where the trace has what it is made of and the method compares this one."""
    weights = {member.name: member.weight for member in header.members}
    is_papers = header.config.get("method") in ("unite", "gac")
    if not is_papers or decision.probabilities.keys() != weights.keys():
        return ""
    return f" {sum(weights[name] * p for name, p in decision.probabilities.items()):.2f}"

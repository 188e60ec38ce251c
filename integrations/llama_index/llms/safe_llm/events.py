"""What an ensemble did, as events of LlamaIndex's instrumentation.

They carry the span of the call they belong to, also while an answer is streamed, when that span has ended already.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent

from safe_llm.events import EnsemblePoint, Event, RoundFinished
from safe_llm.record import phase_seconds, point_record

__all__ = ["EnsembleGenerationEndEvent", "EnsemblePointEvent", "EnsembleRoundEvent", "report", "report_end"]

_dispatcher = get_dispatcher(__name__)


class EnsemblePointEvent(BaseEvent):
    """The members' distributions were merged for one token.

    Sent when the token is certain. A stop string may still cut it off the answer; then it is not in `safe_points`.

    Attributes:
        point: Its record: position, token, what the drafter proposed, each member's probabilities.
    """

    point: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "EnsemblePointEvent"


class EnsembleRoundEvent(BaseEvent):
    """One draft-verify round.

    Attributes:
        num_draft_tokens: How many tokens were drafted.
        outcomes: What became of each of them, up to the one that ended the round.
        latency_s: Seconds per phase, of the whole batch.
    """

    num_draft_tokens: int
    outcomes: list[str]
    latency_s: dict[str, float]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "EnsembleRoundEvent"


class EnsembleGenerationEndEvent(BaseEvent):
    """An answer is finished. It says what `raw` of the last response says.

    Attributes:
        usage: Token counts.
        safe: The ensemble's record: members, counts, rates, `latency_s` per phase.
        safe_points: Records of the ensemble points in the answer.
        finish_reason: `stop`, `length` or `tool_calls`.
    """

    usage: dict[str, int]
    safe: dict[str, Any]
    safe_points: list[dict[str, Any]]
    finish_reason: str

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "EnsembleGenerationEndEvent"


def report(event: Event, span_id: str | None) -> None:
    """Tell the dispatcher what happened while an answer is decoded."""
    if isinstance(event, EnsemblePoint):
        _dispatcher.event(EnsemblePointEvent(span_id=span_id, point=point_record(event)))
    elif isinstance(event, RoundFinished):
        _dispatcher.event(
            EnsembleRoundEvent(
                span_id=span_id,
                num_draft_tokens=event.num_draft_tokens,
                outcomes=[str(decision.outcome) for decision in event.decisions],
                latency_s=phase_seconds(event.timings),
            )
        )


def report_end(raw: dict[str, Any], span_id: str | None) -> None:
    """Tell the dispatcher that an answer is finished; `raw` is what its last response carries."""
    fields = ("usage", "safe", "safe_points", "finish_reason")
    _dispatcher.event(EnsembleGenerationEndEvent(span_id=span_id, **{name: raw[name] for name in fields}))

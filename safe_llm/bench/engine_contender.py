"""A configuration of our engine as a contender."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from safe_llm.bench.trials import Counts, Run, Step
from safe_llm.bench.workloads import Conversation
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.events import Event, GenerationFinished, RoundFinished
from safe_llm.member import Member
from safe_llm.record import phase_seconds

__all__ = ["EngineContender"]


class EngineContender:
    """Answers with an ensemble, and reads its events.

    Attributes:
        name: As it was asked for.
        ensemble: The ensemble, on members that contenders share.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        config: EnsembleConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.ensemble = Ensemble(members, config)
        self._clock = clock

    def run(self, prompt: Conversation, max_tokens: int) -> Run:
        """See `Contender.run`."""
        started = self._clock()
        events = self.ensemble.stream(prompt, events=True, detailed=False, max_tokens=max_tokens)
        seen = [(event, self._clock() - started) for event in events]
        (result,) = (event.result for event, _ in seen if isinstance(event, GenerationFinished))
        counters, num_tokens = result.counters, result.usage.completion_tokens
        return Run(
            num_tokens=num_tokens,
            total_s=seen[-1][1],
            steps=_steps(seen, num_tokens),
            counts=Counts(
                num_forwards=dict(counters.num_forwards),
                num_draft_tokens=counters.num_draft_tokens,
                num_rounds=counters.num_rounds,
                num_ensembled=counters.num_ensembled,
                num_replaced=counters.num_replaced,
            ),
            phases=phase_seconds(result.timings),
        )


def _steps(seen: Sequence[tuple[Event, float]], num_tokens: int) -> tuple[Step, ...]:
    """Return when rounds ended: the tokens before a round are the position of its first decision."""
    steps: list[Step] = []
    for event, seconds in reversed(seen):
        if isinstance(event, RoundFinished):
            steps.append(Step(num_tokens=num_tokens, seconds=seconds))
            num_tokens = event.decisions[0].position if event.decisions else num_tokens
    return tuple(reversed(steps))

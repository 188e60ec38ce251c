"""Several ways to answer the same questions, taking turns, on models that are loaded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import get_args

from safe_llm.config import EnsembleConfig, EnsembleSpec, MethodName, Mode
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError, GenerationError, NonFiniteLogitsError, PromptError, UnknownNameError
from safe_llm.evaluation.questions import Question
from safe_llm.evaluation.store import Answer, AnswerStore, answers_file, only_writer
from safe_llm.events import Result
from safe_llm.member import Member

__all__ = ["DEFAULT_RUNS", "Answers", "Contender", "Plan", "answer_all", "contenders_of", "plan_runs"]

DEFAULT_RUNS = ("drafter", "verifiers", "every-token", "safe")
_CHUNK_BATCHES = 2

_MODES: tuple[Mode, ...] = ("every-token", "safe")
_ENSEMBLES: dict[str, tuple[Mode, MethodName | None]] = {
    **{mode: (mode, None) for mode in _MODES},
    **{f"{mode}:{method}": (mode, method) for mode in _MODES for method in get_args(MethodName)[1:]},
}
"""Runs of all members together: their mode, and their method where it is not the spec's."""

Answers = Mapping[tuple[str, str], Answer]
"""By task and item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to answer, before weights are loaded.

    Attributes:
        name: A member's name for that member alone, else `every-token` or `safe`, with a colon and a method's name
            where it is not the spec's method.
        members: Places of its members in the spec, the drafter first.
        config: How they decide.
    """

    name: str
    members: tuple[int, ...]
    config: EnsembleConfig

    @property
    def is_alone(self) -> bool:
        """Whether it is one member without the others."""
        return self.config.mode == "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan with its loaded ensemble."""

    plan: Plan
    ensemble: Ensemble


def plan_runs(spec: EnsembleSpec, runs: Sequence[str] = DEFAULT_RUNS) -> list[Plan]:
    """Return what is to be run: each member alone, then the ensembles.

    Args:
        spec: The members and how they decide together.
        runs: Of `drafter`, `verifiers`, `every-token`, `safe`, these two with a method (`safe:gac`) and members'
            names. The ensembles are left out of the default where there is no verifier.

    Raises:
        ConfigError: An unknown run, an ensemble of one member, a member that is called like a run.
    """
    names = [member.display_name for member in spec.members]
    for name in names:
        if name in (*DEFAULT_RUNS, *_ENSEMBLES):
            raise ConfigError(f"a member is called {name!r}, like a run", hint="give it another `name`")
    wanted: dict[str, None] = {}
    for run in runs:
        if run not in (*DEFAULT_RUNS, *_ENSEMBLES, *names):
            raise UnknownNameError("run", run, [*DEFAULT_RUNS, *_ENSEMBLES, *names])
        wanted |= dict.fromkeys({"drafter": names[:1], "verifiers": names[1:]}.get(run, [run]))
    if len(names) == 1 and tuple(runs) == DEFAULT_RUNS:
        wanted = dict.fromkeys(names)
    if len(names) == 1 and (together := [run for run in wanted if run not in names]):
        raise ConfigError(f"{together[0]!r} needs a drafter and at least one verifier", hint="add --verifier")
    if not wanted:
        raise ConfigError("there is nothing to run", hint=f"runs are {', '.join(DEFAULT_RUNS)}, or members' names")
    alone = [_plan(spec, name, (place,), "drafter") for place, name in enumerate(names) if name in wanted]
    everybody = tuple(range(len(names)))
    return alone + [
        _plan(spec, name, everybody, mode, method) for name, (mode, method) in _ENSEMBLES.items() if name in wanted
    ]


def _plan(
    spec: EnsembleSpec, name: str, members: tuple[int, ...], mode: Mode, method: MethodName | None = None
) -> Plan:
    weights = None if mode == "drafter" else spec.ensemble.weights
    config = spec.ensemble.updated({"mode": mode, "method": method}).model_copy(update={"weights": weights})
    config.normalized_weights(len(members))
    return Plan(name=name, members=members, config=config)


def contenders_of(plans: Sequence[Plan], members: Mapping[int, Member]) -> list[Contender]:
    """Build the plans' ensembles on members that they share; they may be used one at a time.

    Args:
        plans: What is to be run.
        members: Loaded members by their place in the spec.
    """
    return [
        Contender(plan=plan, ensemble=Ensemble([members[place] for place in plan.members], plan.config))
        for plan in plans
    ]


def answer_all(
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    output: Path,
    *,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Answers]:
    """Let every contender answer every question, and return the answers by contender.

    They take turns on chunks of two batches, so that a machine whose speed drifts is equally slow to all of them.
    Answers are in `output/answers` when their chunk is done; those that were there before are kept, so the same call
    after an interruption goes on where it was.

    Args:
        contenders: Who answers.
        questions: What is asked; all of one chunk's have equal decoding parameters.
        output: Folder of the evaluation.
        report: Called with a contender's name, how many questions it has answered, and how many there are.

    Raises:
        EvaluationError: Answers in `output` are of another configuration, or another process writes there.
    """
    with ExitStack() as stack:
        stack.enter_context(only_writer(output))
        stores = {
            contender.plan.name: stack.enter_context(
                AnswerStore(
                    answers_file(output, contender.plan.name), questions, fingerprint=contender.ensemble.fingerprint
                )
            )
            for contender in contenders
        }
        for name, store in stores.items():
            report(name, len(store.answers), len(questions))
        waiting = {contender.plan.name: iter(stores[contender.plan.name].missing) for contender in contenders}
        going = list(contenders)
        while going:
            for contender in tuple(going):
                name = contender.plan.name
                chunk = list(islice(waiting[name], _CHUNK_BATCHES * contender.ensemble.config.max_batch_size))
                if not chunk:
                    going.remove(contender)
                    continue
                _answer_chunk(contender.ensemble, chunk, stores[name])
                report(name, len(stores[name].answers), len(questions))
        return {name: dict(store.answers) for name, store in stores.items()}


def _answer_chunk(ensemble: Ensemble, chunk: Sequence[Question], store: AnswerStore) -> None:
    """Answer questions in groups of equal parameters, each one batch.

    What is wrong with a question (it does not fit the window) counts as its answer. What is wrong with a model (memory
    is out) ends the run, after the answers that there are were kept.
    """
    groups: dict[str, list[Question]] = {}
    for question in chunk:
        groups.setdefault(repr(sorted(question.params.items())), []).append(question)
    for group in groups.values():
        started = time.perf_counter()
        prompts = [question.prompt for question in group]
        outcomes = ensemble.generate(prompts, return_exceptions=True, **group[0].params)
        seconds = (time.perf_counter() - started) / len(group)
        for question, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, (Result, PromptError, NonFiniteLogitsError)):
                store.append(question, outcome, seconds=seconds)
        for outcome in outcomes:
            if isinstance(outcome, GenerationError) and not isinstance(outcome, NonFiniteLogitsError):
                raise outcome

"""`safe-llm eval` as a function: questions, answers of every contender, scores, results on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safe_llm.config import EnsembleSpec, MemberConfig
from safe_llm.ensemble import load_members
from safe_llm.errors import ConfigError, EvaluationError
from safe_llm.evaluation.files import make_folder, write_json
from safe_llm.evaluation.lm_eval_tasks.documents import DATA_VARIABLE
from safe_llm.evaluation.questions import Question, require_extra
from safe_llm.evaluation.results import Results, describe_contender, machine, now, task_result, versions
from safe_llm.evaluation.runs import DEFAULT_RUNS, Plan, answer_all, contenders_of, plan_runs
from safe_llm.evaluation.statistics import NUM_RESAMPLES
from safe_llm.evaluation.store import answers_file, check_answers
from safe_llm.evaluation.tasks import TASKS, TaskData, open_task, task_named
from safe_llm.member import Member
from safe_llm.types import SamplingParams

__all__ = ["Prepared", "Settings", "evaluate", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is to be evaluated.

    Attributes:
        spec: The members and how they decide; its sampling parameters win over the tasks' own.
        tasks: Names of tasks; none takes the task that fits the data file.
        data: A data file (of one task), or a folder with the tasks' files; None takes the folder or file that the
            environment variable `SAFE_LLM_EVAL_DATA` names.
        output: Folder for answers and results; an evaluation that was interrupted there goes on.
        runs: Of `drafter`, `verifiers`, `every-token`, `safe`, and members' names.
        limit: Only the first items of each task.
        seed: Of the intervals' resampling.
    """

    spec: EnsembleSpec
    tasks: tuple[str, ...]
    data: str | Path | None
    output: Path
    runs: tuple[str, ...] = DEFAULT_RUNS
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An evaluation whose input was checked, before weights are loaded.

    Attributes:
        settings: What was asked for.
        plans: The contenders.
        tasks: The tasks with their items.
        questions: What every contender is asked.
    """

    settings: Settings
    plans: tuple[Plan, ...]
    tasks: tuple[TaskData, ...]
    questions: tuple[Question, ...]

    @property
    def member_places(self) -> tuple[int, ...]:
        """Places in the spec of the members that some contender needs."""
        return tuple(sorted({place for plan in self.plans for place in plan.members}))


Loader = Callable[[Sequence[MemberConfig]], Sequence[Member]]


def prepare(settings: Settings) -> Prepared:
    """Check everything that can be checked without weights, gold answers included.

    Raises:
        ConfigError: A setting is not valid, or a package is missing.
        EvaluationError: Data that cannot be used, or answers in the output folder that do not belong to it.
    """
    require_extra()
    from safe_llm.evaluation.scoring import collect_questions

    if settings.limit is not None and settings.limit < 1:
        raise ConfigError(f"limit must be at least 1, got {settings.limit}")
    plans = plan_runs(settings.spec, settings.runs)
    SamplingParams.of(settings.spec.sampling)
    tasks = tuple(_limited(open_task(name, path), settings.limit) for name, path in _task_files(settings))
    questions = [
        replace(question, params={**question.params, **settings.spec.sampling}) for question in collect_questions(tasks)
    ]
    for plan in plans:
        check_answers(answers_file(settings.output, plan.name), questions)
    return Prepared(settings=settings, plans=tuple(plans), tasks=tasks, questions=tuple(questions))


def evaluate(
    prepared: Prepared,
    *,
    load: Loader = load_members,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> Results:
    """Let all contenders answer, score them, and write `results.json`, `results.md` and `results.png`.

    Args:
        prepared: What is to be done.
        load: Loads members.
        report: Called with a contender's name, how many questions it has answered, and how many there are.

    Raises:
        EvaluationError: The output folder holds answers of another configuration, or cannot be written.
        SafeLLMError: A member cannot be had, or failed; the answers so far are kept.
    """
    from safe_llm.evaluation.plot import write_plot
    from safe_llm.evaluation.scoring import FLAGS, score_answers
    from safe_llm.evaluation.tables import write_markdown

    settings = prepared.settings
    make_folder(settings.output)
    places = prepared.member_places
    members = dict(zip(places, load([settings.spec.members[place] for place in places]), strict=True))
    contenders = contenders_of(prepared.plans, members)
    answers = answer_all(contenders, prepared.questions, settings.output, report=report)
    scores = {name: score_answers(prepared.tasks, found) for name, found in answers.items()}
    results = Results(
        created=now(),
        versions=versions(),
        machine=machine(),
        members=[_describe_member(members[place], settings.spec.members[place]) for place in places],
        contenders=[describe_contender(contender) for contender in contenders],
        settings={
            **FLAGS,
            "limit": settings.limit,
            "seed": settings.seed,
            "num_resamples": NUM_RESAMPLES,
            "sampling": dict(settings.spec.sampling),
        },
        tasks=tuple(task_result(data, contenders, answers, scores, seed=settings.seed) for data in prepared.tasks),
    )
    write_json(results, settings.output / "results.json")
    write_markdown(results, settings.output / "results.md")
    write_plot(results, settings.output / "results.png")
    return results


def _task_files(settings: Settings) -> list[tuple[str | None, Path]]:
    """Return the tasks, each with its data file."""
    for name in settings.tasks:
        task_named(name)
        if settings.tasks.count(name) > 1:
            raise ConfigError(f"task {name!r} is named twice")
    given = settings.data or os.environ.get(DATA_VARIABLE)
    if not given:
        raise EvaluationError(
            "no data is named", hint=f"give --data a folder with the tasks' files or a file, or set {DATA_VARIABLE}"
        )
    path = Path(given)
    if path.is_dir():
        if not settings.tasks:
            raise ConfigError("name a task", hint=f"known: {', '.join(TASKS)}; or give --data a file")
        return [(name, path / task_named(name).file_name) for name in settings.tasks]
    if len(settings.tasks) > 1:
        raise ConfigError(
            f"one data file for {len(settings.tasks)} tasks", hint="give --data the folder that holds the tasks' files"
        )
    return [(settings.tasks[0] if settings.tasks else None, path)]


def _limited(data: TaskData, limit: int | None) -> TaskData:
    return data if limit is None else replace(data, items=data.items[:limit])


def _describe_member(member: Member, config: MemberConfig) -> Mapping[str, Any]:
    return {
        "name": member.name,
        "model": config.model,
        "revision": config.revision,
        "fingerprint": member.fingerprint,
        "licence": member.licence,
        "dtype": member.dtype,
        "device": member.device,
        "max_context": member.backend.max_context,
        "template": member.prompter.template is not None,
    }

"""What `safe-llm advise` does: everything is checked before weights are read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.cli import loading, terminal
from safe_llm.cli.answering import json_line
from safe_llm.cli.options import EnsembleFlags, MemberFlags, PlacementFlags, SamplingFlags
from safe_llm.config import EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, EvaluationError

if TYPE_CHECKING:
    from safe_llm.evaluation.advice import Advice
    from safe_llm.evaluation.tasks import TaskData
    from safe_llm.member import Member

__all__ = ["Question", "advise", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What advice is asked about.

    Attributes:
        members: The models.
        placement: Where they run.
        data: File of labelled items.
        task: Name of the task, or None to take the one that fits the file.
        text: File whose text boundaries are counted on, or None for the items' own text.
        limit: Most items, the first ones; None takes all.
        max_tokens: Limit of an answer; None takes the task's.
    """

    members: Sequence[str]
    placement: PlacementFlags
    data: str
    task: str | None
    text: str | None
    limit: int | None
    max_tokens: int | None


def advise(question: Question, *, as_json: bool, progress: bool) -> int:
    """Measure the members and print what to make of them.

    Raises:
        ConfigError: Fewer than two members, two of one name, a flag out of its range, an unknown task.
        EvaluationError: The data or the text cannot be used.
        ModelError: A member cannot be had or used.
    """
    from safe_llm.evaluation.advice import advise as measure
    from safe_llm.evaluation.advice import check_inputs

    configs = _configs(question)
    data = _labelled(question)
    text = None if question.text is None else _read(question.text)
    check_inputs([config.display_name for config in configs], data.items, text)
    members = load(configs, progress=progress)
    advice = measure(
        members,
        data.items,
        data.task,
        text=text,
        left_out=data.left_out,
        max_tokens=question.max_tokens,
        progress=_say_progress if progress else None,
    )
    _print(advice, _recommended(advice, configs), as_json=as_json)
    return 0


def _configs(question: Question) -> list[MemberConfig]:
    """Check the flags that need no file."""
    if len(question.members) < 2:
        raise ConfigError(
            f"advice compares members, got {len(question.members)}", hint="give --member twice or more often"
        )
    if question.limit is not None and question.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {question.limit}")
    drafter, *verifiers = question.members
    spec = loading.spec_of(
        MemberFlags(drafter=drafter, verifier=verifiers),
        question.placement,
        EnsembleFlags(),
        SamplingFlags(max_tokens=question.max_tokens),
    )
    return list(spec.members)


def _labelled(question: Question) -> TaskData:
    """Read the items, as many as are wanted, with the task that is asked for, or has this file, or fits it."""
    from safe_llm.evaluation.tasks import TASKS, open_task

    known = (task.name for task in TASKS.values() if task.file_name == Path(question.data).name)
    data = open_task(question.task or next(known, None), question.data)
    items = data.items[: question.limit]
    for item in items:
        data.task.prompt(item)  # may need files beside the data
    return replace(data, items=items)


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise EvaluationError(f"cannot read the text {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EvaluationError(f"the text {path!r} is not UTF-8", hint="convert it first") from None


def load(configs: Sequence[MemberConfig], *, progress: bool) -> list[Member]:
    """Load the members, each once; an unknown one is found before the weights of another are read."""
    names = ", ".join(config.display_name for config in configs)
    with terminal.waiting(f"loading {names}", shown=progress):
        from safe_llm.ensemble import load_members
        from safe_llm.models import resolve

        for config in configs:
            resolve(config, progress=progress)
        return load_members(configs, progress=progress)


def _say_progress(title: str, done: int, total: int) -> None:
    """Keep one line on a terminal; elsewhere say only what is finished."""
    line = terminal.harmless(f"{title}: {done} of {total} answers")
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done == total:
        terminal.say(line)


def _recommended(advice: Advice, configs: Sequence[MemberConfig]) -> EnsembleSpec:
    found = advice.recommendation
    by_name = {config.display_name: config for config in configs}
    return EnsembleSpec(
        drafter=by_name[found.drafter],
        verifiers=tuple(by_name[name] for name in found.verifiers),
        ensemble=found.config,
    )


def _print(advice: Advice, spec: EnsembleSpec, *, as_json: bool) -> None:
    if as_json:
        from safe_llm.evaluation.advice import advice_as_dict
        from safe_llm.evaluation.ready import command_line, toml_text

        ready = {"command": command_line(spec), "toml": toml_text(spec)}
        terminal.write(json_line(advice_as_dict(advice) | ready))
    else:
        from safe_llm.evaluation.advice_view import print_advice

        print_advice(terminal.console(), advice, spec)

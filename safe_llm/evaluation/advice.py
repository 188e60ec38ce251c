"""Which of the user's models should draft, which should verify, and how: measured on the user's own items."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from safe_llm.config import EnsembleConfig, check_names
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError, EvaluationError
from safe_llm.evaluation.agreement import Agreement, agreement_of
from safe_llm.evaluation.boundaries import boundaries_of
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.measurements import Accuracy, Measurements
from safe_llm.evaluation.recommendation import Recommendation, recommend
from safe_llm.evaluation.tasks import Task
from safe_llm.evaluation.tokenization import numbers_of, overlap_of, unspelled_by
from safe_llm.events import Result
from safe_llm.member import Member
from safe_llm.types import FinishDetail, Message, Prompt, check_text

__all__ = ["AGREEMENT_ITEMS", "Advice", "Progress", "advice_as_dict", "advise", "check_inputs"]

AGREEMENT_ITEMS = 16
"""Answers on which a pair's agreement is measured: each has hundreds of tokens, and costs as much as another answer."""
_BATCH = 8
"""Answers between two reports of progress."""

Progress = Callable[[str, int, int], None]
"""Called with what is under way, how many answers of it are there, and how many there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was measured, and what follows from it.

    Attributes:
        task: Name of the task.
        num_items: Labelled items.
        left_out: Ids of items of the data that nobody could answer, and nobody was asked.
        max_tokens: The limit of every answer.
        measurements: The numbers.
        recommendation: What to run.
    """

    task: str
    num_items: int
    left_out: tuple[str, ...]
    max_tokens: int
    measurements: Measurements
    recommendation: Recommendation


def advise(
    members: Sequence[Member],
    items: Sequence[Item],
    task: Task,
    *,
    text: str | None = None,
    max_tokens: int | None = None,
    left_out: Sequence[str] = (),
    progress: Progress | None = None,
) -> Advice:
    """Measure loaded members alone and in pairs, and recommend an ensemble of them.

    It takes an answer to every item from each member, and from each of n members n - 1 more, with another one looking
    on, to the first `AGREEMENT_ITEMS`.

    Args:
        members: Two or more, in any order.
        items: Labelled items.
        task: How they are asked and scored.
        text: What boundaries are counted on; by default the questions with their solutions (or answers).
        max_tokens: Limit of an answer; by default the task's.
        left_out: What `open_task` left out of the data, to be named with the results.
        progress: Told about every batch of answers.

    Raises:
        ConfigError: Fewer than two members, two of one name, or an unusable `text` or `max_tokens`.
        EvaluationError: No items.
        PromptError: A prompt does not fit a member.
        GenerationError: A member failed.
    """
    check_inputs([member.name for member in members], items, text)
    limit = task.max_tokens if max_tokens is None else max_tokens
    prompts = [[Message(role="user", content=task.prompt(item))] for item in items]
    for member, prompt in itertools.product(members, prompts):  # before minutes of answers, not after
        member.check_prompt(member.prompter.encode(prompt))
    texts = [text] if text is not None else [f"{item.question}\n\n{item.solution or item.answer}" for item in items]
    ask = partial(_answers, max_tokens=limit, stop=task.stop, progress=progress)
    measured = _measure(members, items, task, [one.encode() for one in texts], prompts, ask)
    return Advice(
        task=task.name,
        num_items=len(items),
        left_out=tuple(left_out),
        max_tokens=limit,
        measurements=measured,
        recommendation=recommend(measured),
    )


def check_inputs(names: Sequence[str], items: Sequence[Item], text: str | None) -> None:
    """Raise what `advise` would raise about these; for callers that have not loaded the members yet."""
    if len(names) < 2:
        raise ConfigError(
            f"advice compares members, got {len(names)}", hint="name two or more, for instance --member A --member B"
        )
    check_names(names)
    if not items:
        raise EvaluationError("there are no items to measure accuracies on", hint="give at least one labelled item")
    if text is not None:
        check_text(text, "the text")
        if not text:
            raise ConfigError("the text is empty", hint="leave it out to use the items' own text")


_Ask = Callable[[Ensemble, Sequence[Prompt], str], list[Result]]


def _measure(
    members: Sequence[Member],
    items: Sequence[Item],
    task: Task,
    texts: Sequence[bytes],
    prompts: Sequence[Prompt],
    ask: _Ask,
) -> Measurements:
    pairs = list(itertools.combinations(members, 2))
    roles = list(itertools.permutations(members, 2))
    return Measurements(
        overlaps=tuple(overlap_of(one, other) for one, other in pairs),
        numbers=tuple(numbers_of(one, other, texts) for one, other in pairs),
        boundaries=tuple(boundaries_of(drafter, verifier, texts) for drafter, verifier in roles),
        unspelled=tuple(unspelled_by(member, texts) for member in members),
        num_bytes=sum(map(len, texts)),
        accuracies=tuple(_accuracy(member, items, task, prompts, ask) for member in members),
        agreements=tuple(_agreement(drafter, verifier, prompts, ask) for drafter, verifier in roles),
        without_template=tuple(member.name for member in members if member.prompter.template is None),
        without_dense=tuple(member.name for member in members if not member.backend.has_dense_scores),
    )


def _accuracy(member: Member, items: Sequence[Item], task: Task, prompts: Sequence[Prompt], ask: _Ask) -> Accuracy:
    with Ensemble([member], EnsembleConfig(mode="drafter")) as alone:
        results = ask(alone, prompts, f"{member.name} alone")
    scores = [task.score(result.text, item) for result, item in zip(results, items, strict=True)]
    batches = [results[i : i + _BATCH] for i in range(0, len(results), _BATCH)]
    seconds = sum(max(result.timings.total_s for result in batch) for batch in batches)
    return Accuracy(
        member=member.name,
        correct={item.id: score.flexible for item, score in zip(items, scores, strict=True)},
        num_strict=sum(score.strict for score in scores),
        num_cut=sum(result.finish_detail is FinishDetail.MAX_TOKENS for result in results),
        tokens_per_s=sum(result.usage.completion_tokens for result in results) / seconds,
    )


def _agreement(drafter: Member, verifier: Member, prompts: Sequence[Prompt], ask: _Ask) -> Agreement:
    title = f"{drafter.name} with {verifier.name}"
    return agreement_of(drafter, verifier, lambda ensemble: ask(ensemble, prompts[:AGREEMENT_ITEMS], title))


def _answers(
    ensemble: Ensemble,
    prompts: Sequence[Prompt],
    title: str,
    *,
    max_tokens: int,
    stop: Sequence[str],
    progress: Progress | None,
) -> list[Result]:
    """Answer greedily, batch by batch."""
    results: list[Result] = []
    for start in range(0, len(prompts), _BATCH):
        batch = list(prompts[start : start + _BATCH])
        results += ensemble.generate(batch, max_tokens=max_tokens, stop=stop)
        if progress is not None:
            progress(title, len(results), len(prompts))
    return results


def advice_as_dict(advice: Advice) -> dict[str, Any]:
    """Return advice as plain JSON values, with the shares that its counts give."""
    plain = asdict(advice)
    found, measured = advice.measurements, plain["measurements"]
    for accuracy, values in zip(found.accuracies, measured["accuracies"], strict=True):
        values |= {"num_items": accuracy.num_items, "num_right": accuracy.num_right}
        values["interval"] = asdict(accuracy.interval)
    for counted in ("numbers", "boundaries"):
        for counts, values in zip(getattr(found, counted), measured[counted], strict=True):
            values["share"] = counts.share
    return plain

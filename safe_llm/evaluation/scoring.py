"""The tasks through lm-evaluation-harness: it builds the prompts and computes the metrics, for every contender alike.

It is run without a model: once to collect what it asks, and once per contender over the answers that this one gave. So
all contenders are asked exactly the same by construction, and answers can be kept and scored again.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.harness import instance_question
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.questions import Conversation, Question
from safe_llm.evaluation.runs import Answers
from safe_llm.evaluation.tasks import Score, Task, TaskData

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

__all__ = ["FLAGS", "collect_questions", "score_answers"]

FLAGS = {"apply_chat_template": True, "fewshot_as_multiturn": False, "num_fewshot": 0, "system_instruction": None}
"""How lm-evaluation-harness is told to build prompts; scores depend on it."""


def collect_questions(tasks: Sequence[TaskData]) -> list[Question]:
    """Return what is asked, task by task in the order of the items."""
    collector = _Collector()
    _run(collector, tasks)
    return collector.questions


def score_answers(tasks: Sequence[TaskData], answers: Answers) -> dict[tuple[str, str], Score]:
    """Score one contender's answers, by task and item.

    Raises:
        EvaluationError: An item has no answer, or one to another prompt.
    """
    return _run(_Replay(answers), tasks)


def _run(model: LM, tasks: Sequence[TaskData]) -> dict[tuple[str, str], Score]:
    scores: dict[tuple[str, str], Score] = {}
    with _quiet():
        harness_tasks = {data.task.name: _harness_task(data, scores) for data in tasks}
        evaluate(
            model,
            {"tasks": harness_tasks, "groups": {}},
            bootstrap_iters=0,
            log_samples=False,
            apply_chat_template=True,
        )
    return scores


def _harness_task(data: TaskData, scores: dict[tuple[str, str], Score]) -> ConfigurableTask:
    """Return a task as lm_eval has it; its scores go into `scores` too, with what was extracted."""
    task, items = data.task, {item.id: item for item in data.items}

    def process(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        score = scores[task.name, document["id"]] = _score(task, items[document["id"]], results[0])
        return {"flexible": float(score.flexible), "strict": float(score.strict)}

    def prompt(document: Mapping[str, Any]) -> str:
        return task.prompt(items[document["id"]])

    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("flexible", "strict")]
    return ConfigurableTask(
        config={
            "task": task.name,
            "custom_dataset": lambda **_: {"test": Dataset.from_list([{"id": item} for item in items])},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": prompt,
            "doc_to_target": lambda document: items[document["id"]].answer,
            "process_results": process,
            "metric_list": metrics,
            "generation_kwargs": {"until": list(task.stop), "max_gen_toks": task.max_tokens, "do_sample": False},
            "num_fewshot": 0,
        }
    )


def _score(task: Task, item: Item, text: str) -> Score:
    return task.score(text, item) if text else Score(False, False, None)


class _Collector(LM):  # type: ignore[misc]
    """Writes down what is asked, and answers nothing."""

    tokenizer_name = "safe-llm-messages"

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[Question] = []

    def apply_chat_template(
        self,
        chat_history: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: ARG002
    ) -> Conversation:
        return Conversation.of(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.questions += map(instance_question, requests)
        return ["" for _ in requests]

    def _refuse(self, requests: list[Instance]) -> list[Any]:
        raise EvaluationError(f"{len(requests)} requests for log-likelihoods; tasks of `safe-llm eval` generate")

    loglikelihood = loglikelihood_rolling = _refuse


class _Replay(_Collector):
    """Answers what was answered before."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self._text(instance_question(request)) for request in requests]

    def _text(self, question: Question) -> str:
        answer = self._answers.get((question.task, question.item))
        if answer is None or answer.prompt_sha256 != question.sha256:
            raise EvaluationError(
                f"item {question.item!r} of {question.task!r} has no answer to this prompt", hint="run it again"
            )
        return answer.text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm_eval's log lines and progress bars, which are about a run without a model, from the terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)

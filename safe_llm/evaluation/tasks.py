r"""The tasks: what is asked, in the paper's way, and what counts as right.

Choice questions and BIG-Bench Hard end with "The answer is ...", mathematics with \boxed{}; zero-shot chain of thought,
except for BIG-Bench Hard (three worked examples of the same subject).
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from safe_llm.errors import EvaluationError, UnknownNameError
from safe_llm.evaluation import extraction, mathematics
from safe_llm.evaluation.items import Item, load_items

__all__ = [
    "TASKS",
    "BigBenchHardTask",
    "ChoiceTask",
    "MathTask",
    "NumberTask",
    "Score",
    "Task",
    "TaskData",
    "check_gold",
    "open_task",
    "task_for",
    "task_named",
]


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer is worth.

    Attributes:
        strict: It is right and stands where the prompt asked for it.
        flexible: It is right, there or, where nothing stands there, at the likeliest other place.
        extracted: The answer that `flexible` is about, as the text has it; None where the text has none.
    """

    strict: bool
    flexible: bool
    extracted: str | None


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A kind of questions: a prompt and a score for each; frozen, so one serves many threads.

    Attributes:
        name: As it is called on a command line.
        title: As a table calls it.
        file_name: Name of its data file.
        max_tokens: What an answer may take.
        stop: Strings that end an answer. Nothing else does: a blank line is part of an answer.
    """

    name: str
    title: str
    file_name: str
    max_tokens: int
    stop: tuple[str, ...] = ()

    @abstractmethod
    def prompt(self, item: Item) -> str:
        """Return the user's message for an item."""

    @abstractmethod
    def score(self, text: str, item: Item) -> Score:
        """Say whether a model's text answers an item rightly.

        Raises:
            ConfigError: A package that the comparison needs is not installed.
        """

    def stated_gold(self, item: Item) -> str:
        """Return the gold answer alone, in the form that the prompt asks for."""
        return f"The answer is {item.answer}."

    def gold_text(self, item: Item) -> str:
        """Return a text that answers an item rightly: its solution where it has one."""
        return item.solution or self.stated_gold(item)

    def beside(self, path: str | Path) -> Task:  # noqa: ARG002 - for tasks with files beside their data
        """Return the task for the data file at `path`, with what else lies in its folder."""
        return self


_BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class NumberTask(Task):
    r"""Word problems with one number for an answer; stated in \boxed{}, after `####` or after "The answer is"."""

    def prompt(self, item: Item) -> str:
        """See `Task.prompt`."""
        return item.question + _BOXED

    def score(self, text: str, item: Item) -> Score:
        """See `Task.score`."""
        gold = extraction.number_value(item.answer)
        stated = extraction.stated_number(text)
        extracted = extraction.loose_number(text) if stated is None else stated
        value = None if extracted is None else extraction.number_value(extracted)
        right = value is not None and value == gold
        return Score(right and stated is not None, right, extracted)


@dataclass(frozen=True, kw_only=True)
class MathTask(Task):
    r"""Problems whose answer is a formula; stated in \boxed{}."""

    def prompt(self, item: Item) -> str:
        """See `Task.prompt`."""
        return item.question + _BOXED

    def score(self, text: str, item: Item) -> Score:
        """See `Task.score`."""
        stated = extraction.boxed(text)
        extracted = self._loose(text) if stated is None else stated
        right = extracted is not None and mathematics.same_answer(extracted, item.answer)
        return Score(right and stated is not None, right, extracted)

    def stated_gold(self, item: Item) -> str:
        r"""Return the answer in \boxed{}."""
        return f"\\boxed{{{item.answer}}}"

    @staticmethod
    def _loose(text: str) -> str | None:
        said = extraction.stated_text(text)
        if said is not None:
            return said.removeprefix(":").strip(" $")
        return extraction.last_formula(text) or extraction.loose_number(text)


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(Task):
    """Questions with lettered choices."""

    def prompt(self, item: Item) -> str:
        """See `Task.prompt`."""
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip(item.letters, item.choices, strict=True))
        return (
            f"{item.question}\n{choices}\n\nReason step by step, and end with the sentence "
            f'"The answer is (X).", where X is the letter of the correct choice.'
        )

    def score(self, text: str, item: Item) -> Score:
        """See `Task.score`."""
        stated = extraction.stated_letter(text, item.letters)
        extracted = stated or extraction.loose_letter(text, item.letters, item.choices)
        right = extracted == item.answer
        return Score(right and stated is not None, right, extracted)

    def stated_gold(self, item: Item) -> str:
        """Return the sentence that the prompt asks for."""
        return f"The answer is ({item.answer})."


_CANARY = "-----\n"
_LETTERED_OPTION = re.compile(r"^\(([A-Z])\)", re.MULTILINE)
_LISTED_OPTION = re.compile(r"^- (\S+)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class BigBenchHardTask(Task):
    """BIG-Bench Hard: options in the question's text, examples from a file of the item's subject.

    Attributes:
        prompts: Folder of the examples, a text file a subject.
    """

    prompts: Path | None = None

    def beside(self, path: str | Path) -> Task:
        """See `Task.beside`: the examples lie in `bbh_prompts/` there."""
        return replace(self, prompts=Path(path).parent / "bbh_prompts")

    def prompt(self, item: Item) -> str:
        """See `Task.prompt`.

        Raises:
            EvaluationError: There are no examples for the item's subject.
        """
        if item.subject is None or not re.fullmatch(r"\w+", item.subject):
            raise EvaluationError(f"item {item.id!r}: field subject must name its examples in bbh_prompts/")
        if self.prompts is None:
            raise EvaluationError("the folder of the examples is not known", hint="call Task.beside(data file) first")
        return f"{_examples(self.prompts / f'{item.subject}.txt')}\n\nQ: {item.question}\nA: Let's think step by step."

    def score(self, text: str, item: Item) -> Score:
        """See `Task.score`; what follows a next question that the model made up does not count."""
        for mark in self.stop:
            text = text.partition(mark)[0]
        letters = "".join(dict.fromkeys(_LETTERED_OPTION.findall(item.question)))
        if letters:
            stated = extraction.stated_letter(text, letters)
            extracted = stated or extraction.loose_letter(text, letters)
        else:
            options = _LISTED_OPTION.findall(item.question) or ("True", "False")
            stated = extraction.stated_option(text, options)
            extracted = stated or extraction.loose_option(text, options)
        right = extracted is not None and extracted == item.answer.strip("()")
        return Score(right and stated is not None, right, extracted)


@functools.lru_cache(maxsize=64)
def _examples(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise EvaluationError(
            f"cannot read the examples {str(path)!r}: {reason}", hint="bbh_prompts/ lies beside the data file"
        ) from None
    _, canary, examples = text.partition(_CANARY)
    return (examples if canary else text).strip()


_ALL = (
    NumberTask(name="gsm8k", title="GSM8K", file_name="gsm8k.jsonl", max_tokens=512),
    MathTask(name="math500", title="MATH500", file_name="math500.jsonl", max_tokens=1024),
    BigBenchHardTask(name="bbh", title="BBH", file_name="bbh.jsonl", max_tokens=512, stop=("\nQ:",)),
    ChoiceTask(name="arc_challenge", title="ARC-Challenge", file_name="arc_challenge.jsonl", max_tokens=512),
    ChoiceTask(name="mmlu_redux", title="MMLU-redux", file_name="mmlu_redux.jsonl", max_tokens=512),
)

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
"""The tasks of the paper, by name."""


def task_named(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UnknownNameError: There is none; names the nearest.
    """
    if name not in TASKS:
        raise UnknownNameError("task", name, TASKS)
    return TASKS[name]


def task_for(path: str | Path, items: Sequence[Item]) -> Task:
    """Return the task that fits a data file of one's own, named as the file is.

    Choices make choice questions, numbers for all answers word problems, anything else mathematics.
    """
    name, file_name = Path(path).stem, Path(path).name
    if all(item.choices for item in items):
        return ChoiceTask(name=name, title=name, file_name=file_name, max_tokens=512)
    if any(item.choices for item in items):
        raise EvaluationError(f"{str(path)!r}: some items have choices and some have none", hint="make two files of it")
    if all(extraction.number_value(item.answer) is not None for item in items):
        return NumberTask(name=name, title=name, file_name=file_name, max_tokens=512)
    return MathTask(name=name, title=name, file_name=file_name, max_tokens=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """A task with its items, ready to be run.

    Attributes:
        task: The task, with what else lies beside its data.
        items: The items that can be answered.
        left_out: Ids of those that cannot, having lost their choices. A report must name their number.
    """

    task: Task
    items: tuple[Item, ...]
    left_out: tuple[str, ...] = ()


def open_task(name: str | None, path: str | Path) -> TaskData:
    """Return a task (by default the one that fits) with the items of a data file, after checking the gold answers.

    Raises:
        UnknownNameError: There is no such task.
        EvaluationError: The file or an item cannot be used.
    """
    items = load_items(path)
    task = (task_for(path, items) if name is None else task_named(name)).beside(path)
    usable = tuple(item for item in items if item.is_answerable)
    check_gold(task, usable)
    return TaskData(task=task, items=usable, left_out=tuple(item.id for item in items if not item.is_answerable))


def check_gold(task: Task, items: Sequence[Item]) -> None:
    """Score every gold answer, and every solution, against itself.

    Raises:
        EvaluationError: Some are not right: names the items. A field that holds the whole solution is the usual cause.
        ConfigError: A package that the comparison needs is not installed.
    """
    wrong = [item.id for item in items if not _is_sound(task, item)]
    if wrong:
        named = ", ".join(map(repr, wrong[:5])) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise EvaluationError(
            f"task {task.name!r}: the gold answer of {len(wrong)} of {len(items)} items does not score: {named}",
            hint="`answer` must hold the answer alone, in the form of this task, and `solution` must end in it",
        )


def _is_sound(task: Task, item: Item) -> bool:
    return task.score(task.stated_gold(item), item).strict and task.score(task.gold_text(item), item).flexible

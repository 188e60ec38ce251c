"""Answers of one contender in a file: one line each, flushed, so that an interrupted run goes on where it was.

A line holds everything that its answer depended on. What does not fit the run that is going on is an error, never
silently used or thrown away; only a last line that was cut off is dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from safe_llm.errors import EvaluationError
from safe_llm.evaluation.questions import Question
from safe_llm.events import Result
from safe_llm.record import phase_seconds

__all__ = ["ANSWERS_VERSION", "Answer", "AnswerStore", "answers_file", "check_answers", "only_writer"]

ANSWERS_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One contender's answer to one question.

    Attributes:
        task: Name of the task.
        item: Id of the item.
        prompt_sha256: Hash of the prompt before any template.
        params: Decoding parameters.
        fingerprint: Of the ensemble that answered.
        text: The answer; empty where it failed.
        error: Name of the error that the question ended with, or None.
        finish_detail: What ended the answer: `end`, `stop_string`, `max_tokens` or `context`; None where it failed.
        prompt_tokens: Length of the prompt in the drafter's tokens.
        num_tokens: Tokens committed.
        num_draft_tokens: Tokens drafted.
        num_accepted_tokens: Drafted tokens that were committed.
        num_ensembled: Ensemble points.
        num_replaced: Ensemble points that chose another token than the drafter.
        outcomes: How often each outcome occurred among the drafted tokens.
        phases_s: Seconds per phase, those of the whole batch while this answer was in it.
        seconds: This answer's share of its batch's wall-clock time; the sum over answers is the time it took.
    """

    task: str
    item: str
    prompt_sha256: str
    params: Mapping[str, Any]
    fingerprint: str
    text: str = ""
    error: str | None = None
    finish_detail: str | None = None
    prompt_tokens: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_ensembled: int = 0
    num_replaced: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(cls, question: Question, outcome: Result | BaseException, *, fingerprint: str, seconds: float) -> Answer:
        """Return what came of a question."""
        asked: dict[str, Any] = {
            "task": question.task,
            "item": question.item,
            "prompt_sha256": question.sha256,
            "params": _plain(question.params),
            "fingerprint": fingerprint,
            "seconds": seconds,
        }
        if isinstance(outcome, BaseException):
            return cls(**asked, error=type(outcome).__name__)
        counters = outcome.counters
        return cls(
            **asked,
            text=_cut(outcome.text, question.late_stops),
            finish_detail=str(outcome.finish_detail),
            prompt_tokens=outcome.usage.prompt_tokens,
            num_tokens=counters.num_tokens,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            num_ensembled=counters.num_ensembled,
            num_replaced=counters.num_replaced,
            outcomes={str(outcome): count for outcome, count in counters.outcomes.items()},
            phases_s=phase_seconds(outcome.timings),
        )


class AnswerStore:
    """The answers of one contender, in memory and in its file. A context manager; closing twice is harmless.

    Attributes:
        answers: By task and item.
    """

    def __init__(self, path: Path, questions: Sequence[Question], *, fingerprint: str) -> None:
        """Read what is there, and be ready to append.

        Args:
            path: The file; it need not exist.
            questions: Everything that is asked.
            fingerprint: Of the contender's ensemble.

        Raises:
            EvaluationError: A line is no answer, or one of another configuration; the file cannot be written.
        """
        self._fingerprint = fingerprint
        self._questions = {(question.task, question.item): question for question in questions}
        self.answers, whole = _read(path, self._questions, fingerprint)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._file.truncate(whole)
        except OSError as error:
            raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @property
    def missing(self) -> list[Question]:
        """What has no answer yet, in the order in which it is asked."""
        return [question for key, question in self._questions.items() if key not in self.answers]

    def append(self, question: Question, outcome: Result | BaseException, *, seconds: float) -> Answer:
        """Write down what came of a question, at once."""
        answer = Answer.of(question, outcome, fingerprint=self._fingerprint, seconds=seconds)
        line = {"schema_version": ANSWERS_VERSION, **asdict(answer)}
        self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self.answers[answer.task, answer.item] = answer
        return answer

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Keep other processes from writing answers to the same folder.

    Raises:
        EvaluationError: One does, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = answers_file(output, "lock").with_suffix(".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=0)
        held.acquire()
    except Timeout:
        raise EvaluationError(
            f"another evaluation writes to {str(output)!r}", hint="wait for it, or use another --output"
        ) from None
    except OSError as error:
        raise EvaluationError(f"cannot write {str(lock)!r}: {error.strerror}") from None
    try:
        yield
    finally:
        held.release()


def check_answers(path: Path, questions: Sequence[Question]) -> None:
    """Check answers that are there, if any, before it is known who will answer.

    Raises:
        EvaluationError: A line is no answer, or one to something else.
    """
    _read(path, {(question.task, question.item): question for question in questions}, None)


def _read(
    path: Path, questions: Mapping[tuple[str, str], Question], fingerprint: str | None
) -> tuple[dict[tuple[str, str], Answer], int]:
    """Return the answers in a file, and how many bytes its whole lines are."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise EvaluationError(f"cannot read {str(path)!r}: {error.strerror}") from None
    answers: dict[tuple[str, str], Answer] = {}
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].splitlines(), 1):
        where = f"{path.name!r}, line {number}"
        answer = _parsed(line, where)
        key = answer.task, answer.item
        if key in answers:
            differs = f"answers item {answer.item!r} of {answer.task!r} a second time"
        else:
            differs = _unfit(answer, questions.get(key), fingerprint)
        if differs:
            raise EvaluationError(f"{where} {differs}", hint="use another --output")
        answers[key] = answer
    return answers, whole


def _parsed(line: bytes, where: str) -> Answer:
    try:
        values = json.loads(line)
        version = values["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise EvaluationError(f"{where} is not an answer of an evaluation", hint="use another --output") from None
    if version != ANSWERS_VERSION:
        raise EvaluationError(
            f"{where} has schema version {version!r}, this version of safe_llm reads {ANSWERS_VERSION}",
            hint="use another --output",
        )
    try:
        return _ADAPTER.validate_json(line, strict=True)
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise EvaluationError(f"{where}: {name} is missing or not as it must be") from None


def _unfit(answer: Answer, question: Question | None, fingerprint: str | None) -> str:
    """Say why an answer does not belong to this evaluation; empty if it does."""
    if question is None:
        return f"answers item {answer.item!r} of {answer.task!r}, which is not asked now"
    if answer.prompt_sha256 != question.sha256:
        return f"answers another prompt for item {answer.item!r} of {answer.task!r}"
    if answer.params != _plain(question.params):
        return f"was written with other decoding parameters ({_difference(answer.params, question.params)})"
    if fingerprint not in (None, answer.fingerprint):
        return "was written by other models or with other settings"
    return ""


_ADAPTER = TypeAdapter(Answer)


def answers_file(output: Path, contender: str) -> Path:
    """Return where a contender's answers are; a name that cannot be a file's gets a hash instead of what is wrong."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", contender)
    if name != contender:
        name += "-" + hashlib.sha256(contender.encode()).hexdigest()[:8]
    return output / "answers" / f"{name}.jsonl"


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(params.items())}


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    names = sorted(name for name in {*old, *new} if old.get(name) != _plain(new).get(name))
    return ", ".join(f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in names)


def _cut(text: str, stops: Sequence[str]) -> str:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text

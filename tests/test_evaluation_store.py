"""Answers on disk: what is taken back, what is dropped, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from safe_llm.errors import ContextOverflowError, EvaluationError
from safe_llm.evaluation.questions import Conversation, Question
from safe_llm.evaluation.store import AnswerStore, answers_file, check_answers, only_writer
from safe_llm.testing import scripted_ensemble


def question(item: str = "1", text: str = "What?", **params: object) -> Question:
    context = Conversation.of([{"role": "user", "content": text}])
    return Question(task="t", item=item, context=context, params={"max_tokens": 50, "stop": ("\n\n",), **params})


FIRST, SECOND = question("1", "What?"), question("2", "Who?")


@pytest.fixture(scope="module")
def result():
    with scripted_ensemble({"What?": "The answer."}) as ensemble:
        return ensemble.generate(FIRST.prompt)


@pytest.fixture
def path(tmp_path, result) -> Path:
    """A file with the first question's answer."""
    path = tmp_path / "answers" / "safe.jsonl"
    with AnswerStore(path, [FIRST, SECOND], fingerprint="f") as store:
        store.append(FIRST, result, seconds=1.5)
    return path


def reopened(path: Path, *questions: Question, fingerprint: str = "f") -> AnswerStore:
    with AnswerStore(path, questions or [FIRST, SECOND], fingerprint=fingerprint) as store:
        return store


def test_store_gives_back_what_was_written(path, result):
    store = reopened(path)
    (answer,) = store.answers.values()
    assert (answer.text, answer.finish_detail, answer.error) == ("The answer.", "end", None)
    assert answer.num_tokens == result.counters.num_tokens
    assert sum(answer.outcomes.values()) == answer.num_tokens
    assert answer.seconds == 1.5
    assert store.missing == [SECOND]


def test_store_is_flushed_line_by_line(tmp_path, result):
    path = tmp_path / "a.jsonl"
    store = AnswerStore(path, [FIRST, SECOND], fingerprint="f")
    store.append(FIRST, result, seconds=0.0)
    assert path.read_bytes().endswith(b"}\n")  # while it is open
    store.close()
    store.close()


@pytest.mark.parametrize("cut", [1, 2, 40, 400])
def test_store_drops_a_line_that_was_cut_off(path, result, cut):
    whole = path.read_bytes()
    path.write_bytes(whole + whole.replace(b'"item":"1"', b'"item":"2"')[:-cut])
    with AnswerStore(path, [FIRST, SECOND], fingerprint="f") as store:
        assert store.missing == [SECOND]
        store.append(SECOND, result, seconds=0.0)
    assert list(reopened(path).answers) == [("t", "1"), ("t", "2")]


def test_store_keeps_failures_by_their_name(path):
    with AnswerStore(path, [FIRST, SECOND], fingerprint="f") as store:
        store.append(SECOND, ContextOverflowError("drafter", 9, 8), seconds=0.0)
    answer = reopened(path).answers["t", "2"]
    assert (answer.error, answer.text, answer.finish_detail) == ("ContextOverflowError", "", None)


@pytest.mark.parametrize(
    ("questions", "fingerprint", "message"),
    [
        ([FIRST, SECOND], "g", "line 1 was written by other models or with other settings"),
        ([SECOND], "f", "line 1 answers item '1' of 't', which is not asked now"),
        ([question(text="How?")], "f", "line 1 answers another prompt for item '1'"),
        ([question(max_tokens=60)], "f", r"other decoding parameters \(max_tokens was 50, is 60\)"),
        ([question(seed=1)], "f", r"\(seed was None, is 1\)"),
        ([question(stop=("\n",))], "f", "stop was"),
    ],
)
def test_store_refuses_answers_of_another_configuration(path, questions, fingerprint, message):
    before = path.read_bytes()
    with pytest.raises(EvaluationError, match=message) as caught:
        reopened(path, *questions, fingerprint=fingerprint)
    assert "--output" in caught.value.hint
    assert "What" not in str(caught.value)  # no prompt in an error
    assert path.read_bytes() == before


def test_answers_can_be_checked_before_it_is_known_who_answers(path):
    check_answers(path, [FIRST, SECOND])
    check_answers(path.with_name("none.jsonl"), [FIRST])
    with pytest.raises(EvaluationError, match="not asked now"):
        check_answers(path, [SECOND])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not an answer"),
        (b"\xff\xfe", "line 2 is not an answer"),
        (b"[1]", "line 2 is not an answer"),
        (b"7", "line 2 is not an answer"),
        (b"{}", "line 2 is not an answer"),
        (b'{"schema_version": 2}', "schema version 2, this version of safe_llm reads 1"),
        (b'{"schema_version": 1}', "task is missing"),
    ],
)
def test_store_names_the_line_that_is_no_answer(path, line, message):
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(EvaluationError, match=message):
        reopened(path)


def test_store_names_a_field_of_a_wrong_type_and_an_answer_that_is_there_twice(path):
    whole = path.read_bytes()
    path.write_bytes(json.dumps(json.loads(whole) | {"num_tokens": "7"}).encode() + b"\n")
    with pytest.raises(EvaluationError, match="line 1: num_tokens"):
        reopened(path)
    path.write_bytes(whole + whole)
    with pytest.raises(EvaluationError, match="line 2 answers item '1' of 't' a second time"):
        reopened(path)


def test_store_says_what_cannot_be_written(tmp_path):
    (tmp_path / "answers").write_text("a file, not a folder")
    with pytest.raises(EvaluationError, match=r"cannot (read|write)"):
        reopened(tmp_path / "answers" / "safe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(EvaluationError, match="cannot read"):
        reopened(tmp_path / "folder.jsonl")
    with pytest.raises(EvaluationError, match="cannot write"):
        reopened(_dangling(tmp_path))


def _dangling(folder: Path) -> Path:
    """A link to nowhere: there is nothing to read, and nothing can be written."""
    link = folder / "link.jsonl"
    link.symlink_to(folder / "missing" / "file")
    return link


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    code = (
        "import sys; from pathlib import Path; from safe_llm.evaluation.store import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(EvaluationError, match="another evaluation writes to"), only_writer(tmp_path):
            pass
        other.stdin.close()
        other.wait(60)
    with only_writer(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot write"), only_writer(tmp_path / "file"):
        pass


def test_stop_strings_that_the_engine_cannot_take_cut_the_answer_later(tmp_path, result):
    asked = Question(task="t", item="1", context="What?", params={}, late_stops=("swer", "answer", "nowhere"))
    with AnswerStore(tmp_path / "a.jsonl", [asked], fingerprint="f") as store:
        assert store.append(asked, result, seconds=0.0).text == "The "


def test_file_names_are_safe_and_distinct(tmp_path):
    names = ["safe", "a b", "a_b", "../a", "日本"]
    files = [answers_file(tmp_path, name) for name in names]
    assert len(set(files)) == len(names)
    assert all(file.parent == tmp_path / "answers" and file.name.isascii() for file in files)
    assert files[0].name == "safe.jsonl"

from __future__ import annotations

import json
import os
import signal

import pytest

from safe_llm.prompting import transcript
from safe_llm.types import Message
from test_cli_support import QUESTION, RIGHT, WRONG, install, run


def dialogue(*turns: str, system: str | None = None) -> str:
    """The prompt after these turns, user first."""
    messages = [] if system is None else [Message(role="system", content=system)]
    messages += [Message(role=("user", "assistant")[i % 2], content=turn) for i, turn in enumerate(turns)]
    return transcript(messages)


ANSWERS = {
    dialogue("one"): "first",
    dialogue("one", "first", "two"): "second",
    dialogue("two"): "fresh",
    dialogue("one", system="Be brief."): "1",
    dialogue("one", "1", "two", system="Be brief."): "2",
}


def test_chat_remembers_what_was_said(monkeypatch):
    scripted = install(monkeypatch, ANSWERS)
    result = run("chat", stdin=b"one\r\ntwo")
    assert (result.code, result.stdout, result.stderr) == (0, b"first\nsecond\n", "")
    assert len(scripted.specs) == 1


def test_chat_with_a_system_message(monkeypatch):
    install(monkeypatch, ANSWERS)
    assert run("chat", "--system", "Be brief.", stdin=b"one\ntwo\n/reset\none\n").stdout == b"1\n2\n1\n"


def test_reset_forgets_and_exit_ends(monkeypatch):
    install(monkeypatch, ANSWERS)
    assert run("chat", stdin=b"one\n/reset\ntwo\n\n  \n/exit\none\n").stdout == b"first\nfresh\n"


def test_chat_prints_one_json_object_per_turn(monkeypatch):
    install(monkeypatch, ANSWERS)
    lines = run("chat", "--json", stdin=b"one\ntwo\n").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["first", "second"]


def test_chat_show_marks_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    install(monkeypatch, {dialogue(QUESTION): WRONG}, {dialogue(QUESTION): RIGHT})
    typed(monkeypatch, QUESTION)
    result = run("chat", "--show", "--weights", "1,3", tty=True)
    assert b"\x1b[1;7m" in result.stdout
    assert "ensemble points" in result.stderr


def test_a_turn_that_fails_is_reported_and_forgotten(monkeypatch):
    install(monkeypatch, ANSWERS)
    result = run("chat", stdin=b"one\n\xff\n" + b"word " * 5000 + b"\ntwo\n")
    assert result.code == 2
    assert result.stdout == b"first\nsecond\n"
    errors = [line for line in result.error_lines if line.startswith("error: ")]
    assert ["UTF-8" in errors[0], "context window" in errors[1]] == [True, True]


def typed(monkeypatch, *lines: str | type[BaseException]) -> None:
    """Let a person type these lines, and then Ctrl-D; an exception class is raised at the prompt."""
    script = iter(lines)

    def answer(prompt):
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)


def test_end_of_input_at_a_terminal_ends_the_chat(monkeypatch):
    install(monkeypatch, ANSWERS)
    typed(monkeypatch, "one", "two")
    assert run("chat", tty=True).stdout == b"first\nsecond\n\n"


def test_interrupt_at_the_prompt_exits(monkeypatch):
    install(monkeypatch, ANSWERS)
    typed(monkeypatch, "one", KeyboardInterrupt)
    result = run("chat", tty=True)
    assert (result.code, result.stdout) == (130, b"first\n")
    assert "Traceback" not in result.stderr


def interrupted_after(monkeypatch, num_forwards: int, answers: dict[str, str]) -> None:
    """Press Ctrl-C once, in the drafter's given forward pass."""
    scripted = install(monkeypatch, answers)

    def load(spec, *, progress):
        ensemble = scripted(spec, progress=progress)
        backend = ensemble.members[0].backend
        forward = backend.forward

        def pressing(feeds):
            scores = forward(feeds)
            if backend.num_forwards == num_forwards:
                os.kill(os.getpid(), signal.SIGINT)
            return scores

        backend.forward = pressing
        return ensemble

    monkeypatch.setattr("safe_llm.cli.loading.load_ensemble", load)


LONG = "In 1850 the census put 63,700 people there; correct, incorrect, ensemble, assemble, position, positions."


@pytest.fixture
def _default_interrupt():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # the chat has put it back
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("_default_interrupt")
def test_interrupt_keeps_the_partial_answer_in_the_conversation(monkeypatch):
    answers = {dialogue("one"): LONG}
    answers |= {dialogue("one", LONG[:n], "two"): f"after {n}" for n in range(1, len(LONG))}
    interrupted_after(monkeypatch, 9, answers)
    result = run("chat", stdin=b"one\ntwo\n")
    partial, after, _ = result.stdout.decode().split("\n")
    assert 0 < len(partial) < len(LONG)
    assert LONG.startswith(partial)
    assert after == f"after {len(partial)}"
    assert (result.code, result.stderr) == (0, "(stopped)\n")


@pytest.mark.usefixtures("_default_interrupt")
def test_interrupt_before_any_text_forgets_the_turn(monkeypatch):
    interrupted_after(monkeypatch, 3, {dialogue("one"): LONG, dialogue("two"): "fresh"})
    held_back = ["--stop", LONG + " And more."]
    assert run("chat", *held_back, stdin=b"one\ntwo\n").stdout == b"\nfresh\n"


@pytest.mark.usefixtures("_default_interrupt")
def test_second_interrupt_ends_the_program(monkeypatch):
    interrupted_after(monkeypatch, 3, {dialogue("one"): LONG})
    monkeypatch.setattr("safe_llm.cli.terminal.say", lambda text: text == "(stopped)" and os.kill(os.getpid(), 2))
    assert run("chat", stdin=b"one\ntwo\n").code == 130

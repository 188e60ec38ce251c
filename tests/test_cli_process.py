"""Real processes: exit codes, signals, pipes, terminals, and what gets imported."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
import time

import pytest

from test_cli_support import QUESTION

SLOW = """
    import sys, time
    from safe_llm.cli import loading, main
    from safe_llm.testing.backends import ScriptedBackend
    from safe_llm.testing.members import scripted_ensemble

    class Slow(ScriptedBackend):
        def forward(self, feeds):
            time.sleep(DELAY)
            return super().forward(feeds)

    def load(spec, *, progress):
        ensemble = scripted_ensemble({QUESTION: ANSWER}, **spec.ensemble.model_dump())
        for member in ensemble.members:
            member.backend.__class__ = Slow
        return ensemble

    loading.load_ensemble = load
    sys.exit(main())
"""


def script(tmp_path, *, answer: str, delay: float = 0.0, source: str = SLOW) -> list[str]:
    """A program that is `safe-llm`, but with a scripted ensemble whose forward passes take `delay` seconds."""
    constants = f"DELAY, QUESTION, ANSWER = {delay}, {QUESTION!r}, {answer!r}\n"
    file = tmp_path / "program.py"
    file.write_text(constants + textwrap.dedent(source))
    return [sys.executable, str(file)]


def start(command: list[str], **options: object) -> subprocess.Popen:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as users have it
    return subprocess.Popen(command, env=buffered, **streams | options)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


HEAVY = ("torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "accelerate", "rich")


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["generate", "--help"], ["models", "list", "--help"], ["generate", ""]]
)
def test_what_needs_no_model_imports_nothing_heavy(args):
    result = python(
        f"""
        import sys
        from safe_llm.cli import main
        code = main({args!r})
        print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
        """
    )
    assert result.stdout.splitlines()[-1] == "heavy: []", result.stdout + result.stderr


def test_the_module_and_the_command_are_the_same():
    module = subprocess.run([sys.executable, "-m", "safe_llm", "--help"], capture_output=True, timeout=120)
    command = os.path.join(os.path.dirname(sys.executable), "safe-llm")
    installed = subprocess.run([command, "--help"], capture_output=True, timeout=120)
    assert module.returncode == installed.returncode == 0
    assert module.stdout == installed.stdout
    assert module.stdout.startswith(b"Usage: safe-llm ")


def test_exit_code_of_the_process_for_bad_input():
    result = subprocess.run([sys.executable, "-m", "safe_llm", "generate", "--preset", "x", "y"], capture_output=True)
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: unknown preset 'x'\nhint: ")


def test_argument_that_is_not_utf8_is_refused():
    result = subprocess.run([sys.executable, "-m", "safe_llm", "generate", b"a\xff"], capture_output=True)
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: ")
    assert len(result.stderr.splitlines()) == 2


def test_interrupt_while_generating_ends_at_once(tmp_path):
    with start([*script(tmp_path, answer="words " * 500, delay=0.01), "generate", QUESTION]) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b"interrupted\n"
    assert b"words ".startswith(first)
    assert len(rest) < 3000


LOADING = """
    import sys, time
    from safe_llm.cli import loading, main

    def load(spec, *, progress):
        print("loading", file=sys.stderr, flush=True)
        time.sleep(60)

    loading.load_ensemble = load
    sys.exit(main())
"""


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_interrupt_while_loading_ends_at_once(tmp_path, command):
    with start([*script(tmp_path, answer="", source=LOADING), command, *(["x"] if command == "generate" else [])]) as p:
        assert p.stderr.readline() == b"loading\n"
        p.send_signal(signal.SIGINT)
        out, errors = p.communicate(timeout=60)
    assert (p.returncode, out, errors) == (130, b"", b"interrupted\n")


def test_reader_that_goes_away_ends_it_quietly(tmp_path):
    with start([*script(tmp_path, answer="words " * 500, delay=0.005), "generate", QUESTION]) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, errors) == (141, b"")


def test_reader_that_goes_away_before_the_help():
    read, write = os.pipe()
    os.close(read)
    with start([sys.executable, "-m", "safe_llm", "--help"], stdout=write) as process:
        os.close(write)
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_stdin_reaches_the_model_byte_for_byte(tmp_path):
    prompt = "\ufeffa\r\nb\n\n"
    command = script(tmp_path, answer="yes")
    source = (tmp_path / "program.py").read_text().replace(repr(QUESTION), repr(prompt))
    (tmp_path / "program.py").write_text(source)
    exact = subprocess.run([*command, "generate", "--raw", "-"], input=prompt.encode(), capture_output=True, timeout=60)
    other = subprocess.run([*command, "generate", "--raw", "-"], input=b"a\nb\n\n", capture_output=True, timeout=60)
    assert exact.stdout == b"yes"
    assert other.stdout == b""


def test_answer_is_utf8_whatever_the_locale(tmp_path):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    command = [*script(tmp_path, answer="日本\r\n"), "generate", QUESTION]
    result = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "日本\r\n".encode(), b"")


NOISY = """
    import sys
    from safe_llm import ensemble
    from safe_llm.cli import main
    from safe_llm.testing.members import scripted_ensemble

    def load(spec, *, progress):
        print("noise of a library")
        return scripted_ensemble({QUESTION: ANSWER})

    ensemble.Ensemble.from_spec = load
    sys.exit(main())
"""


def test_what_libraries_print_while_loading_goes_to_stderr(tmp_path):
    command = [*script(tmp_path, answer="yes", source=NOISY), "generate", QUESTION]
    result = subprocess.run(command, capture_output=True, timeout=60)
    assert (result.stdout, result.stderr) == (b"yes", b"noise of a library\n")


# ---------------------------------------------------------------------- on a real terminal


class Terminal:
    """A pseudo-terminal with a program on it."""

    def __init__(self, command: list[str]) -> None:
        self.main, self.side = pty.openpty()
        self.before = termios.tcgetattr(self.side)
        self.text = b""
        self.process = subprocess.Popen(
            command,
            stdin=self.side,
            stdout=self.side,
            stderr=self.side,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
            preexec_fn=lambda: __import__("fcntl").ioctl(0, termios.TIOCSCTTY, 0),
        )

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self.main, 4096)
            except OSError:
                raise AssertionError(f"the program ended with {self.text!r}") from None

    def type(self, keys: bytes) -> None:
        os.write(self.main, keys)

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        assert termios.tcgetattr(self.side) == self.before, "the terminal is not as it was"
        os.close(self.side)
        try:
            while data := os.read(self.main, 4096):
                self.text += data
        except OSError:
            pass
        os.close(self.main)
        assert b"Traceback" not in self.text
        return code


def test_interrupt_by_key_leaves_the_terminal_as_it_was(tmp_path):
    command = script(tmp_path, answer="words " * 500, delay=0.01)
    terminal = Terminal([*command, "generate", "--show", QUESTION])
    terminal.wait_for(b"words words")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert terminal.text.endswith(b"interrupted\r\n")


def test_chat_on_a_terminal(tmp_path):
    terminal = Terminal([*script(tmp_path, answer="\x1b[2Jwords " * 300, delay=0.01), "chat"])
    terminal.wait_for(b"> ")
    terminal.type(QUESTION.encode() + b"\n")
    terminal.wait_for(b"\\x1b[2Jwords")
    terminal.type(b"\x03")
    terminal.wait_for(b"(stopped)")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert b"\x1b[2J" not in terminal.text

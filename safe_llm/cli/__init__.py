"""The command `safe-llm`: how every run of it ends.

Exit codes: 0 done; 1 an unexpected error; 2 bad input, one `error:` line and usually a `hint:` line on stderr;
130 interrupted (Ctrl-C); 141 whoever read stdout has gone away. Stdout carries answers only.

Importing this module imports nothing but the standard library, so that an early Ctrl-C ends as it should.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from safe_llm.cli import terminal

__all__ = ["main"]

EXIT_UNEXPECTED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; raises nothing.

    Args:
        argv: Arguments without the program's name; None takes the process's.
    """
    args = sys.argv[1:] if argv is None else argv
    try:
        terminal.prepare()
        code = _invoke(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        terminal.say_interrupted()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        terminal.abandon_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        return _explain(error, args)
    return code


def _invoke(args: Sequence[str]) -> int:
    import typer
    from typer.main import get_command

    from safe_llm.cli.app import app

    command = get_command(app)
    try:
        with command.make_context("safe-llm", list(args)) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as end:
        return end.exit_code


def _explain(error: Exception, args: Sequence[str]) -> int:
    """Say on stderr what went wrong, and return the exit code."""
    from safe_llm.errors import ConfigError, SafeLLMError

    terminal.say_traceback_if_wanted(error)
    if isinstance(error, SafeLLMError):
        fallback = f"see `safe-llm {args[0]} --help`" if isinstance(error, ConfigError) else ""
        terminal.say_error(str(error.args[0]), error.hint or fallback)
        return EXIT_BAD_INPUT
    if hasattr(error, "format_message"):  # typer's usage errors; their class has moved between its versions
        terminal.say_error(*_usage_error(error))
        return EXIT_BAD_INPUT
    terminal.say_error(
        f"unexpected {type(error).__name__}: {error}", f"run with {terminal.DEBUG_VARIABLE}=1 for the traceback"
    )
    return EXIT_UNEXPECTED


def _usage_error(error: Exception) -> tuple[str, str]:
    """Split typer's message into what is wrong and what to do."""
    message, _, suggestion = error.format_message().partition(" Did you mean ")  # type: ignore[attr-defined]
    message, _, options = message.partition(" (Possible options: ")
    message, _, option = message.partition(" Did you mean: ")
    near = suggestion.rstrip("?") or options.rstrip(")") or option
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "safe-llm"
    hint = f"did you mean {near}?" if near else f"see `{command} --help`"
    return message[:1].lower() + message[1:].rstrip("."), hint

"""Errors that both libraries' users can catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as langchain_errors

from safe_llm import errors

__all__ = ["EnsembleContextOverflowError", "EnsembleTimeoutError", "translated"]


class EnsembleContextOverflowError(langchain_errors.ContextOverflowError, errors.ContextOverflowError):
    """The prompt does not fit a member: LangChain's `ContextOverflowError` and the engine's in one."""

    def __init__(self, error: errors.ContextOverflowError) -> None:
        errors.ContextOverflowError.__init__(self, error.member, error.prompt_tokens, error.max_context)


class EnsembleTimeoutError(langchain_errors.ModelTimeoutError, errors.GenerationTimeoutError):
    """The answer took longer than `timeout`: LangChain's `ModelTimeoutError` and the engine's in one."""


@contextmanager
def translated() -> Iterator[None]:
    """Raise LangChain's class where it has one for an engine's error."""
    try:
        yield
    except errors.ContextOverflowError as error:
        raise EnsembleContextOverflowError(error) from error
    except errors.GenerationTimeoutError as error:
        raise EnsembleTimeoutError(error.args[0], hint=error.hint) from error

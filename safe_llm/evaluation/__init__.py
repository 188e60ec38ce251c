"""Task accuracy: questions with gold answers, what counts as right, runs over several ways to answer, and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_llm.evaluation.advice import Advice, advise

__all__ = ["Advice", "advise"]

_LAZY = {"Advice": "safe_llm.evaluation.advice", "advise": "safe_llm.evaluation.advice"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

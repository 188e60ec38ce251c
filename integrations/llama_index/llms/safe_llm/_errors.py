"""Errors that LlamaIndex's users can catch without knowing the engine's."""

from __future__ import annotations

from safe_llm.errors import GenerationError

__all__ = ["NoToolCallError"]


class NoToolCallError(GenerationError, ValueError):
    """A tool call was asked for and the answer has none that can be used. LlamaIndex's models raise ValueError."""

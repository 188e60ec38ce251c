"""Shipped test doubles and conformance classes for backends and methods."""

from safe_llm.testing.backends import ScriptedBackend, plain_symbols, scripted

__all__ = ["ScriptedBackend", "plain_symbols", "scripted"]

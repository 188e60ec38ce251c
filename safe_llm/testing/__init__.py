"""Shipped test doubles and conformance classes for backends and methods."""

from safe_llm.testing.backends import ScriptedBackend, plain_symbols, scripted
from safe_llm.testing.conformance import BackendConformance

__all__ = ["BackendConformance", "ScriptedBackend", "plain_symbols", "scripted"]

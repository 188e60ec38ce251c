"""Shipped test doubles and conformance classes for backends and methods.

They need no test framework; a runner such as pytest finds the `test_` methods of a subclass.
"""

from safe_llm.testing.backends import NextLogits, ScriptedBackend, plain_symbols, scripted
from safe_llm.testing.conformance import BackendConformance
from safe_llm.testing.members import answering, conversing, scripted_ensemble, scripted_member
from safe_llm.testing.methods import MethodConformance, Opinion, point_of

__all__ = [
    "BackendConformance",
    "MethodConformance",
    "NextLogits",
    "Opinion",
    "ScriptedBackend",
    "answering",
    "conversing",
    "plain_symbols",
    "point_of",
    "scripted",
    "scripted_ensemble",
    "scripted_member",
]

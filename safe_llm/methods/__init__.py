"""Ensemble methods: how the members' next-token distributions become one token.

A new method is one file: a frozen dataclass that implements `Method` and passes
`safe_llm.testing.MethodConformance`; add it to `make_method` here.
"""

from safe_llm.config import EnsembleConfig
from safe_llm.methods.base import END, MemberView, Merged, Method, Point
from safe_llm.methods.gac import GaC
from safe_llm.methods.prefix_mass import PrefixMass
from safe_llm.methods.unite import UniTE

__all__ = ["END", "GaC", "MemberView", "Merged", "Method", "Point", "PrefixMass", "UniTE", "make_method"]


def make_method(config: EnsembleConfig) -> Method:
    """Return the method that `config` names, with its parameters."""
    if config.method == "gac":
        return GaC(sharpening=config.sharpening, sharpening_threshold=config.sharpening_threshold, top_k=config.top_k)
    if config.method == "prefix-mass":
        return PrefixMass(top_k=config.top_k)
    return UniTE(sharpening=config.sharpening, sharpening_threshold=config.sharpening_threshold, top_k=config.top_k)

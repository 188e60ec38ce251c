"""Several language models with different tokenizers decode one answer together (SAFE), used like a single model.

    from safe_llm import Ensemble

    ensemble = Ensemble.from_preset("demo")
    result = ensemble.generate("Natalia sold 48 clips in April and half as many in May. How many in all?")
    print(result.text, result.points)

Importing this package does not import torch; the first use of `Ensemble` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safe_llm._version import __version__
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.errors import SafeLLMError
from safe_llm.events import (
    EnsemblePoint,
    Event,
    GenerationFinished,
    Result,
    RoundFinished,
    TextDelta,
)
from safe_llm.types import Message, SamplingParams

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble
    from safe_llm.member import Member

__all__ = [
    "Ensemble",
    "EnsembleConfig",
    "EnsemblePoint",
    "EnsembleSpec",
    "Event",
    "GenerationFinished",
    "Member",
    "MemberConfig",
    "Message",
    "Result",
    "RoundFinished",
    "SafeLLMError",
    "SamplingParams",
    "TextDelta",
    "__version__",
]

_LAZY = {"Ensemble": "safe_llm.ensemble", "Member": "safe_llm.member"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

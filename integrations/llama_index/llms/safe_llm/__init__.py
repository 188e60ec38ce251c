"""LlamaIndex integration of safe_llm: an ensemble of models is used like a single one.

    from llama_index.llms.safe_llm import SafeLLM

    llm = SafeLLM(preset="demo")
    print(llm.complete("What is the capital of France?"))

Importing this package needs no torch; the first call does.
"""

from llama_index.llms.safe_llm._errors import NoToolCallError
from llama_index.llms.safe_llm.base import SafeLLM
from llama_index.llms.safe_llm.events import (
    EnsembleGenerationEndEvent,
    EnsemblePointEvent,
    EnsembleRoundEvent,
)
from llama_index.llms.safe_llm.handler import EnsembleEventHandler

__all__ = [
    "EnsembleEventHandler",
    "EnsembleGenerationEndEvent",
    "EnsemblePointEvent",
    "EnsembleRoundEvent",
    "NoToolCallError",
    "SafeLLM",
]

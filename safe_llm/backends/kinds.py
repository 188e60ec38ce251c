"""Which file serves a `MemberConfig.backend`, and what it needs of a model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from safe_llm.config import NEEDS

if TYPE_CHECKING:
    from safe_llm.backends.base import OpenModel
    from safe_llm.config import BackendName, MemberConfig, Needs

__all__ = ["KINDS", "BackendKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """One kind of backend.

    Attributes:
        module: Has a function `open_model(config, path, device)`; imported when a member of the kind is loaded.
        needs: What of the model must be here: its weights as safetensors, as a GGUF file, or only its tokenizer.
    """

    module: str
    needs: Needs

    def open_model(self, config: MemberConfig, path: Path, device: str | None) -> OpenModel:
        """Load the model, or reach the server that has.

        Args:
            config: Which one.
            path: The model's folder, or its GGUF file.
            device: Where to put it if `config` does not say.

        Raises:
            SafeLLMError: It cannot be had or used.
        """
        opened: OpenModel = import_module(self.module).open_model(config, path, device)
        return opened


KINDS: Mapping[BackendName, BackendKind] = {
    "transformers": BackendKind(module="safe_llm.backends.hf", needs=NEEDS["transformers"]),
    "llama-cpp": BackendKind(module="safe_llm.backends.llama_cpp", needs=NEEDS["llama-cpp"]),
    "vllm": BackendKind(module="safe_llm.backends.vllm", needs=NEEDS["vllm"]),
    "sglang": BackendKind(module="safe_llm.backends.sglang", needs=NEEDS["sglang"]),
}
"""The kinds by their names in a configuration."""

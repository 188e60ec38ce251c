"""Weights as data: demo models, local folders, GGUF files and hub models become folders ready to load.

`resolve` is what an ensemble uses; `list_models`, `fetch_preset` and `remove_model` are what `safe-llm models` shows.
Nothing that ships with a model is ever imported or unpickled. Importing this package imports no model library.
"""

from __future__ import annotations

from safe_llm.models.demo import DEMO_MODELS, DemoModel
from safe_llm.models.fetch import ResolvedModel, resolve
from safe_llm.models.listing import ModelListing, fetch_preset, list_models, remove_model

__all__ = [
    "DEMO_MODELS",
    "DemoModel",
    "ModelListing",
    "ResolvedModel",
    "fetch_preset",
    "list_models",
    "remove_model",
    "resolve",
]

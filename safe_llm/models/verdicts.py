"""Remembers which models passed the self-check, so that an unchanged set-up does not pay for it at every start."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata

from safe_llm._version import __version__
from safe_llm.models.store import home

__all__ = ["Verdict"]


class Verdict:
    """Whether a model passed its self-check in exactly this set-up.

    The set-up is the weights' fingerprint, type and device, and the versions of torch, transformers and this library:
    whatever of it changes, the check runs again.
    """

    def __init__(self, *setup: str) -> None:
        versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
        digest = hashlib.sha256("\n".join([*setup, *versions, __version__]).encode()).hexdigest()
        self._mark = home() / "checked" / digest[:32]

    @property
    def passed(self) -> bool:
        """Whether it passed before."""
        return self._mark.exists()

    def remember(self) -> None:
        """Note that it passed. If that cannot be written, the check runs again next time; nothing else is lost."""
        with contextlib.suppress(OSError):
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()

"""Models from the hub: only data files are asked for, and the hub's errors become ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safe_llm.errors import ModelAccessError, ModelNotFoundError
from safe_llm.models.disk import is_disk_full

__all__ = ["download_snapshot", "is_hub_id"]

_DATA = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors",)
_DUPLICATES = ("*/*.safetensors", "*/*.json", "*/*.model", "consolidated*.safetensors")
_CODE = ("*.py",)


def is_hub_id(text: str) -> bool:
    """Say whether `text` is `owner/name` by the hub's own rules."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if text.count("/") != 1:
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def download_snapshot(
    repo_id: str, *, revision: str | None, with_code: bool, with_weights: bool, progress: bool
) -> Path:
    """Download a model into the hub's cache, or take what is there, and return its folder, named by the commit.

    Raises:
        ModelNotFoundError: No such model or revision.
        ModelAccessError: It is gated, the hub cannot be reached, or the disk is full.
    """
    from huggingface_hub import snapshot_download

    with _explain_hub_errors(repo_id, revision), _progress_bars(progress):
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=[*_DATA, *(_WEIGHTS if with_weights else ()), *(_CODE if with_code else ())],
                ignore_patterns=list(_DUPLICATES),
            )
        )


@contextmanager
def _progress_bars(enabled: bool) -> Iterator[None]:
    import huggingface_hub.utils

    # These functions are documented, but not exported in the way the type checker wants.
    utils: Any = huggingface_hub.utils
    if utils.are_progress_bars_disabled() or (enabled and sys.stderr.isatty()):
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


@contextmanager
def _explain_hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    # The messages of the hub's errors carry addresses and request ids, so none is repeated.
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.GatedRepoError:
        raise ModelAccessError(
            f"{repo_id!r} is gated",
            hint="accept its licence on the model's page and log in with `hf auth login`",
        ) from None
    except hub.RevisionNotFoundError:
        raise ModelNotFoundError(
            f"{repo_id!r} has no revision {revision!r}", hint="give a branch, a tag or a commit of that model"
        ) from None
    except hub.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"the hub has no model {repo_id!r}, or it is private",
            hint="check the name; for a private model log in with `hf auth login`",
        ) from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        raise ModelAccessError(
            f"{repo_id!r} is not in the local cache and the hub cannot be reached",
            hint="check the connection, and that HF_HUB_OFFLINE is not set",
        ) from None
    except OSError as error:
        if is_disk_full(error):
            raise ModelAccessError(
                f"the disk is full: {repo_id!r} does not fit into the hub's cache",
                hint="make room, or set HF_HOME to a folder on a larger disk",
            ) from None
        raise _failed(repo_id, error) from None
    except Exception as error:
        # Below the hub's client lies an HTTP library that differs between its versions.
        raise _failed(repo_id, error) from None


def _failed(repo_id: str, error: Exception) -> ModelAccessError:
    return ModelAccessError(
        f"downloading {repo_id!r} failed: {type(error).__name__}", hint="check the connection and try again"
    )

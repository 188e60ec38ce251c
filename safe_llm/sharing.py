"""Ensembles that are loaded on first use, and loaded once however many objects of a process describe the same one."""

from __future__ import annotations

import hashlib
import json
import os.path
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig, check_names, preset
from safe_llm.errors import ConfigError
from safe_llm.models import DEMO_MODELS
from safe_llm.models.folder import fingerprint_folder
from safe_llm.types import SamplingParams

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["LazyEnsemble"]

MemberLike = str | Path | MemberConfig | Mapping[str, Any]

_LOADED: WeakValueDictionary[str, Ensemble] = WeakValueDictionary()
_LOCKS: dict[str, threading.Lock] = {}


class LazyEnsemble:
    """A handle on an ensemble: checked at once, loaded on first use, shared by all handles of the same models.

    Handles compare by what they load. Copies are the handle itself. Pickling keeps the description, not the weights.
    """

    def __init__(self, source: EnsembleSpec | Ensemble, *, progress: bool = True) -> None:
        """Make a handle on `source`, which `of` has checked.

        Args:
            source: What to load, or a loaded ensemble.
            progress: Show progress bars on a terminal while loading.
        """
        self._source = source
        self._progress = progress
        self._loaded: Ensemble | None = None
        self._made_of: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        ensemble: Ensemble | None = None,
        preset: str | Path | EnsembleSpec | None = None,
        drafter: MemberLike | None = None,
        verifiers: Sequence[MemberLike] = (),
        config: EnsembleConfig | Mapping[str, Any] | None = None,
        progress: bool = True,
        previous: Self | None = None,
    ) -> Self:
        """Describe an ensemble in one of three ways. Nothing is loaded, but all that needs no weights is checked.

        Args:
            ensemble: A loaded ensemble.
            preset: A preset's name, the path of a `.toml` file, or a spec.
            drafter: The best model, as `Ensemble.from_pretrained` takes it, or a mapping of `MemberConfig` fields.
            verifiers: The others, with `drafter` only.
            config: How they decide: a mapping changes these fields, an `EnsembleConfig` replaces the preset's.
            progress: Show progress bars on a terminal while loading.
            previous: Returned instead of a new handle if it was made of these very objects.

        Raises:
            ConfigError: None or several of the three ways, or values that are not valid or do not fit each other.
        """
        made_of = (ensemble, preset, drafter, verifiers, config, progress)
        if previous is not None and [*map(id, previous._made_of)] == [*map(id, made_of)]:
            return previous
        _check_way({"ensemble": ensemble, "preset": preset, "drafter": drafter}, bool(verifiers))
        if ensemble is not None:
            _check_ensemble(ensemble, config)
            handle = cls(ensemble)
        else:
            spec = _spec_of_members(drafter, verifiers) if drafter is not None else _spec_of(preset)
            handle = cls(_checked(spec, config), progress=progress)
        handle._made_of = made_of
        return handle

    # ------------------------------------------------------------------ loading

    def get(self) -> Ensemble:
        """Return the ensemble; load it if no handle of the process has, or if somebody closed it.

        Safe to call from many threads: one of them loads, the others wait. After a failure the next call tries again.

        Raises:
            ModelError: A member cannot be had or used.
        """
        if not isinstance(self._source, EnsembleSpec):
            return self._source
        with _LOCKS.setdefault(self._canonical, threading.Lock()):
            shared = _LOADED.get(self._canonical)
            if shared is None or shared.is_closed:
                from safe_llm.ensemble import Ensemble

                self._loaded = shared = None  # a closed one frees its memory before the next is loaded
                shared = _LOADED[self._canonical] = Ensemble.from_spec(self._source, progress=self._progress)
            self._loaded = shared  # for the handle's life; the registry is weak
        return shared

    @property
    def is_loaded(self) -> bool:
        """Whether `get` has nothing to load."""
        if not isinstance(self._source, EnsembleSpec):
            return True
        shared = _LOADED.get(self._canonical)
        return shared is not None and not shared.is_closed

    # ------------------------------------------------------------------ facts

    @property
    def spec(self) -> EnsembleSpec | None:
        """What it loads, or None for an ensemble that was given loaded."""
        return self._source if isinstance(self._source, EnsembleSpec) else None

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names, the drafter's first."""
        if isinstance(self._source, EnsembleSpec):
            return tuple(member.display_name for member in self._source.members)
        return tuple(member.name for member in self._source.members)

    @property
    def sampling(self) -> dict[str, Any]:
        """Its own defaults for the decoding parameters of a request."""
        return dict(self._source.sampling)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides its answers, as JSON values; of local weights the files' names, sizes and times."""
        identity: dict[str, Any] = json.loads(self._canonical)
        return identity

    @property
    def key(self) -> str:
        """The identity, for cache keys: 16 hex digits."""
        return hashlib.sha256(self._canonical.encode()).hexdigest()[:16]

    @cached_property
    def _canonical(self) -> str:
        if not isinstance(self._source, EnsembleSpec):
            return json.dumps({"fingerprint": self._source.fingerprint, "members": self.names}, sort_keys=True)
        spec = self._source.model_dump(mode="json", fallback=repr)
        members = [member | {"files": _stamp_of(member["model"])} for member in (spec["drafter"], *spec["verifiers"])]
        identity = {"members": members, "config": spec["ensemble"], "sampling": spec["sampling"]}
        return json.dumps(identity, sort_keys=True)

    def __repr__(self) -> str:
        config = self._source.ensemble if isinstance(self._source, EnsembleSpec) else self._source.config
        return f"<LazyEnsemble of {', '.join(self.names)}; {config.mode}, {config.method}>"

    # ------------------------------------------------------------------ as a value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyEnsemble):
            return NotImplemented
        if self.spec is None or other.spec is None:
            return self._source is other._source
        return self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self._canonical)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.spec is None:
            raise TypeError("an ensemble built from loaded members cannot be pickled; build from preset= or drafter=")
        return partial(type(self), progress=self._progress), (self.spec,)


# ---------------------------------------------------------------------- checks


def _check_way(ways: Mapping[str, object], has_verifiers: bool) -> None:
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"give exactly one of ensemble, preset and drafter, got {' and '.join(given) or 'none of them'}",
            hint="preset='demo' is ready to use",
        )
    if has_verifiers and given != ["drafter"]:
        raise ConfigError(f"verifiers are given with {given[0]}", hint="they go with drafter only")


def _check_ensemble(ensemble: object, config: object) -> None:
    if config is not None:
        raise ConfigError("config is given with a loaded ensemble", hint="it has its own; give one or the other")
    module = sys.modules.get("safe_llm.ensemble")  # whoever has an ensemble has imported it; others need no torch
    if module is None or not isinstance(ensemble, module.Ensemble):
        raise ConfigError(
            f"ensemble must be an Ensemble, got {type(ensemble).__name__}",
            hint="for something that is to be loaded, give preset= or drafter=",
        )


def _spec_of(source: str | Path | EnsembleSpec | None) -> EnsembleSpec:
    if isinstance(source, EnsembleSpec):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml")):
        return EnsembleSpec.from_toml(source)
    if isinstance(source, str):
        return preset(source)
    raise ConfigError(f"preset must be a name, a path or an EnsembleSpec, got {type(source).__name__}")


def _spec_of_members(drafter: MemberLike, verifiers: Sequence[MemberLike]) -> EnsembleSpec:
    if not isinstance(verifiers, (list, tuple)):
        raise ConfigError(f"verifiers must be a list, got {type(verifiers).__name__}", hint="write [it] for one")
    return EnsembleSpec(drafter=_member(drafter), verifiers=tuple(map(_member, verifiers)))


def _member(member: MemberLike) -> MemberConfig:
    if isinstance(member, MemberConfig):
        return member
    if isinstance(member, Mapping):
        return MemberConfig(**member)
    if isinstance(member, (str, Path)):
        return MemberConfig(model=str(member))
    raise ConfigError(
        f"a member must be a name, a path, a MemberConfig or a mapping, got {type(member).__name__}",
        hint="loaded members go into Ensemble(...), and that into ensemble=",
    )


def _checked(spec: EnsembleSpec, config: EnsembleConfig | Mapping[str, Any] | None) -> EnsembleSpec:
    """Return `spec` with `config` applied, once everything that needs no weights fits together."""
    if isinstance(config, Mapping):
        config = spec.ensemble.updated(config)
    elif config is None:
        config = spec.ensemble
    elif not isinstance(config, EnsembleConfig):
        raise ConfigError(f"config must be an EnsembleConfig or a mapping, got {type(config).__name__}")
    config.normalized_weights(len(spec.members))
    check_names([member.display_name for member in spec.members])
    SamplingParams.of(spec.sampling)
    return spec.model_copy(update={"ensemble": config})


def _stamp_of(model: str) -> str | None:
    """Return what tells versions of a local model apart, or None for a model that is not local."""
    path = Path(os.path.expanduser(model))
    if model in DEMO_MODELS:
        return None
    if os.path.isdir(path):
        return fingerprint_folder(path)
    if os.path.isfile(path):
        stat = path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    return None

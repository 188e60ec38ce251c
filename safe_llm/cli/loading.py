"""From flags to an `EnsembleSpec`, and from that to an ensemble; everything is checked before weights are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from safe_llm.cli import terminal
from safe_llm.cli.options import EnsembleFlags, MemberFlags, PlacementFlags, SamplingFlags
from safe_llm.config import EnsembleSpec, MemberConfig, preset
from safe_llm.errors import ConfigError
from safe_llm.types import SamplingParams

if TYPE_CHECKING:
    from safe_llm.ensemble import Ensemble

__all__ = ["load_ensemble", "members_spec", "spec_of"]

DEFAULT_PRESET = "demo"


def members_spec(flags: MemberFlags) -> EnsembleSpec:
    """Return the spec of the models that the flags name.

    Raises:
        ConfigError: Flags that exclude each other, an unknown preset, a bad configuration file.
    """
    ways = {"--preset": flags.preset, "--drafter": flags.drafter, "--config": flags.config}
    given = [flag for flag, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"give {given[0]} or {given[1]}, not both")
    if flags.verifier and flags.drafter is None:
        raise ConfigError("--verifier needs --drafter", hint="name the drafter too, or use --preset or --config alone")
    if flags.config is not None:
        return EnsembleSpec.from_toml(flags.config)
    if flags.drafter is not None:
        drafter, *verifiers = (MemberConfig(model=model) for model in (flags.drafter, *(flags.verifier or ())))
        return EnsembleSpec(drafter=drafter, verifiers=tuple(verifiers))
    return preset(DEFAULT_PRESET if flags.preset is None else flags.preset)


def spec_of(
    members: MemberFlags, placement: PlacementFlags, ensemble: EnsembleFlags, sampling: SamplingFlags
) -> EnsembleSpec:
    """Return the spec that all flags together describe; a flag wins over the configuration file.

    Raises:
        ConfigError: A value out of its range, or values that do not fit each other.
    """
    spec = members_spec(members)
    config = spec.ensemble.updated({**asdict(ensemble), "weights": _numbers(ensemble.weights)})
    config.normalized_weights(len(spec.members))
    params = spec.sampling | {name: value for name, value in asdict(sampling).items() if value is not None}
    SamplingParams.of(params)
    drafter, *verifiers = (_placed(member, placement) for member in spec.members)
    return EnsembleSpec(drafter=drafter, verifiers=tuple(verifiers), ensemble=config, sampling=params)


def _numbers(items: Iterable[str] | None) -> tuple[float, ...] | None:
    if items is None:
        return None
    texts = [text for item in items for text in item.split(",")]
    try:
        return tuple(map(float, texts))
    except ValueError:
        raise ConfigError(f"weights must be numbers, got {', '.join(texts)!r}", hint="for instance 2,1,1") from None


def _placed(member: MemberConfig, placement: PlacementFlags) -> MemberConfig:
    changes: dict[str, Any] = {}
    if placement.device is not None:
        changes |= {"device": placement.device, "device_map": None}
    if placement.dtype is not None:
        changes["dtype"] = placement.dtype
    if placement.backend is not None:
        changes["backend"] = placement.backend
    return MemberConfig(**member.model_dump() | changes)


def load_ensemble(spec: EnsembleSpec, *, progress: bool) -> Ensemble:
    """Load the members of `spec`; tests put a scripted ensemble in its place."""
    names = ", ".join(member.display_name for member in spec.members)
    with terminal.waiting(f"loading {names}", shown=progress):
        from safe_llm.ensemble import Ensemble

        return Ensemble.from_spec(spec, progress=progress)

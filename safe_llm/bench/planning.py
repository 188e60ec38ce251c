"""Who takes part: names like `safe` or `safe:lookahead=5,method=gac`, checked before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from safe_llm.bench.trials import Contender
from safe_llm.config import EnsembleConfig, EnsembleSpec, MethodName, Mode
from safe_llm.errors import ConfigError, UnknownNameError
from safe_llm.member import Member

__all__ = ["Plan", "default_contenders", "plan_contender"]

_DEFAULT = ("safe", "every-token:unite", "every-token:gac", "drafter", "generate", "assisted")
_DEFAULT_ALONE = ("drafter", "generate")

Builder = Callable[[Sequence[Member]], Contender]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A contender before weights are loaded.

    Attributes:
        name: As it was asked for.
        config: Of the engine; None where it is another one's.
        build: Makes the contender of the loaded members, drafter first; may raise `Unavailable`.
    """

    name: str
    config: EnsembleConfig | None
    build: Builder


def default_contenders(spec: EnsembleSpec) -> tuple[str, ...]:
    """Return who takes part where nobody was named."""
    return _DEFAULT if spec.verifiers else _DEFAULT_ALONE


def plan_contender(name: str, spec: EnsembleSpec) -> Plan:
    """Return the plan of a contender.

    Args:
        name: A mode of the engine, `generate` or `assisted`. Behind a colon a mode can have changes of the spec's
            configuration, with commas: `FIELD=VALUE`, or a method's name alone.
        spec: The members, and how they decide together.

    Raises:
        UnknownNameError: No such contender, field or method; names the nearest.
        ConfigError: A value out of its range, changes where there are none to make, or a mode that needs a verifier.
    """
    kind, colon, changes = name.partition(":")
    if kind in _OTHERS:
        if colon:
            raise ConfigError(f"contender {name!r}: {kind} has no settings", hint=f"name it {kind!r}")
        return Plan(name=name, config=None, build=_OTHERS[kind])
    modes = {mode: mode for mode in get_args(Mode)}
    if kind not in modes:
        raise UnknownNameError("contender", kind, [*modes, *_OTHERS])
    if kind != "drafter" and not spec.verifiers:
        raise ConfigError(f"contender {name!r} needs a drafter and at least one verifier", hint="add --verifier")
    # every trial computes its prompt, as transformers does
    config = spec.ensemble.updated({"prefix_caching": False, **_changes(name, changes), "mode": modes[kind]})
    config.normalized_weights(len(spec.members))
    return Plan(name=name, config=config, build=_engine(name, config))


def _changes(name: str, text: str) -> Mapping[str, str]:
    changes: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        field, equals, value = part.partition("=")
        if not equals:
            field, value = "method", part
            if part not in get_args(MethodName):
                known = [*get_args(MethodName), *(f"{key}=" for key in EnsembleConfig.model_fields)]
                raise UnknownNameError("change of a contender", part, known)
        if field == "mode":
            raise ConfigError(f"contender {name!r}: its mode is its name", hint="for instance drafter:lookahead=8")
        if field in changes:
            raise ConfigError(f"contender {name!r}: {field} is given twice")
        changes[field] = value
    return changes


def _engine(name: str, config: EnsembleConfig) -> Builder:
    def build(members: Sequence[Member]) -> Contender:
        from safe_llm.bench.engine_contender import EngineContender

        return EngineContender(name, members, config)

    return build


def _generate(members: Sequence[Member]) -> Contender:
    from safe_llm.bench.transformers_contender import generating

    return generating("generate", members)


def _assisted(members: Sequence[Member]) -> Contender:
    from safe_llm.bench.transformers_contender import assisted

    return assisted("assisted", members)


_OTHERS: Mapping[str, Builder] = {"generate": _generate, "assisted": _assisted}
"""Contenders that are not our engine."""

"""What `safe-llm serve` does: flags, the address and the extra are checked before weights are read."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict

from safe_llm.cli import loading, terminal
from safe_llm.cli.options import EnsembleFlags, MemberFlags, PlacementFlags, SamplingFlags
from safe_llm.cli.server_options import ServerFlags

__all__ = ["run"]


def run(
    members: MemberFlags,
    placement: PlacementFlags,
    ensemble: EnsembleFlags,
    sampling: SamplingFlags,
    flags: ServerFlags,
) -> int:
    """Serve until a signal.

    Raises:
        ConfigError: A flag is not valid, the address is taken, or the extra `server` is missing.
        ModelError: A member cannot be had or used.
    """
    from safe_llm.server import ServerSettings, serve
    from safe_llm.server.running import bind

    spec = loading.spec_of(members, placement, ensemble, sampling)
    values = {name: value for name, value in asdict(flags).items() if value is not None and name != "quiet"}
    names = values.pop("model_name", None) or [_name(members)]
    settings = ServerSettings(model_names=tuple(names), **values)
    with bind(settings) as bound:
        if settings.api_key is None and not _is_loopback(bound.getsockname()[0]):
            terminal.say(f"warning: whoever reaches {settings.host} may use this server; set SAFE_LLM_API_KEY")
        loaded = loading.load_ensemble(spec, progress=not flags.quiet)
        serve(
            loaded,
            settings,
            bound=bound,
            ready=lambda url: None if flags.quiet else terminal.say(f"serving {', '.join(names)} at {url}/v1"),
        )
    return 0


def _name(members: MemberFlags) -> str:
    if members.drafter is None and members.config is None:
        return members.preset or loading.DEFAULT_PRESET
    return "safe-llm"


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback

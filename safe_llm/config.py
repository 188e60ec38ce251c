"""Configuration: which members, and how they decide. Unknown keys are refused with the nearest known one."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from safe_llm.errors import ConfigError, UnknownNameError
from safe_llm.types import SamplingParams

__all__ = [
    "NEEDS",
    "PRESETS",
    "BackendName",
    "EnsembleConfig",
    "EnsembleSpec",
    "MemberConfig",
    "Mode",
    "Needs",
    "ServerConfig",
    "check_names",
    "preset",
]

BackendName = Literal["transformers", "llama-cpp", "vllm", "sglang"]
Needs = Literal["safetensors", "gguf", "tokenizer"]
Mode = Literal["safe", "every-token", "drafter"]
MethodName = Literal["auto", "unite", "gac", "prefix-mass"]
SharpeningName = Literal["prefix", "geometric", "none"]

NEEDS: Mapping[BackendName, Needs] = {
    "transformers": "safetensors",
    "llama-cpp": "gguf",
    "vllm": "tokenizer",
    "sglang": "tokenizer",
}
"""What of a model must be here for each backend: its weights as safetensors, as a GGUF file, or only its tokenizer."""


class _Strict(BaseModel):
    """Frozen model whose errors are ConfigErrors that name what was got, and the nearest known key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def __init__(self, **values: Any) -> None:
        known = type(self).model_fields
        for key in values:
            if key not in known:
                raise UnknownNameError("parameter", key, known)
            choices = get_args(known[key].annotation) if get_origin(known[key].annotation) is Literal else ()
            if choices and isinstance(values[key], str) and values[key] not in choices:
                raise UnknownNameError(key, values[key], choices)
        try:
            super().__init__(**values)
        except ValidationError as error:
            first, *others = error.errors()
            where = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
            # a field of several types: pydantic reports what each of them would have liked
            what = " or ".join([first["msg"], *(e["msg"] for e in others if e["loc"][:1] == first["loc"][:1])])
            raise ConfigError(f"{'.'.join(where) or 'configuration'}: {what}, got {first.get('input')!r}") from None


class ServerConfig(_Strict):
    """A server that holds a member's weights.

    Attributes:
        url: Its address, `http://host:port`, without a path of the API.
        model: The name under which it serves the model; by default the member's `model`.
        api_key: Sent as a bearer token. Shown nowhere.
        timeout_s: Seconds that one call may take.
        max_retries: How often a call is repeated after a connection error or an answer 429, 502, 503 or 504.
        top_k: Most likely tokens that it is asked for at every position.
        tokens_per_call: Tokens that a drafter is asked for in one call.
    """

    url: str
    model: str | None = Field(default=None, min_length=1)
    api_key: SecretStr | None = None
    timeout_s: float = Field(default=60.0, gt=0.0)
    max_retries: int = Field(default=2, ge=0, le=10)
    top_k: int = Field(default=20, ge=2, le=1000)
    tokens_per_call: int = Field(default=8, ge=1, le=64)

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("write it as http://host:port")
        if parts.username is not None or parts.password is not None:
            raise ValueError("give credentials as api_key, not in the address")
        return url.rstrip("/")


class MemberConfig(_Strict):
    """One model of the ensemble.

    Attributes:
        model: A demo model's name, a local folder, a `.gguf` file, or a hub id (`owner/name`).
        name: How errors, events and traces call it; by default the last part of `model`.
        backend: What runs it: `transformers`, `llama-cpp` (GGUF files as they are), or a server, `vllm` or `sglang`;
            then `model` says which tokenizer and chat template it has.
        server: Where the server is; with `vllm` and `sglang` only.
        revision: Branch, tag or commit, hub ids only.
        dtype: `auto` is bfloat16 where the device computes fast in it, else float32. With `llama-cpp` the weights have
            the file's type, and this is the cache's: `auto` is float16, float32 for a float32 file.
        device: `cpu`, `cuda:1`, ...; None spreads the members over the GPUs, one each, or takes the CPU.
        device_map: accelerate's device map (`auto` splits one model over several devices); excludes `device`.
        num_threads: Threads that `llama-cpp` computes with; by default as many as torch, which are the physical cores.
        max_context: Lower the context window, in tokens.
        cuda_graphs: Replay passes over few tokens as CUDA graphs. Off, since nobody has run it on a GPU yet; the
            self-check covers it.
        self_check: Compare cached with uncached logits when the model is loaded.
        trust_remote_code: Run code that ships with the model. Off unless you trust its authors.
        template_kwargs: Extra variables for the chat template, for instance {"enable_thinking": False}.
    """

    model: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    backend: BackendName = "transformers"
    server: ServerConfig | None = None
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    device_map: str | dict[str, int | str] | None = None
    num_threads: int | None = Field(default=None, ge=1, le=512)
    max_context: int | None = Field(default=None, ge=2)
    cuda_graphs: bool = False
    self_check: bool = True
    trust_remote_code: bool = False
    template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_placement(self) -> Self:
        if self.device is not None and self.device_map is not None:
            raise ValueError("give device or device_map, not both")
        return self

    @model_validator(mode="after")
    def _server_where_needed(self) -> Self:
        if (self.backend in ("vllm", "sglang")) != (self.server is not None):
            needs = "needs" if self.server is None else "has no"
            raise ValueError(f"backend {self.backend!r} {needs} server")
        return self

    @model_validator(mode="after")
    def _backend_has_the_options(self) -> Self:
        wrong = {
            "device_map": self.device_map is not None and self.backend != "transformers",
            "cuda_graphs": self.cuda_graphs and self.backend != "transformers",
            "num_threads": self.num_threads is not None and self.backend != "llama-cpp",
        }
        if any(wrong.values()):
            option = next(name for name, is_wrong in wrong.items() if is_wrong)
            raise ValueError(f"backend {self.backend!r} has no {option}")
        return self

    @property
    def display_name(self) -> str:
        """The member's name: `name`, else the last part of `model` without `.gguf`."""
        return self.name or Path(self.model.rstrip("/")).name.removesuffix(".gguf") or self.model


class EnsembleConfig(_Strict):
    """How the members decide together. Defaults are the paper's (arXiv 2510.15346), but for method and lookahead.

    Attributes:
        mode: `safe`; `every-token` merges at every token (the baseline); `drafter` is plain decoding.
        method: `unite`, `gac`, `prefix-mass`, or `auto`: `prefix-mass` in mode `safe` if all members give full rows of
            scores (see docs/miniature.md), else `unite`, which is the paper's. A loaded ensemble says which.
        lookahead: Tokens drafted per round (n); `adaptive` stops where the ensemble is likely to act (the paper: 5).
        lookup: Let the drafter check guesses, many at a time: text that has occurred before, a verifier's next token.
            Changes no greedy answer.
        run_ahead: Let the drafter go on while verifiers check, and drop that where it was in vain; by default where a
            verifier is on another device. Changes no greedy answer.
        consensus_threshold: C2 accepts a token whose mean probability is above it.
        sharpening: What to do where no candidate reaches 1/2: `prefix`, `geometric` or `none` (UniTE and GaC).
        sharpening_threshold: lambda of prefix sharpening.
        top_k: Tokens that each member puts into the union (UniTE), or the drafter's candidates (prefix mass).
        weights: One per member, drafter first, any positive scale; None is equal.
        prefix_caching: Compute only what is new of a prompt that begins like one under way, or like the last one. Keeps
            the last request's cache until the next request, or until the ensemble is closed.
        on_verifier_failure: `fail` the requests that need it, or `continue` without it to the end of these answers:
            `Result.lost` names it. Further requests do without it for half a minute.
        max_batch_size: Rows decoded at once; further requests wait.
    """

    mode: Mode = "safe"
    method: MethodName = "auto"
    lookahead: Annotated[int, Field(ge=1, le=64)] | Literal["adaptive"] = "adaptive"
    lookup: bool = True
    run_ahead: bool | None = None
    prefix_caching: bool = True
    consensus_threshold: float = Field(default=0.5, ge=0.0, le=1.0)
    sharpening: SharpeningName = "prefix"
    sharpening_threshold: float = Field(default=0.1, ge=0.0, le=1.0)
    top_k: int = Field(default=10, ge=1, le=1000)
    weights: tuple[float, ...] | None = None
    on_verifier_failure: Literal["fail", "continue"] = "fail"
    max_batch_size: int = Field(default=16, ge=1, le=1024)

    def normalized_weights(self, num_members: int) -> tuple[float, ...]:
        """Return the members' weights, drafter first, summing to 1.

        Raises:
            ConfigError: Their number is not `num_members`, or one is not a positive finite number.
        """
        if self.weights is None:
            return (1.0 / num_members,) * num_members
        if len(self.weights) != num_members:
            raise ConfigError(
                f"{len(self.weights)} weights for {num_members} members",
                hint="give one weight per member, the drafter's first",
            )
        if any(not math.isfinite(weight) or weight <= 0 for weight in self.weights):
            raise ConfigError(f"weights must be positive and finite, got {list(self.weights)}")
        largest = max(self.weights)
        total = sum(weight / largest for weight in self.weights)
        return tuple(weight / largest / total for weight in self.weights)

    def resolved(self, *, has_dense_scores: bool) -> EnsembleConfig:
        """Return a copy whose method is named.

        Args:
            has_dense_scores: Whether all members give full rows of scores.
        """
        if self.method != "auto":
            return self
        fits = has_dense_scores and self.mode == "safe"
        return self.model_copy(update={"method": "prefix-mass" if fits else "unite"})

    def updated(self, values: Mapping[str, Any]) -> EnsembleConfig:
        """Return a copy with `values` that are not None replaced, validated."""
        changes = {key: value for key, value in values.items() if value is not None}
        return EnsembleConfig(**{**self.model_dump(), **changes})


class EnsembleSpec(_Strict):
    """Everything needed to load an ensemble: what a preset is, and what a TOML file holds."""

    drafter: MemberConfig
    verifiers: tuple[MemberConfig, ...] = ()
    ensemble: EnsembleConfig = Field(default_factory=EnsembleConfig)
    sampling: dict[str, Any] = Field(default_factory=dict)

    @property
    def members(self) -> tuple[MemberConfig, ...]:
        """All members, the drafter first."""
        return (self.drafter, *self.verifiers)

    @model_validator(mode="after")
    def _servers_name_enough(self) -> Self:
        for member in self.members:
            named = self.ensemble.top_k if member.server is None else member.server.top_k
            if named < self.ensemble.top_k and self.ensemble.method != "gac":
                raise ValueError(
                    f"member {member.display_name!r} is asked for {named} tokens a position (server.top_k), but every "
                    f"member puts {self.ensemble.top_k} into the union (ensemble.top_k)"
                )
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EnsembleSpec:
        """Build from nested mappings: `drafter`, `verifiers`, `ensemble`, `sampling`."""
        data = dict(values)
        if isinstance(data.get("drafter"), Mapping):
            data["drafter"] = MemberConfig(**data["drafter"])
        if isinstance(data.get("verifiers"), (list, tuple)):
            data["verifiers"] = tuple(MemberConfig(**v) if isinstance(v, Mapping) else v for v in data["verifiers"])
        if isinstance(data.get("ensemble"), Mapping):
            data["ensemble"] = EnsembleConfig(**data["ensemble"])
        if isinstance(data.get("sampling"), Mapping):
            SamplingParams.of(data["sampling"])
        spec = cls(**data)
        spec.ensemble.normalized_weights(len(spec.members))
        return spec

    @classmethod
    def from_toml(cls, path: str | Path) -> EnsembleSpec:
        """Read a TOML file with `[drafter]`, `[[verifiers]]`, `[ensemble]` and `[sampling]` tables.

        Raises:
            ConfigError: The file cannot be read, is not TOML, or has a wrong or unknown key.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(path)!r} is not valid TOML: {error}") from None
        return cls.from_mapping(values)


PRESETS: Mapping[str, EnsembleSpec] = {
    "demo": EnsembleSpec(
        drafter=MemberConfig(model="qwen2.5-coder-0.5b-instruct"),
        verifiers=(MemberConfig(model="smollm2-135m-instruct"),),
    ),
    "demo3": EnsembleSpec(
        drafter=MemberConfig(model="qwen2.5-coder-0.5b-instruct"),
        verifiers=(MemberConfig(model="smollm2-135m-instruct"), MemberConfig(model="gemma-3-270m")),
    ),
    "demo-gguf": EnsembleSpec(
        drafter=MemberConfig(model="qwen2.5-coder-0.5b-instruct", backend="llama-cpp"),
        verifiers=(MemberConfig(model="smollm2-135m-instruct", backend="llama-cpp"),),
    ),
}
"""Ready ensembles by name."""


def preset(name: str) -> EnsembleSpec:
    """Return the preset called `name`; an unknown name is an error that suggests the nearest."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return PRESETS[name]


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError if two members have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two members are called {name!r}", hint="give one of them another `name`")

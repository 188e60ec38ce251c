"""The flags that several commands share, each group written once as a dataclass.

A command takes a group as one parameter; `with_flags` unfolds it for typer. Flags have the names of the fields of
`EnsembleConfig` and `SamplingParams`. Their values are checked there, not here, so that the error is the same
everywhere; None means "not given".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

__all__ = ["EnsembleFlags", "MemberFlags", "OutputFlags", "PlacementFlags", "SamplingFlags", "with_flags"]


def _flag(text: str, *names: str, panel: str, default: object = None, metavar: str | None = None) -> Any:
    """Describe one flag; `default` is what holds where the flag is not given, for the help."""
    help_text = text if default is None else f"{text} [default: {default}]"
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)


_members = functools.partial(_flag, panel="Members")
_ensemble = functools.partial(_flag, panel="Ensemble")
_sampling = functools.partial(_flag, panel="Decoding")
_output = functools.partial(_flag, panel="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFlags:
    """Which models: a preset, a configuration file, or a drafter with verifiers."""

    preset: Annotated[str | None, _members("A ready ensemble.", default="demo", metavar="NAME")] = None
    drafter: Annotated[
        str | None, _members("The model that drafts: demo name, folder, .gguf file or hub id.", metavar="MODEL")
    ] = None
    verifier: Annotated[list[str] | None, _members("A further model; repeat it for more.", metavar="MODEL")] = None
    config: Annotated[
        str | None, _members("TOML file with [drafter], [[verifiers]], [ensemble], [sampling].", metavar="FILE")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFlags:
    """Where, in which type and by what the models run."""

    device: Annotated[
        str | None, _members("For all members: cpu, cuda:1, ...", default="the GPUs in turn, else the CPU")
    ] = None
    dtype: Annotated[
        str | None, _members("For all members.", default="auto", metavar="auto|float32|bfloat16|float16")
    ] = None
    backend: Annotated[
        str | None,
        _members("For all members: what runs them.", default="transformers", metavar="transformers|llama-cpp"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleFlags:
    """The fields of `EnsembleConfig`."""

    mode: Annotated[
        str | None,
        _ensemble(
            "SAFE, or merging at each token, or plain decoding.", default="safe", metavar="safe|every-token|drafter"
        ),
    ] = None
    method: Annotated[
        str | None, _ensemble("How distributions are merged.", default="auto", metavar="auto|unite|gac|prefix-mass")
    ] = None
    lookahead: Annotated[
        str | None, _ensemble("Tokens drafted per round.", default="adaptive", metavar="N|adaptive")
    ] = None
    consensus_threshold: Annotated[
        float | None, _ensemble("A token whose mean probability is above it is accepted.", default=0.5)
    ] = None
    sharpening: Annotated[
        str | None,
        _ensemble("Where no candidate reaches 1/2.", default="prefix", metavar="prefix|geometric|none"),
    ] = None
    sharpening_threshold: Annotated[float | None, _ensemble("Lambda of prefix sharpening.", default=0.1)] = None
    top_k: Annotated[int | None, _ensemble("Tokens that each member puts into the union.", default=10)] = None
    weights: Annotated[
        list[str] | None,
        _ensemble("One per member, drafter first: 2,1,1 or repeated.", default="equal", metavar="W,W,..."),
    ] = None
    lookup: Annotated[
        bool | None,
        _ensemble(
            "Guess text that has occurred before; changes no greedy answer.", "--lookup/--no-lookup", default="on"
        ),
    ] = None
    run_ahead: Annotated[
        bool | None,
        _ensemble(
            "Draft on while verifiers check; changes no greedy answer.",
            "--run-ahead/--no-run-ahead",
            default="if a verifier is on another device",
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        _ensemble("Compute only what is new of a prompt.", "--prefix-caching/--no-prefix-caching", default="on"),
    ] = None
    on_verifier_failure: Annotated[
        str | None,
        _ensemble("What becomes of answers whose verifier fails.", default="fail", metavar="fail|continue"),
    ] = None
    max_batch_size: Annotated[int | None, _ensemble("Most requests decoded at once.", default=16)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`."""

    max_tokens: Annotated[int | None, _sampling("Most tokens to generate.", default=256)] = None
    temperature: Annotated[float | None, _sampling("0 always takes the best token.", default=0.0)] = None
    top_p: Annotated[float | None, _sampling("Nucleus mass, in (0, 1].", default=1.0)] = None
    seed: Annotated[int | None, _sampling("Makes sampling reproducible.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the answer; repeat it for more.", metavar="TEXT")] = (
        None
    )
    min_tokens: Annotated[int | None, _sampling("No end before this many tokens.", default=0)] = None
    logprobs: Annotated[int | None, _sampling("Alternatives to report per token, 0 to 20 (--json).")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """What is printed."""

    as_json: Annotated[bool, _output("One JSON object per answer, with counters and timings.", "--json")] = False
    show: Annotated[
        bool, _output("Mark the tokens where the ensemble acted (terminal), and print counters to stderr.", "--show")
    ] = False
    trace: Annotated[
        str | None,
        _output("Write down every round, for `safe-llm report`; a file that exists is replaced.", metavar="FILE"),
    ] = None
    trace_prompt: Annotated[
        bool, _output("Write the prompt's text into the trace too, not only its length and hash.", "--trace-prompt")
    ] = False
    quiet: Annotated[bool, _output("No progress on stderr.", "--quiet", "-q")] = False


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Unfold every parameter of `command` that is annotated with a dataclass of this module into its flags."""
    hints = get_type_hints(command, include_extras=True)
    hints.pop("return")
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(command)
    def unfolded(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            group_hints = get_type_hints(groups[name], include_extras=True)
            parameters += [_parameter(field, group_hints[field.name]) for field in fields(groups[name])]
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    unfolded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return unfolded


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

"""The flags of `safe-llm serve`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated

import typer

from safe_llm.cli.options import _flag

__all__ = ["ServerFlags"]


_server = functools.partial(_flag, panel="Server")
_limit = functools.partial(_flag, panel="Limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """The fields of `ServerSettings`, which checks their values."""

    host: Annotated[str | None, _server("Address to listen on.", default="127.0.0.1, this machine only")] = None
    port: Annotated[int | None, _server("TCP port; 0 takes a free one.", default=8000)] = None
    model_name: Annotated[
        list[str] | None,
        _server("What requests name as `model`; repeat it for more.", default="the preset's, or safe-llm"),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What requests must bring as `Authorization: Bearer KEY`; better given as SAFE_LLM_API_KEY.",
            metavar="KEY",
            envvar="SAFE_LLM_API_KEY",
            show_envvar=False,
            show_default=False,
            rich_help_panel="Server",
        ),
    ] = field(default=None, repr=False)
    drain_s: Annotated[float | None, _server("Seconds that answers have left at the end.", default=30)] = None
    quiet: Annotated[bool, _server("Nothing on stderr but errors.", "--quiet", "-q")] = False
    max_queue: Annotated[int | None, _limit("Answers that may wait; more get 429.", default=256)] = None
    max_body_bytes: Annotated[int | None, _limit("Longest body of a request.", default="4 MiB")] = None
    max_prompt_chars: Annotated[int | None, _limit("Longest prompt, in characters.", default=1000000)] = None
    max_n: Annotated[int | None, _limit("Most answers of one request.", default=16)] = None
    max_tokens_limit: Annotated[
        int | None, _limit("Most tokens that a request may ask for.", default="the smallest context window")
    ] = None

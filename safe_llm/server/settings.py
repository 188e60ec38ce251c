"""Where the server listens and what it allows."""

from __future__ import annotations

from pydantic import Field, SecretStr

from safe_llm.config import _Strict

__all__ = ["ServerSettings"]


class ServerSettings(_Strict):
    """Limits and addresses of one server.

    Attributes:
        host: Address to listen on; the default can be reached from this machine only.
        port: TCP port; 0 takes a free one.
        model_names: What requests may name as `model`, the first one in answers.
        api_key: What requests must bring as `Authorization: Bearer KEY`; None lets everybody in.
        max_queue: Answers that may wait for a place in the running batch; more are refused with 429.
        max_body_bytes: Longest body of a request.
        max_prompt_chars: Most characters of a request's prompts.
        max_n: Most answers of one request, over all its prompts.
        max_tokens_limit: Most tokens that a request may ask for; None takes the smallest context window.
        drain_s: How long answers under way may go on after the signal to end.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    model_names: tuple[str, ...] = Field(default=("safe-llm",), min_length=1)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    max_queue: int = Field(default=256, ge=0)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1)
    max_prompt_chars: int = Field(default=1_000_000, ge=1)
    max_n: int = Field(default=16, ge=1)
    max_tokens_limit: int | None = Field(default=None, ge=1)
    drain_s: float = Field(default=30.0, ge=0)

"""A member that a vLLM server holds (0.32 or later), through its endpoint for token ids.

Where a text's beginning is in the server's prefix cache, scores inside of it are not there: their rows are missing
(model runner V2) or hold what was in memory (V1, as on CPUs). Rows are used only behind the cached part; a position
that is needed inside of it is asked for once more with the cache passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_llm.backends.base import OpenModel
from safe_llm.backends.endpoint import Endpoint, RefusedError
from safe_llm.backends.remote import Answer, Question, position
from safe_llm.backends.served import list_models, open_served
from safe_llm.backends.sparse import Position
from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, MemberError, SafeLLMError, UnsupportedModelError

__all__ = ["VLLMServer", "open_model"]

_PATH = "/inference/v1/generate"
_NO_JSON = "not JSON compliant"  # what Python says of a NaN
_START = "start vLLM 0.32 or later with --enable-scale-out --enable-prompt-tokens-details"


class VLLMServer:
    """A vLLM server; see `Server`."""

    def __init__(self, endpoint: Endpoint, model: str, top_k: int) -> None:
        """Look at the server.

        Args:
            endpoint: Where it is.
            model: The model's name there.
            top_k: How many ids it is to name at every position.

        Raises:
            SafeLLMError: It cannot be reached, or lacks something.
        """
        self.name = endpoint.name
        self.top_k = top_k
        self._endpoint = endpoint
        self._model = model
        listed = list_models(endpoint, model)
        if not isinstance(listed.get("max_model_len"), int):
            raise UnsupportedModelError(f"member {self.name!r}: {endpoint.host} is no vLLM server", hint=_START)
        self.context: int = listed["max_model_len"]
        self._generate(Question(ids=(0, 0), first=1, num_new=1, session="probe"), reuse=True)

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the server's ids of a text, without any that it would add."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return _ids(self._endpoint, self._endpoint.ask("/tokenize", body))

    def ask(self, question: Question) -> Answer:
        """Make one call; see `Server.ask`. A second one where the prefix cache hides a position that is wanted."""
        answer = self._generate(question, reuse=True)
        return answer or self._generate(question, reuse=False) or self._incomplete()

    def _incomplete(self) -> Answer:
        raise MemberError(self.name, f"its server at {self._endpoint.host} answers fewer positions than asked for")

    def _generate(self, question: Question, *, reuse: bool) -> Answer | None:
        """Call; None if the positions wanted are not all there because of the prefix cache."""
        inside = question.first < len(question.ids)
        sampling: dict[str, Any] = {
            "max_tokens": question.num_new,
            "temperature": 0.0,
            "logprobs": self.top_k,
            "detokenize": False,
        }
        if inside:
            sampling |= {"prompt_logprobs": self.top_k, "skip_reading_prefix_cache": not reuse}
        body = {"model": self._model, "token_ids": list(question.ids), "sampling_params": sampling}
        try:
            reply = self._endpoint.call(_PATH, body, {"X-Session-ID": question.session})
        except RefusedError as refused:
            if inside and reuse and (refused.status == 500 or _NO_JSON in refused.text):
                return None  # a NaN in the rows that hold nothing
            raise self._refused(refused) from None
        try:
            return self._parsed(question, reply, inside)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise MemberError(
                self.name,
                f"its server at {self._endpoint.host} answers in another form ({type(error).__name__})",
                hint=_START,
            ) from None

    def _refused(self, refused: RefusedError) -> SafeLLMError:
        """Say what a refusal means."""
        if refused.status == 404:
            return self._endpoint.unsupported(_PATH, refused, _START)
        allowed = re.search(r"greater than max allowed: (\d+)", refused.text)
        if allowed:
            return ConfigError(
                f"member {self.name!r}: server.top_k is {self.top_k}, but its server names at most {allowed[1]} ids",
                hint=f"start it with --max-logprobs {self.top_k}, or lower server.top_k",
            )
        return MemberError(
            self.name,
            f"its server at {self._endpoint.host} refuses a call with status {refused.status}",
            hint="see the server's log",
        )

    def _parsed(self, question: Question, reply: Mapping[str, Any], inside: bool) -> Answer | None:
        """Read a reply; None if positions are hidden by the prefix cache."""
        length, usage, choice = len(question.ids), reply["usage"], reply["choices"][0]
        if usage["prompt_tokens"] != length:
            raise MemberError(self.name, f"its server read {usage['prompt_tokens']} ids where {length} were sent")
        cached = int(usage["prompt_tokens_details"]["cached_tokens"])
        positions: list[Position] = []
        if inside:
            rows = reply["prompt_logprobs"]
            if question.first <= cached:
                return None
            if len(rows) > length or len(rows) - length + question.first < 1:
                raise MemberError(
                    self.name, f"its server gives {len(rows)} rows for {length} ids, fewer positions than asked for"
                )
            for at in range(question.first, length):
                row = {int(token_id): float(entry["logprob"]) for token_id, entry in rows[at - length].items()}
                if question.ids[at] not in row:
                    raise MemberError(self.name, f"its server scored other ids than were sent, from number {at} on")
                positions.append(position(self.name, row, self.top_k))
        content = choice["logprobs"]["content"]
        generated = [int(token_id) for token_id in choice["token_ids"]]
        if [entry["token_id"] for entry in content] != generated:
            raise MemberError(self.name, "its server scored other ids than it generated")
        for entry in content:
            row = {int(top["token_id"]): float(top["logprob"]) for top in (*entry["top_logprobs"], entry)}
            positions.append(position(self.name, row, self.top_k))
        return Answer(positions=positions, generated=generated, num_computed=length - cached)


def _ids(endpoint: Endpoint, reply: Any) -> list[int]:
    """Read the answer of a tokenizer."""
    try:
        return [int(token_id) for token_id in reply["tokens"]]
    except (KeyError, TypeError, ValueError):
        raise MemberError(endpoint.name, f"the server at {endpoint.host} answers /tokenize in another form") from None


def open_model(config: MemberConfig, path: Path, device: str | None) -> OpenModel:  # noqa: ARG001 - it is elsewhere
    """Reach the member's vLLM server; see `open_served` for the errors."""
    return open_served(config, path, VLLMServer, "vllm")

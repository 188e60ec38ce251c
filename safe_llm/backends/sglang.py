"""A member that an SGLang server holds (0.5 or later), through `/generate`.

The prefix cache is read up to the first position that is asked for, so that every position asked for is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_llm.backends.base import OpenModel
from safe_llm.backends.endpoint import Endpoint, RefusedError
from safe_llm.backends.remote import Answer, Question, position
from safe_llm.backends.served import list_models, open_served
from safe_llm.backends.sparse import Position
from safe_llm.config import MemberConfig
from safe_llm.errors import MemberError, SafeLLMError, UnsupportedModelError

__all__ = ["SGLangServer", "open_model"]

_PATH = "/generate"
_START = "start SGLang 0.5 or later"


class SGLangServer:
    """An SGLang server; see `Server`."""

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
        listed = list_models(endpoint, model)
        if not isinstance(listed.get("max_model_len"), int):
            raise UnsupportedModelError(f"member {self.name!r}: {endpoint.host} is no SGLang server", hint=_START)
        self._model = model
        self.context: int = listed["max_model_len"]
        self.ask(Question(ids=(0, 0), first=1, num_new=1, session="probe"))

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the server's ids of a text, without any that it would add."""
        reply = self._endpoint.ask("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": False})
        try:
            return [int(token_id) for token_id in reply["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise self._other_form("/tokenize") from None

    def ask(self, question: Question) -> Answer:
        """Make one call; see `Server.ask`."""
        body = {
            "input_ids": list(question.ids),
            "session_id": question.session,
            "sampling_params": {"max_new_tokens": question.num_new, "temperature": 0.0},
            "return_logprob": True,
            "return_text_in_logprobs": False,
            # what is said of the id at this place is null, so that it has to be one before the first that is wanted
            "logprob_start_len": question.first - 1,
            "top_logprobs_num": self.top_k,
        }
        try:
            reply = self._endpoint.call(_PATH, body)
        except RefusedError as refused:
            raise self._refused(refused) from None
        try:
            return self._parsed(question, reply["meta_info"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise self._other_form(_PATH) from None

    def _refused(self, refused: RefusedError) -> SafeLLMError:
        if refused.status == 404:
            return self._endpoint.unsupported(_PATH, refused, _START)
        return MemberError(
            self.name,
            f"its server at {self._endpoint.host} refuses a call with status {refused.status}",
            hint="see the server's log",
        )

    def _other_form(self, path: str) -> MemberError:
        return MemberError(
            self.name, f"its server at {self._endpoint.host} answers {path} in another form", hint=_START
        )

    def _parsed(self, question: Question, meta: Mapping[str, Any]) -> Answer:
        length = len(question.ids)
        if meta["prompt_tokens"] != length:
            raise MemberError(self.name, f"its server read {meta['prompt_tokens']} ids where {length} were sent")
        read = [int(entry[1]) for entry in meta["input_token_logprobs"]]
        if read != list(question.ids[question.first - 1 :]):
            raise MemberError(
                self.name,
                f"its server gives the scores of {len(read)} positions where {length - question.first + 1} were asked "
                "for, or scored other ids than were sent",
            )
        generated = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        tokens = itertools.chain(meta["input_token_logprobs"][1:], meta["output_token_logprobs"])
        tops = itertools.chain(meta["input_top_logprobs"][1:], meta["output_top_logprobs"])
        return Answer(
            positions=list(self._positions(tokens, tops)),
            generated=generated,
            num_computed=length - int(meta["cached_tokens"]),
        )

    def _positions(self, tokens: Iterator[Any], tops: Iterator[Any]) -> Iterator[Position]:
        """Put together what is said of the id that is there and of the most likely ones: [log-probability, id, ...]."""
        for token, top in zip(tokens, tops, strict=True):
            # a NaN is written as null
            named = {int(i): float("nan") if value is None else float(value) for value, i, *_ in (*top, token)}
            yield position(self.name, named, self.top_k)


def open_model(config: MemberConfig, path: Path, device: str | None) -> OpenModel:  # noqa: ARG001 - it is elsewhere
    """Reach the member's SGLang server; see `open_served` for the errors."""
    return open_served(config, path, SGLangServer, "sglang")

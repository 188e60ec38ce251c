"""Opening of a member on a server: what its folder says, and whether the server's tokenizer is the folder's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from safe_llm.backends.base import Backend, OpenModel, Symbols
from safe_llm.backends.endpoint import Endpoint
from safe_llm.backends.remote import RemoteBackend, Server
from safe_llm.config import MemberConfig
from safe_llm.errors import ConfigError, ModelCorruptError, ModelNotFoundError, UnsupportedModelError

__all__ = ["CheckedServer", "list_models", "open_served"]

_PROBE = "The quick brown fox, 12345 + 67; naïve café:\n\tdef f(x):\n\t\treturn x**2  # 你好 🙂 don't \u00a0\u200b{}"
"""Text on which tokenizers differ in what they do to spaces, digits, case, accents, and rare characters."""


class CheckedServer(Server, Protocol):
    """A server that has been looked at."""

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the server's ids of a text, without any that it would add."""
        ...


def open_served(
    config: MemberConfig, path: Path, connect: Callable[[Endpoint, str, int], CheckedServer], kind: str
) -> OpenModel:
    """Reach a member's server, and check that it serves the model of the folder.

    Args:
        config: The member.
        path: Folder with `config.json` and `tokenizer.json`.
        connect: From an endpoint, the model's name there and `server.top_k` to a server that answers.
        kind: Of the server, for the model's identity.

    Raises:
        SafeLLMError: There is no such server, it does not serve what is needed, or its tokenizer is another one.
    """
    name, server = config.display_name, config.server
    if server is None:
        raise ConfigError(f"member {name!r} has no server", hint="give server.url")
    width, end_ids = _described(path)
    model = server.model or config.model
    reached = connect(Endpoint(name, server), model, server.top_k)
    _compare_tokenizers(name, path, config.trust_remote_code, reached.tokenize)
    tokens_per_call = server.tokens_per_call

    def connect_rows(symbols: Symbols, _self_check: bool) -> Backend:
        return RemoteBackend(reached, symbols, max_context=config.max_context, tokens_per_call=tokens_per_call)

    return OpenModel(
        width=width,
        end_ids=end_ids,
        connect=connect_rows,
        identity=f"{kind}:{server.url}:{model}",
        device=server.url,
    )


def list_models(endpoint: Endpoint, model: str) -> dict[str, Any]:
    """Return what `/v1/models` says of a model.

    Raises:
        ModelNotFoundError: The server does not serve it.
        UnsupportedModelError: This is no such server.
    """
    listing = endpoint.ask("/v1/models")
    try:
        served = {str(entry["id"]): dict(entry) for entry in listing["data"]}
    except (KeyError, TypeError, ValueError):
        raise UnsupportedModelError(
            f"member {endpoint.name!r}: the server at {endpoint.host} does not list its models", hint="check server.url"
        ) from None
    if model not in served:
        raise ModelNotFoundError(
            f"member {endpoint.name!r}: the server at {endpoint.host} serves {sorted(served)}, not {model!r}",
            hint="set server.model to the name under which the server serves it",
        )
    return served[model]


def _described(path: Path) -> tuple[int, list[int]]:
    """Return the width of the logits and the ids that end an answer, as the folder's files say."""
    described = _json(path / "config.json")
    text_config = described.get("text_config") or {}
    widths = [c["vocab_size"] for c in (described, text_config) if isinstance(c.get("vocab_size"), int)]
    if not widths:
        raise ModelCorruptError(f"{str(path / 'config.json')!r} does not say vocab_size")
    generation = path / "generation_config.json"
    configs = [_json(generation)] if generation.is_file() else []
    ends = [end_id for config in (*configs, described, text_config) for end_id in _ends(config)]
    return max(*widths, _tokenizer_size(path)), list(dict.fromkeys(ends))


def _ends(config: dict[str, Any]) -> Iterator[int]:
    ends = config.get("eos_token_id")
    yield from ends if isinstance(ends, list) else [] if ends is None else [ends]


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelCorruptError(f"{str(path)!r} cannot be read: {type(error).__name__}") from error


def _tokenizer_size(path: Path) -> int:
    """Return one more than the highest id of `tokenizer.json`, 0 without the file."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        return 0
    return 1 + max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values())


def _encode(path: Path, trust_remote_code: bool, text: str) -> list[int]:
    """Return the folder's ids of a text, without any that its tokenizer would add."""
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        return ids
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def _compare_tokenizers(
    name: str, path: Path, trust_remote_code: bool, tokenize: Callable[[str], Sequence[int]]
) -> None:
    """Raise UnsupportedModelError unless the server's tokenizer cuts the probe as the folder's does."""
    here, there = _encode(path, trust_remote_code, _PROBE), list(tokenize(_PROBE))
    if here == there:
        return
    at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    mine, its = (str(ids[at]) if at < len(ids) else "nothing" for ids in (here, there))
    raise UnsupportedModelError(
        f"member {name!r}: its server has another tokenizer: token {at} of a test text is {its} there and {mine} here",
        hint="give as `model` the folder or name of the model that is served",
    )

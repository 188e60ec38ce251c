"""Constrained decoding: which tokens of a member may come next, so that the answer follows a grammar.

A grammar's state is a position in bytes, like everything that members share. Each member has its own copy, since a mask
is over that member's tokens; all of them are fed the committed bytes. llguidance does the parsing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from safe_llm.errors import ConfigError, GenerationError
from safe_llm.json_schema import JSON_LAYOUT, closed

if TYPE_CHECKING:
    from safe_llm.vocabulary import Vocabulary

__all__ = ["Grammar", "GrammarTokenizer", "checked_grammar", "json_grammar", "regex_grammar"]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of the JSON values that `schema` describes, with no property that it does not name."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(closed(schema), defaults=dict(JSON_LAYOUT)))  # type: ignore[arg-type]


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(pattern))


def checked_grammar(grammar: str, what: str) -> str:
    """Return `grammar` if it can be enforced.

    Args:
        grammar: A Lark grammar in llguidance's dialect, or what the functions above return.
        what: Where it comes from, for the error.

    Raises:
        ConfigError: It is malformed, or has something in it that cannot be enforced.
    """
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        reason = messages[0].strip().splitlines()[0]
        raise ConfigError(f"{what} cannot be enforced: {reason}", hint="simplify it; nothing is decoded half-checked")
    return grammar


class GrammarTokenizer:
    """One vocabulary as the grammar library sees it: its tokens, and behind them one more id for every byte.

    Through the byte ids a state can follow any bytes, however a member would cut them. Building it takes about half a
    second for 150,000 tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.width = vocabulary.width
        self.handle = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))


class _Tokens:
    """The interface that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = [token or b"" for token in vocabulary.tokens] + [bytes([b]) for b in range(256)] + [b""]
        end_id = vocabulary.symbols.end_id
        self.eos_token_id = len(self.tokens) - 1 if end_id is None else end_id
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]

    def __call__(self, data: bytes) -> Sequence[int]:
        """Cut what the grammar forces; the library then allows no other way to write it."""
        return self._vocabulary.ids_of(data) or [self._vocabulary.width + byte for byte in data]


class Grammar:
    """How far one answer has come in its grammar, with masks for one member.

    Raises:
        GenerationError: From any method: the grammar became too complex to follow.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._width = tokenizer.width
        self._matcher = LLMatcher(tokenizer.handle, grammar, log_level=0)
        self._check()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which ids may come next [W]; END where the answer is complete. None if a member cannot write it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)

    def forced(self) -> bytes:
        """Return the bytes that must come next whatever a member prefers; empty where there is a choice."""
        return bytes(self._matcher.compute_ff_bytes())

    def advance(self, data: bytes) -> None:
        """Follow these bytes."""
        if data and not self._matcher.consume_tokens([self._width + byte for byte in data]):
            self._check()

    def rollback(self, num_bytes: int) -> None:
        """Take the last bytes back."""
        if num_bytes and not self._matcher.rollback(num_bytes):
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            # the library's message quotes the answer
            raise GenerationError(
                "the grammar of the answer cannot be followed any further", hint="use a simpler grammar or schema"
            )

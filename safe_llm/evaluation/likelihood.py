"""Log-likelihoods of given texts under one member: what an ensemble does not have, and its drafter does."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval.utils import get_rolling_token_windows

from safe_llm.backends.base import Feed
from safe_llm.errors import ContextOverflowError, PromptError, UnsupportedModelError
from safe_llm.evaluation.questions import Conversation
from safe_llm.member import Member
from safe_llm.types import Message

__all__ = ["Likelihoods"]


class Likelihoods:
    """Scores texts through a member, under the distribution that the engine decodes from (no control tokens).

    Attributes:
        num_truncated: Contexts whose beginning was cut off because the window is too small.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self.num_truncated = 0

    def continuation(self, context: str, text: str) -> tuple[float, bool]:
        """Return log P(text | context), and whether each of its tokens is the most probable one.

        The text is tokenized as the member would have generated it, so exactly its tokens are scored, none of the
        context's. White space at the end of a plain context belongs to the text, as in lm_eval's other models.

        Raises:
            ContextOverflowError: The text alone does not fit the window.
            PromptError: The text is empty.
        """
        if not isinstance(context, Conversation) and (kept := context.rstrip()) != context:
            context, text = kept, context[len(kept) :] + text
        ids = self._member.vocabulary.encode(text.encode()).ids
        if not ids:
            raise PromptError("there is no text to score", hint="give a continuation of at least one character")
        if len(ids) > (limit := self._member.backend.max_context):
            raise ContextOverflowError(self._member.name, len(ids), limit)
        prompt = self._prompt_ids(context)
        room = limit + 1 - len(ids)  # the last token is scored, not read
        if len(prompt) > room:
            self.num_truncated += 1
        return self._scored(prompt[-room:], ids)

    def whole(self, text: str) -> float:
        """Return log P(text), in windows of full length where it is longer than one; 0 for an empty text."""
        ids = self._member.vocabulary.encode_prompt(text)
        windows = get_rolling_token_windows(ids, self._first_id(), self._member.backend.max_context, 1)
        return sum(self._scored(given[: len(given) - len(wanted) + 1], wanted)[0] for given, wanted in windows)

    def _prompt_ids(self, context: str) -> list[int]:
        prompter = self._member.prompter
        if isinstance(context, Conversation):
            return prompter.encode(tuple(map(Message.of, context.messages)))
        ids = prompter.encode(context)
        return ids or [self._first_id()]

    def _first_id(self) -> int:
        """What the first token is conditioned on: BOS, else END as lm_eval's other models do."""
        vocabulary = self._member.vocabulary
        first = next(iter(vocabulary.bos_ids), vocabulary.symbols.end_id)
        if first is None:
            raise UnsupportedModelError(f"member {self._member.name!r} has neither BOS nor END to begin a text with")
        return first

    def _scored(self, prompt: Sequence[int], ids: Sequence[int]) -> tuple[float, bool]:
        """Return the sum of log P of `ids` after `prompt`, and whether they are the greedy choice. One pass."""
        backend = self._member.backend
        row = backend.open()
        try:
            scores = backend.forward([Feed(row=row, ids=[*prompt, *ids[:-1]], keep=len(ids))])
            total = scores.log_probs(range(len(ids)), ids).sum()
            best, _ = scores.top1()
        finally:
            backend.close(row)
        return float(total), best.tolist() == list(ids)

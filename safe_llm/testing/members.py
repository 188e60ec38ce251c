"""Members without weights: real tokenizers, real engine, scripted answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from safe_llm.ensemble import Ensemble
from safe_llm.member import Member
from safe_llm.prompting import ChatTemplate, Prompter, transcript
from safe_llm.testing.backends import NextLogits, ScriptedBackend
from safe_llm.testing.tokenizers import byte_level, metaspace
from safe_llm.types import Message
from safe_llm.vocabulary import Vocabulary

__all__ = ["answering", "conversing", "scripted_ensemble", "scripted_member"]

Answers = Mapping[str, str]
"""Prompt (a plain text, or the user message of a one-turn conversation) -> what the model answers."""

Reply = Callable[[str], str]
"""From a conversation, as `safe_llm.prompting.transcript` writes it, to what the model answers."""

_SPEAKS = b"Assistant:\n"


def answering(vocabulary: Vocabulary, answers: Answers, *, peak: float = 0.9) -> NextLogits:
    """Make a model that gives known answers, token by token in its own tokenization, and then END.

    What comes next depends on the text alone, so the model follows an ensemble that writes its answer in other pieces.
    After text that is no beginning of the answer, it wants to end.

    Args:
        vocabulary: The member's vocabulary.
        answers: What it knows. A prompt that it does not know is answered with END.
        peak: Probability of the next token; the rest is spread evenly.
    """
    known = {prompt.encode(): answer.encode() for prompt, answer in answers.items()}
    known |= {transcript([Message(role="user", content=p)]).encode(): a.encode() for p, a in answers.items()}

    def rest_of(text: bytes) -> bytes:
        text = text if text.startswith(tuple(known)) else text.removeprefix(b" ")  # SentencePiece's dummy prefix
        prompt = max((p for p in known if text.startswith(p)), key=len, default=None)
        return b"" if prompt is None else _rest(known[prompt], text[len(prompt) :])

    return _saying(vocabulary, rest_of, peak)


def conversing(vocabulary: Vocabulary, reply: Reply, *, peak: float = 0.9) -> NextLogits:
    """Make a model that answers conversations by a function of their transcript, tools and results included.

    The member must have no chat template, and no message may contain a line `Assistant:` of its own.
    """

    def rest_of(text: bytes) -> bytes:
        prompt, speaks, begun = text.removeprefix(b" ").rpartition(_SPEAKS)
        return _rest(reply((prompt + speaks).decode("utf-8", errors="replace")).encode(), begun) if speaks else b""

    return _saying(vocabulary, rest_of, peak)


def _rest(answer: bytes, begun: bytes) -> bytes:
    return answer[len(begun) :] if answer.startswith(begun) else b""


def _saying(vocabulary: Vocabulary, rest_of: Callable[[bytes], bytes], peak: float) -> NextLogits:
    """Want what `rest_of` all text so far says comes next, and END after it."""

    def next_logits(ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
        rest = rest_of(b"".join(vocabulary.surface(i) for i in ids))
        end = vocabulary.symbols.end_id
        chosen = vocabulary.encode(rest).ids[0] if rest else end
        logits = np.full(vocabulary.width, np.log((1.0 - peak) / (vocabulary.width - 1)))
        logits[0 if chosen is None else chosen] = np.log(peak)
        return logits

    return next_logits


def _script(script: Answers | Reply) -> Answers | Callable[[Vocabulary], NextLogits]:
    return functools.partial(conversing, reply=script) if callable(script) else script


def scripted_member(
    name: str,
    tokenizer: Tokenizer,
    script: Answers | Callable[[Vocabulary], NextLogits],
    *,
    end_tokens: Sequence[str] = ("<|im_end|>", "</s>"),
    template: ChatTemplate | None = None,
    max_context: int = 4096,
) -> Member:
    """Build a member on a `ScriptedBackend`.

    Args:
        name: Its name.
        tokenizer: A real tokenizer, for instance from `safe_llm.testing.tokenizers`.
        script: Known answers, or a function from the vocabulary to a `NextLogits`.
        end_tokens: Spellings of END; those that the tokenizer has are used.
        template: Chat template.
        max_context: Context window, in tokens.
    """
    ends = [i for text in end_tokens if (i := tokenizer.token_to_id(text)) is not None]
    vocabulary = Vocabulary(tokenizer, end_ids=ends)
    next_logits = answering(vocabulary, script) if isinstance(script, Mapping) else script(vocabulary)
    backend = ScriptedBackend(next_logits, vocabulary.width, vocabulary.symbols, name, max_context)
    return Member(name, backend, vocabulary, prompter=Prompter(vocabulary, template))


def scripted_ensemble(drafter: Answers | Reply, verifier: Answers | Reply | None = None, **options: Any) -> Ensemble:
    """Build a two-member ensemble with different tokenizers: `drafter` (byte-level) and `verifier` (SentencePiece).

    Args:
        drafter: What the drafter answers: known answers, or a function of the conversation (see `conversing`).
        verifier: What the verifier answers; by default the same.
        **options: Fields of `EnsembleConfig`. The method is UniTE unless given: members that follow scripts are torn
            between two texts, and from there on only one of them knows what to say.
    """
    from safe_llm.config import EnsembleConfig

    members = [
        scripted_member("drafter", byte_level(), _script(drafter)),
        scripted_member("verifier", metaspace(), _script(drafter if verifier is None else verifier)),
    ]
    return Ensemble(members, EnsembleConfig(**{"method": "unite", **options}))

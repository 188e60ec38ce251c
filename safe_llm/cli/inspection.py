"""How the members of an ensemble read a text, from their tokenizers alone: what `safe-llm inspect` reports."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_llm.alignment import Alignment
from safe_llm.config import MemberConfig
from safe_llm.errors import ModelCorruptError
from safe_llm.evaluation.tokenization import Overlap, inexact_spans, overlap_of
from safe_llm.models import resolve
from safe_llm.prompting import Prompter, load_tokenizer
from safe_llm.types import Message, Prompt, check_text
from safe_llm.vocabulary import NOT_EXACT, Vocabulary

__all__ = ["Inspection", "MemberReport", "Overlap", "Reader", "Token", "Unshared", "inspect_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A member without its weights.

    Attributes:
        name: As errors and traces call it.
        licence: Of the weights, as far as known.
        max_context: Context window in tokens, or None if the configuration does not say.
        vocabulary: What its ids mean.
        prompter: How it reads prompts.
    """

    name: str
    licence: str | None
    max_context: int | None
    vocabulary: Vocabulary
    prompter: Prompter

    @classmethod
    def load(cls, config: MemberConfig, *, progress: bool) -> Reader:
        """Read the tokenizer and the configuration of a model, fetched first if need be.

        Raises:
            ModelError: The model cannot be had, or its tokenizer cannot be used.
        """
        resolved = resolve(config, progress=progress)
        files = load_tokenizer(
            resolved.path,
            canonical=resolved.source in ("demo", "gguf"),
            trust_remote_code=config.trust_remote_code,
        )
        described = _read_json(resolved.path / "config.json")
        text_config = described | (described.get("text_config") or {})
        generation = _read_json(resolved.path / "generation_config.json")
        ends = [*_as_list(generation.get("eos_token_id")), *_as_list(text_config.get("eos_token_id"))]
        vocabulary = Vocabulary(
            files.spec, width=text_config.get("vocab_size"), end_ids=[*ends, *_as_list(files.eos_id)]
        )
        limits = (config.max_context, text_config.get("max_position_embeddings"), text_config.get("n_positions"))
        return cls(
            name=config.display_name,
            licence=resolved.licence,
            max_context=min((limit for limit in limits if limit), default=None),
            vocabulary=vocabulary,
            prompter=Prompter(vocabulary, files.template, config.template_kwargs),
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError:
        raise ModelCorruptError(f"{str(path)!r} is not JSON", hint="download it again") from None
    return values


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token; `start` and `end` are byte offsets in the text, None where it does not spell the text."""

    id: int
    text: str
    start: int | None
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One member's view.

    Attributes:
        name: The member.
        role: `drafter` or `verifier`.
        kind: Of its tokenizer.
        licence: Of its weights, as far as known.
        num_tokens: Usable tokens of the vocabulary.
        width: Columns of its logits.
        max_context: Its context window, or None.
        end_tokens: Spellings of END.
        notes: Fallbacks for prompts.
        tokens: The text as it would be tokenized if it had been generated.
        inexact_spans: Byte ranges of the text that its tokens cannot spell.
        chat: The ids' spellings of the conversation, or None if none was asked for.
    """

    name: str
    role: str
    kind: str
    licence: str | None
    num_tokens: int
    width: int
    max_context: int | None
    end_tokens: tuple[str, ...]
    notes: tuple[str, ...]
    tokens: tuple[Token, ...]
    inexact_spans: tuple[tuple[int, int], ...]
    chat: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """A place where a drafter's token begins, but no token of `member`: the ensemble cannot act there.

    `outcome` is `oov-like` or `unrepresentable`, as in the events.
    """

    byte_offset: int
    member: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What `safe-llm inspect` reports.

    Attributes:
        num_bytes: Length of the text.
        members: The drafter first.
        shared_boundaries: Byte offsets that are token boundaries of every member.
        unshared: The other boundaries of the drafter, once per verifier that does not have them.
        overlaps: Of each pair of vocabularies.
    """

    num_bytes: int
    members: tuple[MemberReport, ...]
    shared_boundaries: tuple[int, ...]
    unshared: tuple[Unshared, ...]
    overlaps: tuple[Overlap, ...]


def inspect_text(text: str, readers: Sequence[Reader], conversation: Prompt | None = None) -> Inspection:
    """Compare how the members read `text`.

    Args:
        text: Anything that has a UTF-8 form.
        readers: The members, the drafter first.
        conversation: Rendered through each member's template too.

    Raises:
        PromptError: A lone surrogate in the text, or a template that refuses the conversation.
    """
    check_text(text, "the text")
    data = text.encode("utf-8")
    members = tuple(
        _member_report(reader, "verifier" if i else "drafter", data, conversation) for i, reader in enumerate(readers)
    )
    boundaries = [{0, *(token.end for token in member.tokens if token.end is not None)} for member in members]
    return Inspection(
        num_bytes=len(data),
        members=members,
        shared_boundaries=tuple(sorted(set.intersection(*boundaries))),
        unshared=tuple(_unshared(data, sorted(boundaries[0]), readers[1:])),
        overlaps=tuple(overlap_of(first, second) for first, second in itertools.combinations(readers, 2)),
    )


def _member_report(reader: Reader, role: str, data: bytes, conversation: Prompt | None) -> MemberReport:
    vocabulary = reader.vocabulary
    tokens = _tokens(vocabulary, data)
    spelling = {token_id: text for text, token_id in vocabulary.control_ids.items()}
    return MemberReport(
        name=reader.name,
        role=role,
        kind=vocabulary.kind,
        licence=reader.licence,
        num_tokens=sum(token is not None for token in vocabulary.tokens),
        width=vocabulary.width,
        max_context=reader.max_context,
        end_tokens=tuple(spelling.get(i, f"id {i}") for i in vocabulary.symbols.end_ids),
        notes=reader.prompter.notes,
        tokens=tokens,
        inexact_spans=inexact_spans(vocabulary, vocabulary.encode(data), len(data)),
        chat=None if conversation is None else _chat(reader, _messages(conversation), spelling),
    )


def _tokens(vocabulary: Vocabulary, data: bytes) -> tuple[Token, ...]:
    pieces = vocabulary.encode(data)
    tokens = []
    for token_id, end in zip(pieces.ids, pieces.ends, strict=True):
        surface = vocabulary.surface(token_id)
        is_exact = end != NOT_EXACT
        start = end - len(surface) if is_exact else None
        tokens.append(Token(id=token_id, text=readable(surface), start=start, end=end if is_exact else None))
    return tuple(tokens)


def readable(surface: bytes) -> str:
    """A token's bytes as text; bytes that are no characters on their own as `<E2>`."""
    try:
        return surface.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(b) if 0x20 <= b < 0x7F else f"<{b:02X}>" for b in surface)


def _messages(conversation: Prompt) -> list[Message]:
    return [Message.of(message) for message in conversation if not isinstance(message, str)]


def _chat(reader: Reader, conversation: Sequence[Message], spelling: dict[int, str]) -> tuple[str, ...]:
    ids = reader.prompter.encode(conversation)
    return tuple(spelling[i] if i in spelling else readable(reader.vocabulary.surface(i)) for i in ids)


def _unshared(data: bytes, boundaries: Sequence[int], verifiers: Sequence[Reader]) -> list[Unshared]:
    found = []
    for reader in verifiers:
        alignment = Alignment(reader.vocabulary)
        alignment.update(data, 0)
        found += [
            Unshared(byte_offset=offset, member=reader.name, outcome=str(alignment.why_not(offset)))
            for offset in boundaries
            if alignment.tokens_before(offset) is None
        ]
    return sorted(found, key=lambda item: item.byte_offset)

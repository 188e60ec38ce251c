"""Reading a tokenizer's own tables: the parsed content of `tokenizer.json`, whatever kind of tokenizer it is.

Nothing here encodes or decodes text; `safe_llm.vocabulary` builds on it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

__all__ = [
    "bos_ids",
    "byte_fallback_ids",
    "control_tokens",
    "has_prefix",
    "kind_of",
    "plain_tokenizer",
    "private_names",
    "surfaces",
    "texts",
    "unk_id",
    "within",
]

Spec = dict[str, Any]
"""Parsed `tokenizer.json`."""

_CONTROL_LOOKALIKE = re.compile(
    r"<\|.*\|>|<｜.*｜>|\[\|.*\|\]|<(start|end)_of_\w+>|<unused\d+>|\[/?INST\]|<</?SYS>>", re.DOTALL
)
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEXT_STAGES = ("normalizer", "pre_tokenizer")
_LOW_SPACE = "\u2581"  # SentencePiece's sign for a space


def _walk(node: Any) -> Iterable[Spec]:
    """Yield a component of a tokenizer's JSON and all components nested in it."""
    if isinstance(node, dict):
        yield node
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for child in node.get(key) or ():
                yield from _walk(child)


def kind_of(spec: Spec) -> str:
    """How surfaces are written: "byte-level", "sentencepiece", "wordpiece" or "plain"."""
    components = [*_walk(spec.get("pre_tokenizer")), *_walk(spec.get("decoder"))]
    types = {component.get("type") for component in components}
    if spec["model"]["type"] == "WordPiece":
        return "wordpiece"
    if "ByteLevel" in types:
        return "byte-level"
    replaced = any(
        c.get("type") == "Replace" and c.get("pattern") == {"String": _LOW_SPACE} for c in _walk(spec.get("decoder"))
    )
    if "Metaspace" in types or replaced or spec["model"].get("byte_fallback"):
        return "sentencepiece"
    return "plain"


def within(spec: Spec, width: int) -> Spec:
    """Return the tokenizer without the added tokens that the model has no column for: to it they are plain text."""
    return spec | {"added_tokens": [token for token in spec["added_tokens"] if token["id"] < width]}


def control_tokens(spec: Spec, end_ids: Collection[int] = ()) -> dict[str, int]:
    """Control tokens: flagged special, one of the model's ends, or spelled like one (models forget the flag)."""
    control = {
        token["content"]: token["id"]
        for token in spec.get("added_tokens") or ()
        if token.get("special") or token["id"] in end_ids or _CONTROL_LOOKALIKE.fullmatch(token["content"])
    }
    unk = _unk_token(spec)
    if unk is not None and (unknown := unk_id(spec)) is not None:
        control.setdefault(unk, unknown)
    return control


def _unk_token(spec: Spec) -> str | None:
    model = spec["model"]
    if model["type"] == "Unigram":
        return None if model.get("unk_id") is None else str(model["vocab"][model["unk_id"]][0])
    unk: str | None = model.get("unk_token")
    return unk


def unk_id(spec: Spec) -> int | None:
    """Id that stands for what the tokenizer does not know, or None."""
    model = spec["model"]
    unknown: int | None = (
        model.get("unk_id") if model["type"] == "Unigram" else model["vocab"].get(model.get("unk_token"))
    )
    return unknown


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(rest)}


def texts(spec: Spec) -> dict[int, str]:
    """id -> the tokenizer's own string for it, added tokens included."""
    vocab = spec["model"]["vocab"]
    texts = (
        {i: text for text, i in vocab.items()} if isinstance(vocab, dict) else {i: v[0] for i, v in enumerate(vocab)}
    )
    return texts | {token["id"]: token["content"] for token in spec["added_tokens"]}


def surfaces(texts: dict[int, str], spec: Spec, kind: str, width: int) -> list[bytes | None]:
    """Bytes of every id [width]; None for an id without a token or without bytes."""
    surfaces: list[bytes | None] = [None] * width
    convert = _converter(spec, kind)
    literal = {token["id"] for token in spec["added_tokens"]} if kind != "sentencepiece" else set()
    for token_id, text in texts.items():
        if token_id < width:
            # a token without bytes could never make progress
            surfaces[token_id] = (text.encode("utf-8") if token_id in literal else convert(text)) or None
    return surfaces


def byte_fallback_ids(spec: Spec) -> set[int]:
    """Ids of `<0x20>` and its like, which a model uses only for bytes that no piece covers."""
    if not spec["model"].get("byte_fallback"):
        return set()
    return {i for i, text in texts(spec).items() if _BYTE_FALLBACK.fullmatch(text)}


def _converter(spec: Spec, kind: str) -> Any:
    if kind == "byte-level":
        # as Latin-1, so that a whole token is converted in C; what is not in the alphabet must not pass as Latin-1
        to_latin = dict.fromkeys(range(0x100), "\uffff")
        to_latin |= {ord(char): chr(byte) for char, byte in _byte_level_alphabet().items()}

        def byte_level(text: str) -> bytes:
            try:
                return text.translate(to_latin).encode("latin-1")
            except UnicodeEncodeError:  # a token that is not written in the byte alphabet stands for its own text
                return text.encode("utf-8")

        return byte_level
    if kind == "sentencepiece":
        fallback = bool(spec["model"].get("byte_fallback"))

        def sentencepiece(text: str) -> bytes:
            if fallback and (match := _BYTE_FALLBACK.fullmatch(text)):
                return bytes([int(match[1], 16)])
            return text.replace(_LOW_SPACE, " ").encode("utf-8")

        return sentencepiece
    if kind == "wordpiece":
        prefix = spec["model"].get("continuing_subword_prefix", "##")

        def wordpiece(text: str) -> bytes:
            return (text.removeprefix(prefix) if text.startswith(prefix) else " " + text).encode("utf-8")

        return wordpiece
    return lambda text: text.encode("utf-8")


def bos_ids(spec: Spec) -> tuple[int, ...]:
    """What the tokenizer puts before a text. A closing token (BERT's [SEP]) is left out: the text is continued."""
    for node in _walk(spec.get("post_processor")):
        if node["type"] == "TemplateProcessing":
            leading = itertools.takewhile(lambda part: "SpecialToken" in part, node["single"])
            names = [part["SpecialToken"]["id"] for part in leading]
            return tuple(i for name in names for i in node["special_tokens"][name]["ids"])
        if node["type"] in ("BertProcessing", "RobertaProcessing"):
            return (node["cls"][1],)
    return ()


def private_names(control: Iterable[str]) -> dict[str, str]:
    """Control token's spelling -> a name that nobody can guess, to stand for it in a plain tokenizer."""
    nonce = secrets.token_hex(12)
    return {text: f"\ue000{nonce}-{i}\ue001" for i, text in enumerate(control)}


def plain_tokenizer(spec: Spec, renamed: Mapping[str, str], *, prefix: bool) -> Tokenizer:
    """A copy of the tokenizer that knows control tokens only by their private names and adds nothing.

    They keep their place and their flags, so all ids stay as they are, and so does what is cut next to them; but they
    need not stand alone, since a private name is always meant.
    """
    model = dict(spec["model"])
    if model["type"] == "Unigram":
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    else:
        if model.get("merges") and not renamed.keys().isdisjoint(model["vocab"]):
            model["merges"] = _merges_without(renamed, model["merges"])
        model["vocab"] = {renamed.get(text, text): i for text, i in model["vocab"].items()}
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
    added = [
        token | {"content": renamed[token["content"]], "single_word": False} if token["content"] in renamed else token
        for token in spec["added_tokens"]
    ]
    plain = spec | {
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    plain |= copy.deepcopy({key: spec.get(key) for key in _TEXT_STAGES})
    if not prefix:
        _strip_prefix(plain)
    return Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))


def _merges_without(tokens: Collection[str], merges: list[Any]) -> list[Any]:
    """The merges that neither use nor make one of `tokens`; older files write a merge as one string."""
    pairs = [merge.split(" ") for merge in merges] if isinstance(merges[0], str) else merges
    return [pair for pair in pairs if not (pair[0] in tokens or pair[1] in tokens or pair[0] + pair[1] in tokens)]


def has_prefix(spec: Spec) -> bool:
    """Whether the tokenizer puts a dummy space before a text."""
    return _strip_prefix(copy.deepcopy({key: spec.get(key) for key in _TEXT_STAGES}))


def _strip_prefix(spec: Spec) -> bool:
    """Remove every dummy prefix from the JSON in place; return whether there was one."""
    found = False
    for node in _walk(spec.get("pre_tokenizer")):
        if node.get("type") == "Metaspace" and node.get("prepend_scheme", "always") != "never":
            node["prepend_scheme"] = "never"
            node.pop("add_prefix_space", None)
            found = True
        elif node.get("type") == "ByteLevel" and node.get("add_prefix_space"):
            node["add_prefix_space"] = False
            found = True
    normalizer = spec.get("normalizer")
    if normalizer and normalizer.get("type") == "Prepend":
        spec["normalizer"] = None
        found = True
    for node in _walk(normalizer):
        if children := node.get("normalizers"):
            kept = [child for child in children if child.get("type") != "Prepend"]
            found |= len(kept) < len(children)
            node["normalizers"] = kept
    return found

"""Toy tokenizers of every kind the engine knows, trained in milliseconds on a few sentences.

Each function returns a fresh `tokenizers.Tokenizer`. END is `<|im_end|>` or `</s>`, as each family spells it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["CORPUS", "byte_level", "characters", "metaspace", "unigram", "wordpiece"]

CORPUS = (
    "The position is Incorrect. The answer is 42, not 1850 or 63,700.",
    "Leo has 12 apples and gives 7 of them to Mia; now he has 12 - 7 = 5 apples.",
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n",
    "She said: 'hello !' and then \"goodbye\" -- don't you think so?",
    "日本語のテキスト。你是谁？ Ünïcödé naïve café, emoji 🙂👍🏽, Thai ห้าม.",
    "In 1850 the census put 63,700 people there; correct, incorrect, ensemble, assemble, position, positions.",
) * 4


def byte_level(
    vocab_size: int = 500,
    *,
    individual_digits: bool = False,
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    corpus: Sequence[str] = CORPUS,
) -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen; no BOS."""
    tokenizer = Tokenizer(models.BPE())
    byte_split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if individual_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_split])
    else:
        tokenizer.pre_tokenizer = byte_split
    tokenizer.decoder = decoders.ByteLevel()
    _train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        corpus,
    )
    return tokenizer


def metaspace(vocab_size: int = 600, *, prepend: bool = True, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """SentencePiece-style BPE with byte fallback, as of Llama 2 and Gemma; BOS `<s>`; a dummy prefix by default."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    sign = "" if prepend else "▁"  # the normalizer puts it before each word otherwise
    words = [sign + word for line in corpus for word in line.split(" ")]
    # a fixed small alphabet (the trainer's own limit cuts ties at random), so that bytes are needed for the rest
    words = [word for word in words if all(char.isascii() or char in "▁éï" for char in word)]
    tokenizer.train_from_iterator(words, trainer)
    return _with_bos(_only_special(tokenizer, ("<unk>", "<s>", "</s>")), "<s>")


def unigram(*, nfkc: bool = True, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """SentencePiece-style Unigram, as of T5 and XLM-R: NFKC, unknown characters, no byte fallback."""
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    counts = _word_counts(line.replace(" ", " ▁") for line in corpus)
    pieces += [(piece, math.log(count / counts.total())) for piece, count in sorted(counts.items())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text, _ in pieces[:3]])
    if nfkc:
        tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece(*, corpus: Sequence[str] = CORPUS) -> Tokenizer:
    """WordPiece that lower-cases and strips accents, as of BERT: cannot represent most text exactly."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    words = sorted(_word_counts(line.lower() for line in corpus))
    pieces = [*special, *words, *(f"##{word}" for word in words if len(word) == 1)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_counts(lines: Iterable[str]) -> Counter[str]:
    """Words of letters that occur, and every character: what the trainers find varies from run to run."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
        counts.update(word for word in line.split() if word.removeprefix("▁").isalpha())
    counts.pop("\n", None)
    counts.pop(" ", None)
    return counts


def characters(words: Sequence[str], *, special: Sequence[str] = ("<|im_end|>",)) -> Tokenizer:
    """Byte-level BPE whose merges spell exactly `words`, left to right, over all single bytes.

    For tests that need to know every token. A word is one token wherever it stands.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    merges: list[tuple[str, str]] = []
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        chars = encoder.pre_tokenize_str(word)[0][0]
        for n in range(2, len(chars) + 1):
            pair = (chars[: n - 1], chars[n - 1])
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(chars[:n], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = encoder
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any, corpus: Sequence[str]) -> None:
    tokenizer.train_from_iterator(corpus, trainer)


def _only_special(tokenizer: Tokenizer, special: Sequence[str]) -> Tokenizer:
    """Byte tokens had to be declared special for training; they are ordinary tokens afterwards."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(spec))


def _with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer

"""The engine's own time: members that cost next to nothing and say a given text, so that only the engine is left."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from safe_llm.backends.base import Feed, Symbols
from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.bench.workloads import WORKLOADS, shipped_workload
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.events import GenerationFinished, RoundFinished
from safe_llm.member import Member
from safe_llm.prompting import Prompter
from safe_llm.vocabulary import Vocabulary

__all__ = ["OWN_TIME_TOKENS", "OwnTime", "Replay", "measure_own_time", "shuffled_words"]

OWN_TIME_TOKENS = 4000
_STRETCH = 400
_SPARE_WORDS = 100  # a draft looks beyond the last token that is wanted
_PROMPT = "Go on: "
_UNSURE_EVERY, _UNSURE_BYTES = 97, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTime:
    """What a round takes outside forward passes.

    Attributes:
        members: Whose vocabularies were used, the drafter first.
        num_tokens: Length of the answer.
        num_rounds: Rounds that it took.
        ensemble_rate: Ensemble points per token.
        first_s: Median seconds of a round among the first 400 tokens.
        last_s: Median seconds of a round among the last 400 tokens.
    """

    members: tuple[str, ...]
    num_tokens: int
    num_rounds: int
    ensemble_rate: float
    first_s: float
    last_s: float


class Replay:
    """A `Backend` without a model that predicts a given text.

    Around some bytes it is unsure, a verifier more than the drafter: there the ensemble acts, and confirms.
    """

    has_dense_scores = True
    cheap_tokens = 32

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        text: bytes,
        *,
        num_prompt_tokens: int,
        is_drafter: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.width, self.max_context = name, vocabulary.width, 1_000_000
        self.num_forwards, self.forward_s = 0, 0.0
        pieces = vocabulary.encode(text)
        self._ids = pieces.ids
        self._starts = [0, *pieces.ends[:-1]]
        self._lengths = [len(vocabulary.surface(i)) for i in range(vocabulary.width)]
        self._num_prompt_tokens = num_prompt_tokens
        self._unsure_logit, self._num_rivals = (0.5, 1) if is_drafter else (-3.0, 5)
        noise = np.random.default_rng(0).normal(-14.0, 1.0, self.width).astype(np.float32)
        self._background = torch.from_numpy(noise)
        self._columns = SymbolColumns.of(Symbols(end_ids=(), usable=np.ones(self.width, dtype=np.bool_)), "cpu")
        self._offsets: list[list[int]] = []  # per row: bytes of generated text after each id
        self._clock = clock

    def open(self) -> int:
        """See `Backend.open`."""
        self._offsets.append([])
        return len(self._offsets) - 1

    def close(self, row: int) -> None:
        """See `Backend.close`."""
        self._offsets[row].clear()

    def length(self, row: int) -> int:
        """See `Backend.length`."""
        return len(self._offsets[row])

    def rollback(self, row: int, length: int) -> None:
        """See `Backend.rollback`."""
        del self._offsets[row][length:]

    def share(self, row: int, source: int, length: int) -> int:
        """See `Backend.share`."""
        self._offsets[row] = self._offsets[source][:length]
        return length

    def forward(self, feeds: Sequence[Feed]) -> DenseScores:
        """See `Backend.forward`."""
        started = self._clock()
        table = self._background.repeat(sum(feed.keep for feed in feeds), 1)
        position = 0
        for feed in feeds:
            offsets = self._offsets[feed.row]
            for token_id in feed.ids:
                generated = len(offsets) >= self._num_prompt_tokens
                offsets.append((offsets[-1] + self._lengths[token_id]) if generated else 0)
            for offset in offsets[-feed.keep :]:
                self._predict(table[position], offset)
                position += 1
        self.num_forwards += 1
        self.forward_s += self._clock() - started
        return DenseScores(table, self._columns)

    def _predict(self, logits: torch.Tensor, offset: int) -> None:
        """Write into `logits` [W] what follows after `offset` bytes of the text."""
        index = min(bisect.bisect_left(self._starts, offset), len(self._ids) - 1)
        unsure = offset % _UNSURE_EVERY < _UNSURE_BYTES
        for back in range(2, 2 + self._num_rivals * unsure):
            logits[self._ids[index - back]] = -1.2
        logits[self._ids[index]] = self._unsure_logit if unsure else 2.0


def measure_own_time(
    members: Sequence[Member],
    config: EnsembleConfig,
    *,
    num_tokens: int = OWN_TIME_TOKENS,
    clock: Callable[[], float] = time.perf_counter,
) -> OwnTime:
    """Let the engine write a long answer with the members' vocabularies and prompts, but without their models.

    Args:
        members: The drafter first.
        config: How they decide.
        num_tokens: Length of the answer.
        clock: Seconds.
    """
    text = shuffled_words(num_tokens + _SPARE_WORDS).encode()
    backends = [
        Replay(
            member.name,
            member.vocabulary,
            text,
            num_prompt_tokens=len(Prompter(member.vocabulary).encode(_PROMPT)),
            is_drafter=number == 0,
            clock=clock,
        )
        for number, member in enumerate(members)
    ]
    stubs = [Member(m.name, backend, m.vocabulary) for m, backend in zip(members, backends, strict=True)]
    rounds: list[tuple[int, float]] = []
    began, in_passes = clock(), 0.0
    for event in Ensemble(stubs, config).stream(_PROMPT, events=True, detailed=False, max_tokens=num_tokens):
        if isinstance(event, RoundFinished):
            now, passed = clock(), sum(backend.forward_s for backend in backends)
            rounds.append((event.decisions[0].position if event.decisions else 0, now - began - (passed - in_passes)))
            began, in_passes = clock(), passed
        elif isinstance(event, GenerationFinished):
            result = event.result
    later = rounds[1:] or rounds  # the first one has the prompt in it
    return OwnTime(
        members=tuple(member.name for member in members),
        num_tokens=result.counters.num_tokens,
        num_rounds=result.counters.num_rounds,
        ensemble_rate=result.counters.ensemble_rate,
        first_s=median(seconds for at, seconds in later if at < max(_STRETCH, later[0][0] + 1)),
        last_s=median(seconds for at, seconds in later if at >= min(num_tokens - _STRETCH, later[-1][0])),
    )


def shuffled_words(count: int) -> str:
    """Return so many words of the shipped prompts in a fixed random order, in which no passage occurs twice."""
    words = [
        word
        for name in WORKLOADS
        for prompt in shipped_workload(name).prompts
        for message in prompt
        for word in message.content.split()
    ]
    return " ".join(np.random.default_rng(0).choice(words, size=count))

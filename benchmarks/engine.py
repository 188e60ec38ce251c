"""Small benchmark of the engine: own time per round, modes against transformers, batches.

    python benchmarks/engine.py [--quick] [--rounds N]

Contenders of one comparison run interleaved in this one process, since machines drift; figures are medians, with the
counts that do not depend on the machine beside them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from safe_llm import Ensemble, EnsembleConfig
from safe_llm.backends.base import Feed, Symbols
from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.config import preset
from safe_llm.ensemble import load_members
from safe_llm.member import Member
from safe_llm.prompting import Prompter
from safe_llm.vocabulary import Vocabulary

QUESTION = [
    {
        "role": "user",
        "content": "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all? "
        "Think step by step.",
    }
]


class Replay:
    """A backend that costs next to nothing and 'predicts' a given text: what is left is the engine's own time."""

    has_dense_scores = True

    def __init__(self, name: str, vocabulary: Vocabulary, text: bytes, prompt_tokens: int, *, is_drafter: bool) -> None:
        self.name, self.width, self.max_context = name, vocabulary.width, 1_000_000
        self.num_forwards, self.forward_s = 0, 0.0
        pieces = vocabulary.encode(text)
        self._ids = pieces.ids
        self._starts = [0, *pieces.ends[:-1]]
        self._lengths = [len(vocabulary.surface(i)) for i in range(vocabulary.width)]
        self._prompt_tokens = prompt_tokens
        # around some bytes the verifiers are unsure and the drafter alone is not: the ensemble acts, and confirms
        self._weak, self._num_rivals = (0.5, 0) if is_drafter else (-3.0, 5)
        self._background = torch.from_numpy(np.random.default_rng(0).normal(-14.0, 1.0, self.width).astype(np.float32))
        self._columns = SymbolColumns.of(Symbols(end_ids=(), usable=np.ones(self.width, dtype=bool)), "cpu")
        self._offsets: list[list[int]] = []  # per row: bytes of generated text after each id

    def open(self) -> int:
        self._offsets.append([])
        return len(self._offsets) - 1

    def close(self, row: int) -> None:
        self._offsets[row].clear()

    def length(self, row: int) -> int:
        return len(self._offsets[row])

    def rollback(self, row: int, length: int) -> None:
        del self._offsets[row][length:]

    def share(self, row: int, source: int, length: int) -> int:
        self._offsets[row] = self._offsets[source][:length]
        return length

    def forward(self, feeds: list[Feed]) -> DenseScores:
        started = time.perf_counter()
        table = self._background.repeat(sum(feed.keep for feed in feeds), 1)
        position = 0
        for feed in feeds:
            offsets = self._offsets[feed.row]
            for token_id in feed.ids:
                generated = len(offsets) >= self._prompt_tokens
                offsets.append((offsets[-1] + self._lengths[token_id]) if generated else 0)
            for offset in offsets[-feed.keep :]:
                index = min(bisect.bisect_left(self._starts, offset), len(self._ids) - 1)
                unsure = offset % 97 < 6
                for back in range(2, 2 + self._num_rivals * unsure):
                    table[position, self._ids[index - back]] = -1.2
                table[position, self._ids[index]] = self._weak if unsure else 2.0
                position += 1
        self.num_forwards += 1
        self.forward_s += time.perf_counter() - started
        return DenseScores(table, self._columns)


def own_time(members: list[Member], num_tokens: int) -> dict[str, object]:
    """Milliseconds of a round outside forward passes, at the start and at the end of a long answer."""
    text = (Path(__file__).read_bytes() * 40)[: num_tokens * 6]
    stubs = []
    for number, member in enumerate(members):
        prompt_tokens = len(member.prompter.encode("Go on: "))
        backend = Replay(member.name, member.vocabulary, text, prompt_tokens, is_drafter=number == 0)
        stubs.append(Member(member.name, backend, member.vocabulary, prompter=Prompter(member.vocabulary)))
    ensemble = Ensemble(stubs, EnsembleConfig())
    engine = ensemble._engine
    rounds: list[tuple[int, float]] = []
    run_round = engine.round

    def timed(rows: list) -> None:
        before, started = sum(s.backend.forward_s for s in stubs), time.perf_counter()
        length = len(rows[0].ids)
        run_round(rows)
        rounds.append((length, time.perf_counter() - started - (sum(s.backend.forward_s for s in stubs) - before)))

    engine.round = timed
    result = ensemble.generate("Go on: ", max_tokens=num_tokens)
    early = [s * 1e3 for at, s in rounds if at < 400]
    late = [s * 1e3 for at, s in rounds if at >= num_tokens - 400]
    return {
        "members": [m.name for m in members],
        "tokens": result.counters.num_tokens,
        "rounds": result.counters.num_rounds,
        "ensemble_rate": round(result.counters.ensemble_rate, 3),
        "own_ms_per_round_first_400_tokens": round(statistics.median(early), 3),
        "own_ms_per_round_last_400_tokens": round(statistics.median(late), 3),
    }


def interleaved(contenders: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contender, `rounds` times, taking turns; one warm-up each."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            tokens = run()
            if number:
                speeds[name].append(tokens / (time.perf_counter() - started))
    return speeds


def hf_generate(member: Member, max_tokens: int) -> Callable[[], int]:
    ids = torch.tensor([member.prompter.encode(QUESTION_MESSAGES)])
    model = member.backend._model

    def run() -> int:
        with plain_attention(model), torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                pad_token_id=0,
            )
        return out.shape[1] - ids.shape[1]

    return run


@contextlib.contextmanager
def plain_attention(model: transformers.PreTrainedModel):
    """transformers' own SDPA while its `generate` runs: the backend exchanges it."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    kept = [(config, config._attn_implementation) for config in configs]
    for config, _ in kept:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        for config, implementation in kept:
            config._attn_implementation = implementation


def medians(speeds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 2) for name, values in speeds.items()}


def ratio(speeds: dict[str, list[float]], one: str, other: str) -> float:
    return round(statistics.median(a / b for a, b in zip(speeds[one], speeds[other], strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: does it run at all")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    options = parser.parse_args()
    tokens, long = (16, 600) if options.quick else (64, 4000)
    demo, demo3 = preset("demo").members, preset("demo3").members
    members = load_members(demo3)
    report: dict[str, object] = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(members[0].backend._model.dtype),
    }
    report["own_time"] = [own_time(members[:2], long), own_time(members, long)]
    print(json.dumps(report["own_time"], indent=1), flush=True)

    global QUESTION_MESSAGES
    from safe_llm.types import Message

    QUESTION_MESSAGES = [Message.of(message) for message in QUESTION]

    def run(rows: int, count: int, **config: object) -> Callable[[], int]:
        ensemble = Ensemble(members[:count], EnsembleConfig(**config))

        def generate() -> int:
            results = ensemble.generate([QUESTION] * rows, max_tokens=tokens, min_tokens=tokens)
            counts[f"{config} rows={rows} members={count}"] = {
                "rounds_per_token": round(results[0].counters.num_rounds / tokens, 3),
                "draft_steps_per_token": round(results[0].counters.num_draft_tokens / tokens, 3),
                "ensemble_rate": round(results[0].counters.ensemble_rate, 3),
            }
            return sum(result.usage.completion_tokens for result in results)

        return generate

    counts: dict[str, object] = {}
    modes = interleaved(
        {
            "transformers generate (drafter)": hf_generate(members[0], tokens),
            "drafter": run(1, 2, mode="drafter"),
            "safe, 2 members": run(1, 2, mode="safe"),
            "safe, 3 members": run(1, 3, mode="safe"),
            "every-token, 2 members": run(1, 2, mode="every-token"),
            "every-token, 3 members": run(1, 3, mode="every-token"),
        },
        options.rounds,
    )
    report["tokens_per_s"] = medians(modes)
    report["ratios"] = {
        "drafter / transformers generate": ratio(modes, "drafter", "transformers generate (drafter)"),
        "safe 2 / drafter": ratio(modes, "safe, 2 members", "drafter"),
        "safe 3 / drafter": ratio(modes, "safe, 3 members", "drafter"),
        "safe 2 / every-token 2": ratio(modes, "safe, 2 members", "every-token, 2 members"),
        "safe 3 / every-token 3": ratio(modes, "safe, 3 members", "every-token, 3 members"),
    }
    print(json.dumps({"tokens_per_s": report["tokens_per_s"], "ratios": report["ratios"]}, indent=1), flush=True)

    batches = interleaved(
        {f"{rows} rows": run(rows, 2, mode="safe") for rows in (1, 4, 16)}, max(2, options.rounds // 2)
    )
    report["batch_tokens_per_s"] = medians(batches)
    report["batch_16_over_1"] = ratio(batches, "16 rows", "1 rows")
    report["counts"] = counts
    report["presets"] = {"demo": [m.model for m in demo], "demo3": [m.model for m in demo3]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()

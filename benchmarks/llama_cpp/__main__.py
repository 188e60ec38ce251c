"""Speed of the demo ensemble on llama.cpp against transformers, in interleaved trials of one process.

    python benchmarks/llama_cpp --prompts 8 --max-tokens 64

Also prints what a pass over 1 to 16 tokens costs on either backend, behind a prompt of 256 tokens. Needs idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from safe_llm.backends.base import Feed
from safe_llm.bench.engine_contender import EngineContender
from safe_llm.bench.running import race
from safe_llm.bench.trials import PeakMemory, Trial
from safe_llm.bench.workloads import chosen_prompts, shipped_workload
from safe_llm.config import EnsembleSpec, preset
from safe_llm.ensemble import load_members
from safe_llm.member import Member

PASS_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def load(spec: EnsembleSpec, threads: int, dtype: str | None) -> list[Member]:
    options = {"num_threads": threads} if spec.drafter.backend == "llama-cpp" else {"dtype": dtype}
    return list(load_members([member.model_copy(update=options) for member in spec.members], progress=True))


def pass_seconds(member: Member, size: int, repeats: int) -> float:
    """Return the median time of a pass over `size` tokens, with scores after each of them."""
    backend, row, times = member.backend, member.backend.open(), []
    ids = [100 + number % 900 for number in range(256 + size)]
    backend.forward([Feed(row=row, ids=ids[:256])])
    for _ in range(repeats):
        started = time.perf_counter()
        backend.forward([Feed(row=row, ids=ids[256:], keep=size)]).top1()
        times.append(time.perf_counter() - started)
        backend.rollback(row, 256)
    backend.close(row)
    return statistics.median(times)


def tokens_per_s(trials: list[Trial]) -> float:
    return statistics.median(trial.run.tokens_per_s for trial in trials)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both backends")
    options.add_argument("--dtype", default="bfloat16", help="of the transformers members")
    options.add_argument("--workload", default="maths")
    options.add_argument("--repeats", type=int, default=20, help="passes of each size")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    members = {
        "transformers": load(preset("demo"), given.threads, given.dtype),
        "llama-cpp": load(preset("demo-gguf"), given.threads, None),
    }
    print(f"{given.threads} threads; seconds per pass after 256 tokens\ntokens", *PASS_TOKENS, sep="\t")
    for name, group in members.items():
        for member in group:
            costs = [f"{pass_seconds(member, size, given.repeats):.4f}" for size in PASS_TOKENS]
            print(f"{member.name} on {name}", *costs, sep="\t")
    config = preset("demo").ensemble
    contenders = [EngineContender(name, group, config) for name, group in members.items()]
    prompts = chosen_prompts(shipped_workload(given.workload), given.prompts, seed=0)
    memory = PeakMemory(["cpu"])
    done = race(given.workload, contenders, prompts, max_tokens=given.max_tokens, memory=memory)
    rates = {}
    for contender in contenders:
        trials = [trial for trial in done.trials if trial.contender == contender.name]
        rates[contender.name] = tokens_per_s(trials)
        forwards = [sum(trial.run.counts.num_forwards.values()) for trial in trials]
        tokens = sum(trial.run.num_tokens for trial in trials)
        print(f"{contender.name}: {rates[contender.name]:.1f} tokens/s, {sum(forwards)} passes, {tokens} tokens")
    print(f"llama.cpp / transformers: {rates['llama-cpp'] / rates['transformers']:.2f}")


if __name__ == "__main__":
    main()

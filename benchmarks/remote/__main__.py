"""Seconds and computed ids of a verification call against the length of the text in front of it.

python benchmarks/remote --backend vllm --url http://127.0.0.1:8001 --model FOLDER --served-model NAME
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from safe_llm.backends.base import Feed
from safe_llm.config import MemberConfig, ServerConfig
from safe_llm.member import Member

LENGTHS = (64, 128, 256, 512, 1024, 2048)
DRAFTED = 5


def main() -> None:
    """Measure, and write one line of JSON per length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="demo name, folder or hub id of the tokenizer")
    parser.add_argument("--served-model", required=True)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    server = ServerConfig(url=options.url, model=options.served_model, top_k=options.top_k, timeout_s=300)
    member = Member.load(MemberConfig(model=options.model, backend=options.backend, server=server))
    words = member.vocabulary.encode(b"One two three, and then the next sentence follows. " * 1000).ids
    for length in LENGTHS:
        if length + options.calls * DRAFTED < member.backend.max_context:
            print(json.dumps(measured(member, words, length, options.calls)), flush=True)


def measured(member: Member, words: list[int], length: int, calls: int) -> dict[str, float]:
    """Return the medians over some calls, each of which brings a draft that is accepted."""
    backend = member.backend
    row = backend.open()
    backend.forward([Feed(row=row, ids=words[:length])]).top1()
    seconds, computed = [], []
    for start in range(length, length + calls * DRAFTED, DRAFTED):
        before, started = backend.num_computed, time.perf_counter()
        backend.forward([Feed(row=row, ids=words[start : start + DRAFTED], keep=DRAFTED)]).top1()
        seconds.append(time.perf_counter() - started)
        computed.append(backend.num_computed - before)
    backend.close(row)
    return {
        "text": length,
        "median_s": round(statistics.median(seconds), 4),
        "median_computed": statistics.median(computed),
        "max_computed": max(computed),
    }


if __name__ == "__main__":
    main()

"""The other side of `math_process`: reads pairs of answers, one JSON list a line, and says true or false for each."""

from __future__ import annotations

import json
import logging
import sys

__all__ = ["main", "same"]

MEMORY_LIMIT_BYTES = 4 * 2**30


def main() -> None:
    """Answer until the input ends."""
    _limit_memory()
    logging.disable(logging.CRITICAL)  # math-verify warns at each comparison that its own time limit is off
    import math_verify  # noqa: F401 - so that the first comparison has all its time

    print("ready", flush=True)
    for line in sys.stdin:
        answer, gold = json.loads(line)
        print("true" if same(answer, gold) else "false", flush=True)


def same(answer: str, gold: str) -> bool:
    """Say whether math-verify reads both and finds them equal."""
    from math_verify import parse, verify

    golden, ours = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    return bool(golden and ours and verify(golden, ours, timeout_seconds=None))


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere the limit is not kept, or not to be had
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    main()

"""Answer the held-out problems with every contender, one seed at a time, and keep what was right."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import Problem, prompt
from grid import Contender
from safe_llm import Ensemble
from safe_llm.config import MemberConfig
from safe_llm.events import Result
from safe_llm.member import Member

ANSWER = re.compile(r"The answer is (-?\d+)\.")
MAX_TOKENS = 200  # the longest worked answer is 100 tokens of the member that cuts finest


def load(folder: Path, names: Sequence[str]) -> dict[str, Member]:
    """Load one seed's members, in float32."""
    return {
        name: Member.load(MemberConfig(model=str(folder / name), name=name, dtype="float32", device="cpu"))
        for name in names
    }


def answer(contender: Contender, members: dict[str, Member], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return one contender's results on all problems."""
    chosen = [members[name] for name in contender.members]
    began = time.perf_counter()
    with Ensemble(chosen, contender.config(), method=contender.method()) as ensemble:
        results = ensemble.generate([prompt(p.question) for p in problems], max_tokens=MAX_TOKENS)
    return _summary(results, problems) | {"seconds": round(time.perf_counter() - began, 1)}


def _summary(results: Sequence[Result], problems: Sequence[Problem]) -> dict[str, Any]:
    right = [is_right(result.text, p) for result, p in zip(results, problems, strict=True)]
    outcomes: Counter[str] = Counter()
    for result in results:
        outcomes.update({str(outcome): count for outcome, count in result.counters.outcomes.items()})
    return {
        "right": "".join("01"[r] for r in right),
        "cut_off": sum(result.finish_reason == "length" for result in results),
        "tokens": sum(result.counters.num_tokens for result in results),
        "rounds": sum(result.counters.num_rounds for result in results),
        "ensembled": sum(result.counters.num_ensembled for result in results),
        "replaced": sum(result.counters.num_replaced for result in results),
        "outcomes": dict(outcomes),
    }


def is_right(text: str, problem: Problem) -> bool:
    """Whether the last number that is named as the answer is the right one."""
    found = ANSWER.findall(text)
    return bool(found) and int(found[-1]) == problem.answer


def keep(file: Path, key: str, result: dict[str, Any]) -> None:
    """Add one contender's results to a seed's file."""
    known = json.loads(file.read_text("utf-8")) if file.exists() else {}
    known[key] = result
    file.write_text(json.dumps(known, indent=1), encoding="utf-8")

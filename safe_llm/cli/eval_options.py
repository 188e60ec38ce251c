"""The flags of `safe-llm eval`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

from safe_llm.cli.options import _flag

__all__ = ["EvaluationFlags"]

_evaluation = functools.partial(_flag, panel="Evaluation")
_ensemble = functools.partial(_flag, panel="Ensemble")
_paper = functools.partial(_flag, panel="The paper's table")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFlags:
    """What is evaluated, how, and where the results go."""

    data: Annotated[
        str | None,
        _evaluation("Folder with the tasks' files, or one JSONL file.", default="$SAFE_LLM_EVAL_DATA", metavar="PATH"),
    ] = None
    runs: Annotated[
        str | None,
        _evaluation(
            "Who answers: these, these with a method (safe:gac), or members' names, with commas.",
            default="drafter,verifiers,every-token,safe",
            metavar="RUN,...",
        ),
    ] = None
    limit: Annotated[int | None, _evaluation("Only the first N items of each task.", metavar="N")] = None
    output: Annotated[
        str | None,
        _evaluation(
            "Folder for answers and results; the same command goes on there after an interruption.",
            default="safe-llm-eval",
            metavar="DIR",
        ),
    ] = None
    max_tokens: Annotated[int | None, _evaluation("Most tokens per answer.", default="the task's")] = None
    batch_size: Annotated[int | None, _evaluation("Most answers decoded at once.", default=16)] = None
    seed: Annotated[int | None, _evaluation("Of the intervals, and of sampling where --config asks for it.")] = None
    quiet: Annotated[bool, _evaluation("No progress on stderr.", "--quiet", "-q")] = False
    method: Annotated[
        str | None, _ensemble("How distributions are merged.", default="auto", metavar="auto|unite|gac|prefix-mass")
    ] = None
    lookahead: Annotated[
        str | None, _ensemble("Tokens drafted per round.", default="adaptive", metavar="N|adaptive")
    ] = None
    sharpening: Annotated[
        str | None,
        _ensemble("Where no candidate reaches 1/2.", default="prefix", metavar="prefix|geometric|none"),
    ] = None
    weights: Annotated[
        list[str] | None,
        _ensemble("One per member, drafter first: 2,1,1 or repeated.", default="equal", metavar="W,W,..."),
    ] = None
    dry_run: Annotated[
        bool, _paper("Of `eval paper`: only say what would be downloaded, and what memory it takes.", "--dry-run")
    ] = False
    pairs: Annotated[
        str | None,
        _paper("Of `eval paper`: which ensembles, with commas.", default="I+Q,Q+E,I+Q+E", metavar="PAIR,..."),
    ] = None

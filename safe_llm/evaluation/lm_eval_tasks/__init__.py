"""Task files for lm-evaluation-harness: `--include_path` of this folder makes `safe_gsm8k` and the others known to it.

The harness asks the questions and counts; prompts and scores are those of `safe_llm.evaluation.tasks`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER"]

FOLDER = Path(__file__).parent
"""What `--include_path`, or `TaskManager(include_path=...)`, is given."""

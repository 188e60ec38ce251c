"""`python -m safe_llm.evaluation`: lm-evaluation-harness's own command line, which knows `safe-llm` and our tasks.

lm_eval finds models by name only after somebody has registered them, so it has to be started from here:

    python -m safe_llm.evaluation --model safe-llm --model_args preset=demo --tasks safe_gsm8k --apply_chat_template
"""

from __future__ import annotations

import sys

from safe_llm.errors import SafeLLMError
from safe_llm.evaluation.lm_eval_tasks import FOLDER
from safe_llm.evaluation.questions import require_extra

__all__ = ["main"]


def main() -> None:
    """Run lm_eval on this process's arguments; our own errors end it with one line on stderr."""
    try:
        require_extra()
        from lm_eval._cli import HarnessCLI
        from lm_eval.utils import setup_logging

        import safe_llm.evaluation.harness  # noqa: F401 - registers the model

        setup_logging()
        command = HarnessCLI()
        args = command.parse_args()
        if hasattr(args, "include_path"):
            args.include_path = [*([args.include_path] if args.include_path else []), str(FOLDER)]
        command.execute(args)
    except SafeLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

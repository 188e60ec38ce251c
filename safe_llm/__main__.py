"""`python -m safe_llm` is `safe-llm`."""

from __future__ import annotations

import sys

from safe_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())

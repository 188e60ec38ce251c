"""Reports: what traces say, for people. On the terminal, or as one HTML file that needs nothing else."""

from __future__ import annotations

from safe_llm.report.html import render_html
from safe_llm.report.terminal import print_report

__all__ = ["print_report", "render_html"]

"""Traces: what an ensemble did, line by line in a file, and back.

    with TraceWriter("answer.jsonl", ensemble) as trace:
        result = trace.generate("What is the capital of France?", max_tokens=48)
    [request] = read_trace("answer.jsonl").requests

docs/evidence.md has the schema. Nothing here imports torch.
"""

from __future__ import annotations

from safe_llm.trace.lines import SCHEMA_VERSION
from safe_llm.trace.reader import read_trace
from safe_llm.trace.values import PromptRecord, Trace, TracedMember, TracedRequest, TraceHeader, merge_traces
from safe_llm.trace.writer import TraceWriter, write_trace

__all__ = [
    "SCHEMA_VERSION",
    "PromptRecord",
    "Trace",
    "TraceHeader",
    "TraceWriter",
    "TracedMember",
    "TracedRequest",
    "merge_traces",
    "read_trace",
    "write_trace",
]

"""For the tests of traces and reports: ensembles that disagree now and then, without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.events import Candidate, Counters, Decision, EnsemblePoint, Outcome, Result, RoundFinished, Timings
from safe_llm.testing.members import scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace, unigram
from safe_llm.trace import (
    PromptRecord,
    Trace,
    TracedMember,
    TracedRequest,
    TraceHeader,
    TraceWriter,
    read_trace,
)
from safe_llm.types import FinishDetail, FinishReason, Message, Usage
from safe_llm.vocabulary import Vocabulary

QUESTION = "Leo has apples and gives 7 of them; don't you think so?"
STORY = (
    "Leo has 12 apples and gives 7 of them to Mia; now he has 12 - 7 = 5 apples.\n"
    "In 1850 the census put 63,700 people there, don't you think so? The answer is 5.\n\n"
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n\n"
    "日本語のテキスト, a naïve café and an emoji 🙂. The position is correct."
)
_WRONG = STORY.replace("gives 7", "gives 8").replace("answer", "position")
OTHER = _WRONG.replace("the census", "they").replace("= 0", "= 1")
THIRD = _WRONG.replace("there", "here").replace("naïve ", "")
NAMES = ("qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct", "gemma-3-270m")


def storyteller(story: str, name: str) -> Callable[[Vocabulary], Callable[[tuple[int, ...]], np.ndarray]]:
    """A model that goes on with its story wherever the text stands in it, more and less sure of itself."""

    def script(vocabulary: Vocabulary) -> Callable[[tuple[int, ...]], np.ndarray]:
        whole = story.encode()

        def next_logits(ids: tuple[int, ...]) -> np.ndarray:
            text = b"".join(map(vocabulary.surface, ids)).partition(QUESTION.encode())[2]
            rest = _rest(whole, text.removeprefix(b"\n"))
            draw = np.random.default_rng(list(hashlib.sha256(name.encode() + text[-12:]).digest()))
            logits = draw.normal(0.0, 1.0, vocabulary.width)
            chosen = vocabulary.encode(rest).ids[0] if rest else vocabulary.symbols.end_id
            logits[chosen] = logits.max() + draw.uniform(3.0, 10.0)
            return logits

        return next_logits

    return script


def _rest(story: bytes, text: bytes) -> bytes:
    """What follows in the story after the longest end of the text that occurs in it, near where the text ends."""
    for length in range(min(12, len(text)), 0, -1):
        low = max(0, len(text) - 40)
        at = story.find(text[-length:], low, len(text) + 40)
        if at >= 0:
            return story[at + length :]
    return story[len(text) :]


def storytellers(
    *, stories: Sequence[str] = (STORY, OTHER, THIRD), names: Sequence[str] = NAMES, **options
) -> Ensemble:
    """An ensemble of members with tokenizers of three kinds: its answers have every common outcome."""
    tokenizers = (byte_level(), metaspace(prepend=False), unigram())
    members = [
        scripted_member(name, tokenizer, storyteller(story, name))
        for name, tokenizer, story in zip(names, tokenizers, (STORY, OTHER, THIRD), strict=False)
    ]
    return Ensemble(members, EnsembleConfig(**{"method": "unite", **options}))


def traced(path: Path, ensemble: Ensemble | None = None, *, include_prompt: bool = False, **params) -> Trace:
    """Write the trace of one answer and read it back."""
    with TraceWriter(path, ensemble or storytellers(), include_prompt=include_prompt) as trace:
        trace.generate(QUESTION, **params)
    return read_trace(path)


# ---------------------------------------------------------------------- traces that no ensemble wrote


def synthetic(text: str, *, outcomes: Sequence[Outcome] = tuple(Outcome), error: bool = False) -> Trace:
    """A trace with every outcome in which every string that a file can hold is `text`."""
    token = text.encode("utf-8", errors="surrogateescape")
    plain = token.decode("utf-8", errors="replace")
    names = [f"{text}{i}" for i in range(3)]
    given = dict.fromkeys(names, 0.25)
    events, at = [], 0
    for position, outcome in enumerate(outcomes):
        decision = Decision(
            position=position,
            byte_offset=at,
            token=token,
            outcome=outcome,
            probabilities=given,
            tops=dict.fromkeys(names, ((token, 0.5), (b"", 0.25))),
        )
        if outcome.is_ensembled:
            candidate = Candidate(token=token, probability=0.5, probabilities=given)
            events.append(
                EnsemblePoint(
                    index=0,
                    position=position,
                    byte_offset=at,
                    drafted=token if outcome is Outcome.CONFIRMED else b"?",
                    chosen=token,
                    reason=text,
                    probabilities=given,
                    candidates=(candidate, candidate),
                )
            )
        events.append(
            RoundFinished(index=0, decisions=(decision,), num_draft_tokens=5, committed=token, timings=Timings())
        )
        at += len(token)
    ends = tuple(range(len(token), at + 1, len(token)))
    request = TracedRequest(
        started=text,
        prompt=PromptRecord(kind=text, num_tokens=1, sha256=text, content=(Message(role="user", content=plain),)),
        sampling={text: text},
        events=tuple(events),
        result=None if error else _result(text, events),
        tokenizations={} if error else dict.fromkeys(names, ends),
        error=text if error else None,
    )
    header = TraceHeader(
        created=text,
        versions={text: text},
        members=tuple(
            TracedMember(
                name=name,
                fingerprint=text,
                vocabulary=text,
                num_tokens=1,
                max_context=1,
                weight=0.5,
                licence=text,
                dtype=text,
                device=text,
            )
            for name in names
        ),
        config={"mode": text, "method": text, text: text},
        method=text,
        sampling={text: text},
        fingerprint=text,
    )
    return Trace(header=header, requests=(request,))


def _result(text: str, events: Sequence[RoundFinished | EnsemblePoint]) -> Result:
    points = tuple(event for event in events if isinstance(event, EnsemblePoint))
    answer = b"".join(event.committed for event in events if isinstance(event, RoundFinished))
    return Result(
        text=answer.decode("utf-8", errors="replace"),
        finish_reason=FinishReason.STOP,
        finish_detail=FinishDetail.END,
        usage=Usage(prompt_tokens=1, completion_tokens=10),
        points=points,
        counters=Counters(
            num_rounds=10,
            num_draft_tokens=50,
            num_accepted_tokens=9,
            num_tokens=10,
            num_ensembled=len(points),
            num_replaced=1,
            outcomes={text: 1},
            num_forwards={text: 3},
        ),
        timings=Timings(draft_s=0.25, total_s=1.0, ttft_s=0.5, num_tokens=10),
    )


HOSTILE = (
    "<script>window.__xss=1</script>",
    "</script><script>window.__xss=1</script>",
    "</style><img src=x onerror=window.__xss=1>",
    '" onmouseover="window.__xss=1" x="',
    "' onfocus='window.__xss=1' autofocus='",
    "`${window.__xss=1}`{{7*7}}{% raw %}",
    "javascript:window.__xss=1",
    "<!--<script>",
    "]]><svg/onload=window.__xss=1>",
    "&lt;b&gt;&quot;&#39;&amp;",
    "<iframe srcdoc='<script>parent.__xss=1</script>'>",
    "\u202ereversed\u2066isolated\u200f",
    "a\x00b\x1b[31mred\x07\x9b2J\r\n\tx",
    "line\u2028separator\u2029paragraph\\u003c",
    "W" * 300,
    "\udcff\udcfe",
)
"""Texts that would do something if a page or a terminal obeyed them. The last one is bytes that are no UTF-8."""

"""A verifier fails in the middle of an answer: the answer fails, or goes on without it and says so."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from rich.console import Console

from helpers import QUESTION, ensemble, tiny_member
from safe_llm.config import EnsembleConfig
from safe_llm.engine import Engine
from safe_llm.errors import ConfigError, MemberError
from safe_llm.record import safe_record
from safe_llm.report.terminal import print_report
from safe_llm.row import Row
from safe_llm.testing.tokenizers import byte_level, metaspace, unigram
from safe_llm.trace import TraceWriter, read_trace
from safe_llm.types import GenerationRequest, SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Dying:
    """A backend whose passes fail from one of them on, at once or (like a server's) when its scores are read."""

    def __init__(self, backend, healthy_passes, *, late=False, nan=False):
        self._backend = backend
        self.healthy_passes = healthy_passes
        self.attempts = 0
        self._late = late
        self._nan = nan

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def forward(self, feeds):
        self.attempts += 1
        if self.attempts <= self.healthy_passes:
            return self._backend.forward(feeds)
        if self._nan:
            return NotFinite(self._backend.forward(feeds))
        if self._late:
            return Unreadable(self._backend.forward(feeds), self.name)
        raise MemberError(self.name, "the server is gone")


class Unreadable:
    def __init__(self, scores, name):
        self._scores = scores
        self._name = name

    def __getattr__(self, name):
        return getattr(self._scores, name)

    def top1(self):
        raise MemberError(self._name, "no answer within 60 s")


class NotFinite(Unreadable):
    def __init__(self, scores):
        super().__init__(scores, "")

    def top1(self):
        best, finite = self._scores.top1()
        return best, np.zeros_like(finite)


def three(tokenizers=(byte_level, metaspace, unigram), **dying):
    """Members d, v and w; those named get a backend that fails."""
    made = [
        tiny_member(name, make(), seed=seed) for seed, (name, make) in enumerate(zip("dvw", tokenizers, strict=True), 1)
    ]
    for member in made:
        if member.name in dying:
            passes, options = dying[member.name]
            member.backend = Dying(member.backend, passes, **options)
    return made


def lenient(members, **options):
    return ensemble(*members, on_verifier_failure="continue", **options)


KINDS = pytest.mark.parametrize("kind", [{}, {"late": True}, {"nan": True}], ids=["at once", "late", "not finite"])


@KINDS
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_by_default_the_answer_fails_and_the_next_one_works(passes, kind):
    members = three(w=(passes, kind))
    safe = ensemble(*members)
    with pytest.raises(MemberError, match="member 'w'"):
        safe.generate(QUESTION, max_tokens=30)
    assert [member.num_sessions for member in members] == [0, 0, 0]
    members[2].backend.healthy_passes = 10**6
    assert safe.generate(QUESTION, max_tokens=30).text == ensemble(*three()).generate(QUESTION, max_tokens=30).text


@KINDS
@pytest.mark.parametrize("options", [{}, {"mode": "every-token"}, {"run_ahead": True}, {"method": "prefix-mass"}])
def test_lost_before_the_first_token_equals_an_ensemble_without_it(kind, options):
    weights, alike = (0.5, 0.3, 0.2), (byte_level, metaspace, metaspace)  # the boundary check has come before
    expected = ensemble(*three(alike)[:2], weights=weights[:2], **options).generate(QUESTION, max_tokens=40)
    passes = 0 if not kind else 1  # a prompt's scores are read by nobody
    members = three(alike, w=(passes, kind))
    result = lenient(members, weights=weights, **options).generate(QUESTION, max_tokens=40)
    assert result.text == expected.text
    assert result.points == expected.points  # the weights of the others are scaled
    assert [(lost.member, lost.position) for lost in result.lost] == [("w", 0)]
    assert not expected.lost


@KINDS
def test_lost_in_the_middle_it_has_no_say_from_there_on(kind, caplog):
    whole = ensemble(*three()).generate(QUESTION, max_tokens=40)
    members = three(w=(4, kind))
    with caplog.at_level(logging.WARNING, "safe_llm"):
        result = lenient(members).generate(QUESTION, max_tokens=40)
    [lost] = result.lost
    assert 0 < lost.position < 40
    assert [record.getMessage() for record in caplog.records] == [
        f"going on without a verifier in 1 answers: {lost.reason}"
    ]
    assert "member 'w'" in lost.reason
    voted = [set(point.probabilities) for point in result.points]
    assert voted == [{"d", "v", "w"} if point.position < lost.position else {"d", "v"} for point in result.points]
    assert {frozenset(names) for names in voted} == {frozenset("dvw"), frozenset("dv")}
    agreed = [p for p in whole.points if p.position < lost.position]
    assert list(result.points[: len(agreed)]) == agreed
    assert [member.num_sessions for member in members] == [0, 0, 0]
    assert result.usage.completion_tokens == 40


def test_without_any_verifier_left_the_drafter_finishes():
    members = three(v=(2, {}), w=(3, {"late": True}))
    result = lenient(members).generate(QUESTION, max_tokens=40)
    assert [lost.member for lost in result.lost] == ["v", "w"]
    last = result.lost[-1].position
    assert result.counters.outcomes["drafted"] >= 40 - last - 5  # what its last round left undecided is drafted, too
    assert result.usage.completion_tokens == 40


def test_sampling_and_grammars_go_on_too():
    members = three(w=(2, {"late": True}))
    sampled = lenient(members).generate(QUESTION, max_tokens=30, temperature=0.7, seed=3)
    assert [lost.member for lost in sampled.lost] == ["w"]
    members = three(w=(1, {}))
    schemed = lenient(members).generate(QUESTION, max_tokens=60, json_schema=SCHEMA)
    assert [lost.member for lost in schemed.lost] == ["w"]
    assert schemed.text.startswith("{")


def test_rows_of_a_batch_lose_it_together_and_nan_in_its_row_alone():
    prompts = [QUESTION, "Leo", "apples and pears"]
    results = lenient(three(w=(6, {}))).generate(prompts, max_tokens=30)
    assert [[lost.member for lost in result.lost] for result in results] == [["w"]] * 3
    members = three(w=(3, {}))
    members[2].backend.forward = poison_row(members[2].backend, number=1)
    results = lenient(members).generate(prompts, max_tokens=30)
    assert [[lost.member for lost in result.lost] for result in results] == [[], ["w"], []]
    assert "NaN" in results[1].lost[0].reason


def poison_row(dying, number):
    """From the second round on, the scores of one row are not finite."""
    backend, seen = dying._backend, []

    class Poisoned(Unreadable):
        def __init__(self, scores, feeds):
            super().__init__(scores, "")
            self._feeds = feeds

        def top1(self):
            best, finite = self._scores.top1()
            at = 0
            for feed in self._feeds:
                if feed.row == seen[number]:
                    finite = finite.copy()
                    finite[at : at + feed.keep] = False
                at += feed.keep
            return best, finite

    def forward(feeds):
        seen.extend(feed.row for feed in feeds if feed.row not in seen)
        return Poisoned(backend.forward(feeds), feeds)

    return forward


def test_further_requests_do_without_it_for_half_a_minute():
    members = three(w=(4, {}))
    now = [0.0]
    engine = Engine(
        members, EnsembleConfig(method="unite", lookahead=5, on_verifier_failure="continue"), clock=lambda: now[0]
    )

    def answer():
        row = Row(request=GenerationRequest.of(QUESTION, SamplingParams(max_tokens=20)), index=0, submitted_s=0.0)
        engine.join(row)
        while not row.is_done:
            engine.round([row])
        engine.leave(row)
        return row.events[-1].result

    assert [lost.position > 0 for lost in answer().lost] == [True]
    attempts = members[2].backend.attempts
    now[0] = 29.0
    [lost] = answer().lost
    assert (lost.member, lost.position) == ("w", 0)
    assert "the server is gone" in lost.reason
    assert members[2].backend.attempts == attempts  # it was not asked
    members[2].backend.healthy_passes = 10**6
    now[0] = 31.0
    assert answer().lost == ()


def test_a_drafter_that_fails_is_never_done_without():
    with pytest.raises(MemberError, match="member 'd'"):
        lenient(three(d=(3, {}))).generate(QUESTION, max_tokens=20)


def test_the_record_names_what_was_lost():
    result = lenient(three(w=(4, {}))).generate(QUESTION, max_tokens=30)
    record = safe_record(result, members=["d", "v", "w"], mode="safe", method="unite", fingerprint="f")
    assert record["lost"] == [f"w after {result.lost[0].position} tokens: member 'w': the server is gone"]


def test_trace_and_report_name_what_was_lost(tmp_path):
    with TraceWriter(tmp_path / "t.jsonl", lenient(three(w=(4, {})))) as writer:
        result = writer.generate(QUESTION, max_tokens=30)
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.requests[0].result.lost == result.lost != ()
    out = Console(width=200, file=io.StringIO())
    print_report(out, [("t", trace)])
    [line] = [line for line in out.file.getvalue().splitlines() if "w lost" in line]
    assert f"after {result.lost[0].position} tokens: member 'w': the server is gone" in line


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="unknown on_verifier_failure 'ignore'"):
        EnsembleConfig(on_verifier_failure="ignore")

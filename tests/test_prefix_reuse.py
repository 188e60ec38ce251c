"""Prompts that begin alike: what one request holds in the cache, the next one does not compute again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import reference
from helpers import ensemble, tiny_member
from safe_llm.errors import NonFiniteLogitsError
from safe_llm.member import _MIN_SHARED, Member, Want
from safe_llm.testing import ScriptedBackend, scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace

SHOTS = "".join(
    f"Q: Leo has {n} apples and gives {n // 2} of them to Mia. How many are left? A: {n - n // 2}. "
    for n in (12, 8, 30)
)
QUESTIONS = [f"{SHOTS}Q: In {year} Leo has {year % 7} apples. A:" for year in range(1850, 1858)]


def member(name="m", max_context=4096):
    return scripted_member(name, byte_level(), {}, max_context=max_context)


def opened(owner: Member, prompt_ids, answer=()):
    """A session with its prompt in the cache, and an answer."""
    session = owner.open(prompt_ids)
    owner.prefill(session)
    owner.score([Want(session=session, start=0, tail=list(answer), first=0)])
    return session


def ids_fed(owner: Member) -> int:
    return sum(len(feed.ids) for call in owner.backend.calls for feed in call)


def sharing_of(owner: Member) -> list[tuple[int, int]]:
    """The rows that are taken from, and how many ids of them, from now on."""
    shared, share = [], owner.backend.share

    def spy(row, source, length):
        shared.append((source, length))
        return share(row, source, length)

    owner.backend.share = spy
    return shared


def agrees(owner: Member, session) -> bool:
    """Whether what comes after the session's ids is what a fresh pass over them says."""
    generated = len(session.tokens) - session.prompt_tokens
    tail = session.tokens[session.prompt_tokens :]
    scores, _ = owner.score([Want(session=session, start=0, tail=tail, first=generated)])
    fresh = reference.logits_after(owner, session.tokens)
    finite = np.isfinite(fresh)
    return np.allclose(scores.dense([0])[0].numpy()[finite], fresh[finite], atol=1e-3, rtol=1e-4)


# ---------------------------------------------------------------------- what is computed


def test_few_shot_rows_compute_their_common_beginning_once():
    owner = member()
    prompts = [owner.prompter.encode(question) for question in QUESTIONS]
    common = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False)))
    assert common > 0.8 * len(prompts[0]), "the test shows nothing"
    ensemble(owner).generate(QUESTIONS, max_tokens=1)
    new = len(prompts[0]) + sum(len(prompt) - common for prompt in prompts[1:])
    assert len(owner.backend.calls) == len(QUESTIONS) + 1  # a pass for each prompt's rest, one for the first token
    assert 0.9 * new < ids_fed(owner) <= new  # later questions may have more in common with each other
    assert owner.num_sessions == 0


def test_equal_prompts_need_no_prefill():
    owner = member()
    first = opened(owner, [5] * 50)
    passes, fed = owner.backend.num_forwards, ids_fed(owner)
    second = owner.open([5] * 50)
    owner.prefill(second)
    assert (owner.backend.num_forwards, ids_fed(owner)) == (passes, fed)
    assert (first.reused, second.reused, second.resident) == (0, 49, 49)  # the last id goes with the first scores


def test_an_answer_that_the_next_prompt_repeats_is_not_computed_again():
    # an agent's next call has its last answer in the prompt
    owner = member()
    first = opened(owner, [5] * 30, answer=[6, 7, 8, 9])
    second = owner.open([5] * 30 + [6, 7, 8, 9, 10, 11])
    owner.prefill(second)
    assert second.reused == first.resident == 34
    assert owner.backend.calls[-1][0].ids == (10,)
    assert owner.backend.ids(second.row) == tuple(second.tokens[:-1])


def test_the_session_with_the_longest_common_beginning_is_taken():
    owner = member()
    text = list(range(5, 105))
    rows = [opened(owner, [*text[:n], 300, 301]).row for n in (40, 80, 60)]
    session = owner.open(text)
    shared = sharing_of(owner)
    owner.prefill(session)
    assert shared == [(rows[1], 80)]
    assert owner.backend.ids(session.row) == tuple(text[:-1])


def test_only_what_the_source_still_holds_is_taken():
    owner = member()
    source = opened(owner, [5] * 40, answer=[6, 7, 8, 9])
    source.tokens[42:] = [8, 9, 10]  # written down, but not computed
    source.resident = 42
    owner.backend.rollback(source.row, 42)
    session = owner.open([5] * 40 + [6, 7, 8, 9, 10, 11])
    owner.prefill(session)
    assert session.reused == 42
    assert owner.backend.ids(session.row) == tuple(session.tokens[:-1])


@pytest.mark.parametrize(("common", "reused"), [(_MIN_SHARED - 1, 0), (_MIN_SHARED, _MIN_SHARED), (0, 0)])
def test_short_common_beginnings_are_computed(common, reused):
    owner = member()
    opened(owner, [5] * common + [6] * 50)
    session = owner.open([5] * common + [7] * 50)
    owner.prefill(session)
    assert session.reused == reused
    assert owner.backend.ids(session.row) == tuple(session.tokens[:-1])


def test_whole_prompts_that_are_short_are_computed():
    owner = member()
    sessions = [owner.open([5] * _MIN_SHARED), owner.open([5] * _MIN_SHARED)]
    for session in sessions:
        owner.prefill(session)
    assert [session.reused for session in sessions] == [0, 0]


def test_closed_sessions_are_no_sources():
    owner = member()
    owner.close(opened(owner, [5] * 50))
    session = owner.open([5] * 50)
    owner.prefill(session)
    assert session.reused == 0
    owner.close(session)
    assert not owner.backend._rows
    assert not owner._sessions


def test_backend_that_cannot_share_computes_all(monkeypatch):
    monkeypatch.setattr(ScriptedBackend, "share", lambda self, row, source, length: 0)
    owner = member()
    opened(owner, [5] * 50)
    session = owner.open([5] * 50)
    owner.prefill(session)
    assert (session.reused, owner.backend.ids(session.row)) == (0, (5,) * 49)


# ---------------------------------------------------------------------- nothing of it changes results


def test_source_and_taker_go_their_own_ways():
    owner = tiny_member("m", byte_level(), seed=3)
    prompt = owner.prompter.encode(QUESTIONS[0])
    first = opened(owner, prompt, answer=[20, 30, 40])
    second = owner.open(owner.prompter.encode(QUESTIONS[1]))
    owner.prefill(second)
    third = owner.open([*prompt, 20, 30, 50])
    owner.prefill(third)
    assert min(second.reused, third.reused) > 100
    assert all(agrees(owner, session) for session in (first, second, third))
    owner.score([Want(session=first, start=0, tail=[60, 61], first=1)])
    owner.score(
        [Want(session=third, start=0, tail=[70, 71, 72], first=2), Want(session=second, start=0, tail=[9], first=0)]
    )
    assert all(agrees(owner, session) for session in (first, second, third))
    owner.close(first)
    assert all(agrees(owner, session) for session in (second, third))
    owner.close(second)
    assert agrees(owner, third)
    owner.close(third)


@pytest.mark.parametrize("method", ["unite", "prefix-mass"])
def test_rows_that_share_their_shots_answer_as_each_does_alone(method):
    members = [tiny_member("a", byte_level(), seed=3), tiny_member("b", metaspace(), seed=4)]
    safe = ensemble(*members, method=method)
    alone = [safe.generate(question, max_tokens=24).text for question in QUESTIONS[:5]]
    shared = [sharing_of(owner) for owner in members]
    results = safe.generate(QUESTIONS[:5], max_tokens=24)
    assert [result.text for result in results] == alone
    assert [len(of_member) for of_member in shared] == [4, 4]
    assert min(length for of_member in shared for _, length in of_member) > 100


# ---------------------------------------------------------------------- the next request


def test_next_step_of_an_agent_computes_only_what_is_new():
    owner = member()
    safe = ensemble(owner)
    first = safe.generate(SHOTS, max_tokens=8)
    assert first.usage.cached_tokens == 0
    before = ids_fed(owner)
    second = safe.generate(f"{SHOTS}{first.text} Observation: 4.", max_tokens=1)
    prompt = second.usage.prompt_tokens
    assert prompt > second.usage.cached_tokens > first.usage.prompt_tokens - 4
    assert ids_fed(owner) - before == prompt - second.usage.cached_tokens
    assert owner.num_sessions == 0
    assert len(owner.backend._rows) == 1


def test_kept_row_changes_no_answer():
    members = [tiny_member("a", byte_level(), seed=5), tiny_member("b", metaspace(), seed=6)]
    prompts = [SHOTS, *QUESTIONS[:2], SHOTS, SHOTS[:150], QUESTIONS[3]]
    safe, plain = ensemble(*members), ensemble(*members, prefix_caching=False)
    expected = [plain.generate(prompt, max_tokens=12) for prompt in prompts]
    found = [safe.generate(prompt, max_tokens=12) for prompt in prompts]
    assert [result.text for result in found] == [result.text for result in expected]
    assert [result.usage.cached_tokens > 0 for result in found] == [False, *[True] * 5]
    assert not any(result.usage.cached_tokens for result in expected)


def test_kept_row_is_given_back():
    owner = member()
    safe = ensemble(owner)
    safe.generate(SHOTS, max_tokens=2)
    safe.generate("Something else that has nothing to do with it, and is long enough.", max_tokens=2)
    assert len(owner.backend._rows) == 1, "the one before is gone"
    safe.close()
    assert not owner.backend._rows
    ensemble(owner, prefix_caching=False).generate(SHOTS, max_tokens=2)
    assert not owner.backend._rows


def test_row_that_failed_is_not_kept():
    owner = tiny_member("a", byte_level(), seed=5)
    safe = ensemble(owner)
    forward = owner.backend.forward

    def failing(feeds):
        scores = forward(feeds)
        if feeds[0].keep == 1 and len(feeds[0].ids) == 1:
            with torch.inference_mode():
                scores._hidden_max[0] = float("nan")
        return scores

    owner.backend.forward = failing
    with pytest.raises(NonFiniteLogitsError):
        safe.generate(SHOTS, max_tokens=4)
    owner.backend.forward = forward
    result = safe.generate(SHOTS, max_tokens=4)
    assert result.usage.cached_tokens == 0

"""Members: one operation for append, rollback and re-scoring; peeking at continuations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from helpers import QUESTION, ensemble, tiny_member
from safe_llm import Ensemble
from safe_llm.errors import ContextOverflowError, UnsupportedModelError
from safe_llm.member import Member, Want
from safe_llm.methods import PrefixMass
from safe_llm.testing import ScriptedBackend, plain_symbols
from safe_llm.testing.tokenizers import byte_level, metaspace
from safe_llm.vocabulary import Vocabulary

MEMBER = tiny_member("m", byte_level(), seed=3)
PROMPT = MEMBER.prompter.encode(QUESTION)


def agrees(logits, tokens):
    fresh = reference.logits_after(MEMBER, tokens)
    finite = np.isfinite(fresh)
    return np.allclose(logits.numpy()[finite], fresh[finite], atol=1e-3, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(5, 400), min_size=1, max_size=6)), max_size=6))
def test_score_makes_the_cache_hold_what_it_is_told(steps):
    """Any sequence of 'from generated id k on the text is now ...' gives the logits of a fresh pass."""
    session = MEMBER.open(PROMPT)
    MEMBER.prefill(session)
    ids: list[int] = []
    for start, tail in steps:
        start = min(start, len(ids))
        ids[start:] = tail
        first = max(len(ids) - 2, 0)
        scores, offsets = MEMBER.score([Want(session=session, start=start, tail=tail, first=first)])
        assert offsets == [0]
        assert len(scores) == len(ids) - first + 1
        for k in range(first, len(ids) + 1):
            assert agrees(scores.dense([k - first])[0], PROMPT + ids[:k])
        assert session.resident == MEMBER.backend.length(session.row) == len(PROMPT) + len(ids)
    MEMBER.close(session)


def test_scoring_the_prompts_end_again_costs_one_id():
    session = MEMBER.open(PROMPT)
    MEMBER.prefill(session)
    want = Want(session=session, start=0, tail=[], first=0)
    first = MEMBER.score([want])[0].dense([0])
    again = MEMBER.score([want])[0].dense([0])
    assert np.allclose(first.numpy()[:, 5:400], again.numpy()[:, 5:400])
    MEMBER.close(session)


def test_one_token_prompt_needs_no_prefill():
    session = MEMBER.open([7])
    MEMBER.prefill(session)
    assert session.resident == 0
    scores, _ = MEMBER.score([Want(session=session, start=0, tail=[], first=0)])
    assert agrees(scores.dense([0])[0], [7])
    MEMBER.close(session)


def test_sessions_of_unequal_length_share_one_pass():
    sessions = [MEMBER.open(PROMPT[:n]) for n in (2, 5, len(PROMPT))]
    for session in sessions:
        MEMBER.prefill(session)
    before = MEMBER.backend.num_forwards
    wants = [Want(session=s, start=0, tail=[9 + i] * (i + 1), first=0) for i, s in enumerate(sessions)]
    scores, offsets = MEMBER.score(wants)
    assert MEMBER.backend.num_forwards == before + 1
    assert offsets == [0, 2, 5]
    for i, (session, offset) in enumerate(zip(sessions, offsets, strict=True)):
        for k in range(i + 2):
            assert agrees(scores.dense([offset + k])[0], session.tokens[: session.prompt_tokens + k])
        MEMBER.close(session)


def test_peek_equals_a_fresh_pass_and_leaves_the_session_right():
    session = MEMBER.open(PROMPT)
    MEMBER.prefill(session)
    tail = [20, 30, 40, 50]
    MEMBER.score([Want(session=session, start=0, tail=tail, first=0)])
    for generated, ids in ((4, [9]), (2, [9, 10]), (0, [11]), (3, [12, 13, 14])):
        seen = MEMBER.peek(session, generated, ids)
        assert agrees(seen.dense([0])[0], PROMPT + tail[:generated] + ids)
        assert session.resident == MEMBER.backend.length(session.row)
    scores, _ = MEMBER.score([Want(session=session, start=4, tail=[60], first=5)])
    assert agrees(scores.dense([0])[0], [*PROMPT, *tail, 60])
    MEMBER.close(session)


def test_exact_prefix_mass_runs_in_the_engine_and_disturbs_nothing(monkeypatch):
    members = [tiny_member("a", byte_level(), seed=3), tiny_member("b", metaspace(), seed=4)]
    peeks = []
    peek = Member.peek

    def spy(self, session, generated, ids):
        scores = peek(self, session, generated, ids)
        tokens = session.tokens[: session.prompt_tokens + generated] + list(ids)
        fresh = reference.logits_after(self, tokens)
        finite = np.isfinite(fresh)
        peeks.append(np.allclose(scores.dense([0])[0].numpy()[finite], fresh[finite], atol=1e-3, rtol=1e-4))
        return scores

    monkeypatch.setattr(Member, "peek", spy)
    exact = Ensemble(members, method=PrefixMass(exact=True)).generate(QUESTION, max_tokens=24)
    assert peeks
    assert all(peeks)
    assert exact.counters.num_tokens == 24
    bounded = ensemble(*members, method="prefix-mass").generate(QUESTION, max_tokens=24)
    assert bounded.counters.num_tokens == 24


def test_prompt_must_leave_room_for_one_token():
    small = tiny_member("small", byte_level(), max_context=len(PROMPT))
    with pytest.raises(ContextOverflowError) as caught:
        small.open(PROMPT)
    assert (caught.value.prompt_tokens, caught.value.max_context) == (len(PROMPT), len(PROMPT))
    fits = tiny_member("fits", byte_level(), max_context=len(PROMPT) + 1)
    session = fits.open(PROMPT)
    assert fits.room(session, 0) == 1
    fits.close(session)


def test_vocabulary_of_another_width_is_refused():
    backend = ScriptedBackend(lambda ids: np.zeros(10), 10, plain_symbols(10))
    with pytest.raises(UnsupportedModelError, match="10 columns"):
        Member("m", backend, Vocabulary(byte_level()))

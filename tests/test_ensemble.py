"""The public API: lifecycle, errors that stay with their request, cancellation, context limits, counters."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from helpers import QUESTION, ensemble, tiny_member
from safe_llm import Ensemble, EnsembleConfig
from safe_llm.ensemble import check_names, result_as_dict
from safe_llm.errors import (
    Cancelled,
    ConfigError,
    ContextOverflowError,
    GenerationError,
    MemberError,
    NonFiniteLogitsError,
    PromptError,
    SafeLLMError,
    UnknownNameError,
)
from safe_llm.events import GenerationFinished, Outcome, RoundFinished
from safe_llm.methods import UniTE
from safe_llm.row import Row
from safe_llm.testing import answering, scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace
from safe_llm.types import Message

ANSWERS = {
    "Who?": "The position is Incorrect, don't you think so?",
    "How?": "Leo has 12 apples and gives 7 of them to Mia.",
    "Why?": "def total(values):\n    return 0\n",
}


def open_rows(safe: Ensemble) -> int:
    return safe._scheduler.num_requests


# ---------------------------------------------------------------------- construction


def test_no_members_or_two_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="at least one member"):
        Ensemble([])
    with pytest.raises(ConfigError, match="two members are called 'a'"):
        ensemble(tiny_member("a", byte_level()), tiny_member("a", metaspace()))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_weights_that_do_not_fit_the_members_are_refused(weights):
    with pytest.raises(ConfigError, match="weight"):
        scripted_ensemble(ANSWERS, weights=weights)


def test_spec_is_checked_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("safe_llm.ensemble.load_members", lambda *a, **k: pytest.fail("loaded too early"))
    with pytest.raises(ConfigError, match="3 weights for 2 members"):
        Ensemble.from_preset("demo", weights=(1.0, 2.0, 3.0))
    with pytest.raises(UnknownNameError, match=r"unknown preset 'dmo'.*did you mean 'demo'"):
        Ensemble.from_preset("dmo")
    with pytest.raises(UnknownNameError, match=r"unknown parameter 'lookahed'.*did you mean 'lookahead'"):
        Ensemble.from_preset("demo", lookahed=3)
    with pytest.raises(ConfigError, match="two members are called 'x'"):
        check_names(["x", "x"])


def test_method_that_needs_full_rows_refuses_a_member_that_has_none():
    members = list(scripted_ensemble(ANSWERS).members)
    members[1].backend.has_dense_scores = False
    with pytest.raises(ConfigError, match=r"needs full rows of scores.*verifier.*method='unite'"):
        Ensemble(members, EnsembleConfig(method="gac"))
    assert Ensemble(members).generate("Who?").text == ANSWERS["Who?"]


def test_sampling_needs_full_rows_of_the_drafter():
    members = list(scripted_ensemble(ANSWERS).members)
    members[0].backend.has_dense_scores = False
    safe = Ensemble(members)
    with pytest.raises(ConfigError, match="sampling needs"):
        safe.generate("Who?", temperature=0.5)
    assert safe.generate("Who?").text == ANSWERS["Who?"]


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("method", ["unite", "gac", "prefix-mass"])
@pytest.mark.parametrize("mode", ["safe", "every-token", "drafter"])
def test_every_mode_and_method_gives_an_agreed_answer(method, mode):
    result = scripted_ensemble(ANSWERS, method=method, mode=mode).generate("Who?")
    assert result.text == ANSWERS["Who?"]
    assert (result.finish_reason, result.finish_detail) == ("stop", "end")
    if mode == "drafter":
        assert result.counters.outcomes == {"drafted": result.counters.num_tokens}
        assert set(result.counters.num_forwards) == {"drafter"}


def test_every_token_mode_merges_everywhere_and_drafts_one():
    result = scripted_ensemble(ANSWERS, mode="every-token").generate("Who?")
    assert result.counters.ensemble_rate == 1.0
    assert result.counters.num_draft_tokens == result.counters.num_tokens == result.counters.num_rounds
    assert {point.reason for point in result.points} == {"every-token"}


def test_every_token_mode_keeps_gacs_gate():
    result = scripted_ensemble(ANSWERS, mode="every-token", method="gac").generate("Who?")
    assert set(result.counters.outcomes) == {"gate"}
    assert result.points == ()


def test_conversations_and_texts_and_lists():
    safe = scripted_ensemble(ANSWERS)
    chat = [{"role": "user", "content": "How?"}]
    assert safe.generate(chat).text == ANSWERS["How?"]
    assert safe.generate([Message(role="user", content="How?")]).text == ANSWERS["How?"]
    mixed = safe.generate(["Who?", chat, "Why?"])
    assert [r.text for r in mixed] == [ANSWERS["Who?"], ANSWERS["How?"], ANSWERS["Why?"]]


def test_counters_add_up():
    result = scripted_ensemble(ANSWERS, {"Who?": "The position is Correct."}).generate("Who?")
    counters = result.counters
    assert sum(counters.outcomes.values()) >= counters.num_tokens - counters.num_replaced
    assert counters.num_ensembled == len(result.points) > 0
    assert counters.num_replaced == sum(point.replaced for point in result.points)
    assert counters.num_accepted_tokens <= counters.num_draft_tokens
    assert counters.acceptance_rate == counters.num_accepted_tokens / counters.num_draft_tokens
    assert counters.mean_acceptance_length == counters.num_accepted_tokens / counters.num_rounds
    assert result.usage.total_tokens == result.usage.prompt_tokens + counters.num_tokens


def test_points_lie_on_boundaries_of_every_verifier():
    members = [tiny_member("a", byte_level(), seed=1), tiny_member("b", metaspace(), seed=2)]
    safe = ensemble(*members)
    text, points = b"", []
    for event in safe.stream(QUESTION, max_tokens=60, events=True):
        if isinstance(event, RoundFinished):
            drafted = b"".join(d.token for d in event.decisions)
            ends = {0, *members[1].vocabulary.encode(text + drafted).ends}
            for decision in event.decisions:
                if decision.outcome is Outcome.C1 or decision.outcome.is_ensembled:
                    points.append(decision)
                    assert decision.byte_offset in ends
            text += event.committed
    assert len(points) > 5


def test_timings_are_filled_and_consistent():
    result = scripted_ensemble(ANSWERS).generate("Who?")
    t = result.timings
    parts = (t.tokenize_s, t.prefill_s, t.draft_s, t.verify_s, t.ensemble_s)
    assert all(part >= 0.0 for part in parts)
    assert 0.0 < sum(parts) <= t.total_s
    assert 0.0 < t.ttft_s <= t.total_s
    assert t.tpot_s == pytest.approx((t.total_s - t.ttft_s) / (result.counters.num_tokens - 1))
    one = scripted_ensemble(ANSWERS).generate("Who?", max_tokens=1)
    assert one.timings.tpot_s is None


def test_result_as_dict_is_json():
    result = scripted_ensemble(ANSWERS, {"Who?": "The 日本"}).generate("Who?", logprobs=2)
    plain = json.loads(json.dumps(result_as_dict(result)))
    assert plain["text"] == result.text
    assert plain["finish_reason"] == "stop"
    assert plain["counters"]["ensemble_rate"] == result.counters.ensemble_rate
    assert plain["usage"]["total_tokens"] == result.usage.total_tokens
    assert len(plain["points"]) == len(result.points)
    assert len(plain["logprobs"]) == result.counters.num_tokens


def test_logprobs_are_the_drafters_and_spell_the_answer():
    # A13: raw bytes, no U+FFFD
    answer = {"Who?": "naïve 日本 🙂 x"}
    result = ensemble(scripted_member("d", byte_level(), answer)).generate("Who?", logprobs=3)
    assert b"".join(entry.token for entry in result.logprobs).decode() == answer["Who?"]
    for entry in result.logprobs:
        assert entry.logprob == pytest.approx(np.log(0.9), abs=1e-3)
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.token
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
    assert scripted_ensemble(answer).generate("Who?").logprobs is None


def test_logprob_of_later_pieces_of_a_replacement_is_unknown():
    # the verifier's word takes several drafter tokens; only its first piece has a drafter probability
    drafter = scripted_member("d", characters([]), {"Who?": "xy"})
    verifier = scripted_member("v", characters(["cat"]), {"Who?": "cat"})
    drafter.backend._next_logits = _weak(drafter, b"x", 0.5)
    result = ensemble(drafter, verifier, method="gac").generate("Who?", logprobs=0, max_tokens=3)
    assert result.text == "cat"
    assert [entry.logprob is None for entry in result.logprobs] == [False, True, True]


def _weak(member, token, probability):
    vocabulary = member.vocabulary
    logits = np.full(vocabulary.width, np.log((1 - probability) / vocabulary.width))
    logits[vocabulary.ids[token]] = np.log(probability - 0.1)
    return lambda ids: logits


@pytest.mark.parametrize("minimum", [0, 4, 7])
def test_min_tokens_suppresses_the_end_for_every_member(minimum):
    result = scripted_ensemble({"Who?": "ab"}).generate("Who?", min_tokens=minimum, max_tokens=10)
    assert result.counters.num_tokens >= minimum
    if minimum <= 2:
        assert result.text == "ab"


# ---------------------------------------------------------------------- context windows


def test_prompt_that_does_not_fit_one_member_names_it_its_limit_and_the_length():
    # D06, F04, F16: the drafter would take it, the verifier does not; and the reverse
    small = {"max_context": 40}
    for limits in ({}, small), (small, {}):
        members = [
            scripted_member("drafter", byte_level(), ANSWERS, **limits[0]),
            scripted_member("verifier", metaspace(), ANSWERS, **limits[1]),
        ]
        safe = ensemble(*members)
        name = "verifier" if limits[1] else "drafter"
        with pytest.raises(ContextOverflowError) as caught:
            safe.generate("secret " * 60)
        error = caught.value
        assert (error.member, error.max_context) == (name, 40)
        assert error.prompt_tokens >= 40
        assert name in str(error)
        assert "secret" not in str(error)
        assert safe.generate("Who?", max_tokens=3).usage.completion_tokens == 3, "the next request works"
        assert [m.num_sessions for m in members] == [0, 0]


@pytest.mark.parametrize("limited", ["drafter", "verifier"])
@pytest.mark.parametrize("max_context", [12, 16, 17, 23])
def test_lookahead_is_clipped_to_the_room_of_the_smallest_member(limited, max_context):
    # D05, F22: finish `length` with a detail that tells it from max_tokens
    limits = {name: max_context if name == limited else 4096 for name in ("drafter", "verifier")}
    answers = {"Who?": "The position is Incorrect " * 20}
    members = [
        scripted_member("drafter", byte_level(), answers, max_context=limits["drafter"]),
        scripted_member("verifier", metaspace(), answers, max_context=limits["verifier"]),
    ]
    result = ensemble(*members).generate("Who?", max_tokens=100)
    assert (result.finish_reason, result.finish_detail) == ("length", "context")
    assert answers["Who?"].startswith(result.text)
    assert result.text
    for member in members:
        fed = [len(member.prompter.encode("Who?")) + len(member.vocabulary.encode(result.text.encode()).ids)]
        assert max(fed) <= limits[member.name] + 1


def test_max_context_is_the_smallest_members():
    members = [
        scripted_member("a", byte_level(), ANSWERS, max_context=100),
        scripted_member("b", metaspace(), ANSWERS, max_context=50),
    ]
    assert ensemble(*members).max_context == 50
    assert ensemble(*members, mode="drafter").max_context == 100


# ---------------------------------------------------------------------- failures


def poisoned(member, *, after: str, value: float):
    """Make the member's logits non-finite right after a text."""
    script = member.backend._next_logits

    def next_logits(ids):
        text = b"".join(member.vocabulary.surface(i) for i in ids).decode(errors="replace")
        logits = np.array(script(ids), dtype=np.float64)
        if text.endswith(after):
            logits[5] = value
        return logits

    member.backend._next_logits = next_logits


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logits_fail_their_row_only_and_name_the_member(who, value):
    # F09, F21
    safe = scripted_ensemble(ANSWERS)
    poisoned(safe.members[who], after="Leo has", value=value)
    outcomes = safe.generate(["Who?", "How?", "Why?"], return_exceptions=True)
    assert [outcomes[0].text, outcomes[2].text] == [ANSWERS["Who?"], ANSWERS["Why?"]]
    assert isinstance(outcomes[1], NonFiniteLogitsError)
    assert outcomes[1].member == safe.members[who].name
    assert safe.members[who].name in str(outcomes[1])
    assert open_rows(safe) == 0
    with pytest.raises(NonFiniteLogitsError):
        safe.generate("How?")
    assert safe.generate("Who?").text == ANSWERS["Who?"]


@pytest.mark.parametrize("who", [0, 1])
def test_member_that_raises_fails_the_batch_and_the_next_request_works(who):
    # B20, F20, F21
    safe = scripted_ensemble(ANSWERS)
    member = safe.members[who]
    script = member.backend._next_logits
    calls = []

    def failing(ids):
        calls.append(ids)
        if len(calls) == 4:
            raise RuntimeError("CUDA out of memory, say")
        return script(ids)

    member.backend._next_logits = failing
    with pytest.raises(MemberError, match=member.name):
        "".join(safe.stream("Who?"))
    assert open_rows(safe) == 0
    assert [m.num_sessions for m in safe.members] == [0, 0]
    assert safe.generate("Who?").text == ANSWERS["Who?"]


def test_failure_while_joining_frees_the_rows():
    safe = scripted_ensemble(ANSWERS)
    backend = safe.members[1].backend
    backend.forward, forward = (lambda feeds: (_ for _ in ()).throw(MemberError("verifier", "no"))), backend.forward
    with pytest.raises(MemberError):
        safe.generate("Who?")
    backend.forward = forward
    assert [m.num_sessions for m in safe.members] == [0, 0]
    assert safe.generate("Who?").text == ANSWERS["Who?"]


def test_an_unforeseen_exception_becomes_a_generation_error():
    safe = scripted_ensemble(ANSWERS, {"Who?": "Other answer."})
    safe._engine.method = object()  # no method at all
    with pytest.raises(GenerationError, match="AttributeError"):
        safe.generate("Who?")
    assert open_rows(safe) == 0


def test_row_that_ended_in_a_round_that_failed_is_an_error_and_not_lost():
    @dataclass(frozen=True)
    class Exploding(UniTE):
        def merge(self, point):
            raise RuntimeError("a bug in somebody's method")

    members = scripted_ensemble({"a": "b", "Who?": "yes"}, {"a": "b", "Who?": "no"}).members
    config = EnsembleConfig(lookahead=2)  # so that both rows' drafts are done at once
    outcomes = Ensemble(members, config, method=Exploding()).generate(["a", "Who?"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [GenerationError, GenerationError]
    assert "RuntimeError" in str(outcomes[1])


def test_keyboard_interrupt_in_a_forward_leaves_a_working_engine():
    safe = scripted_ensemble(ANSWERS)
    backend = safe.members[0].backend
    script = backend._next_logits
    calls = []

    def interrupted(ids):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return script(ids)

    backend._next_logits = interrupted
    with pytest.raises(KeyboardInterrupt):
        safe.generate("Who?")
    assert open_rows(safe) == 0
    assert safe.generate("Who?").text == ANSWERS["Who?"]


def test_interrupt_between_two_commits_is_an_error_for_every_row_of_the_round(monkeypatch):
    safe = scripted_ensemble(ANSWERS, lookahead=2, lookup=False)
    first, second = safe.stream("Who?"), safe.stream("How?")
    next(first), next(second)
    commits = []
    commit = Row.commit

    def interrupted(self, *args):
        commits.append(self)
        if len(commits) == 2:
            raise KeyboardInterrupt
        return commit(self, *args)

    monkeypatch.setattr(Row, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    monkeypatch.undo()
    with pytest.raises(GenerationError, match="interrupted"):
        list(second)
    assert open_rows(safe) == 0
    assert [m.num_sessions for m in safe.members] == [0, 0]
    assert safe.generate("Who?").text == ANSWERS["Who?"]


def test_non_finite_position_fails_its_row_even_where_nobody_is_asked():
    # rolled back, the NaN would stay in the cache; and prefix mass reads such positions
    answers = {"Who?": "abcdx", "How?": "x"}
    drafter = scripted_member("drafter", characters(["abcd"]), answers)
    verifier = scripted_member("verifier", characters(["cd"]), answers)
    safe = ensemble(drafter, verifier, method="prefix-mass")
    assert [r.text for r in safe.generate(["Who?", "How?"])] == ["abcdx", "x"]
    poisoned(verifier, after="?ab", value=np.nan)  # inside the drafter's token: no candidate
    outcomes = safe.generate(["Who?", "How?"], return_exceptions=True)
    assert isinstance(outcomes[0], NonFiniteLogitsError)
    assert outcomes[0].member == "verifier"
    assert outcomes[1].text == "x"


def test_one_bad_prompt_of_a_list_is_found_before_anything_runs():
    safe = scripted_ensemble(ANSWERS)
    with pytest.raises(PromptError, match="empty"):
        safe.generate(["Who?", ""])
    assert safe.members[0].backend.num_forwards == 0


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], b"bytes", 7, None, {"role": "user"}])
def test_unusable_prompts_are_refused(prompt):
    # F01
    safe = scripted_ensemble(ANSWERS)
    with pytest.raises(PromptError):
        safe.generate(prompt)
    assert safe.generate("Who?", max_tokens=2).usage.completion_tokens == 2


def test_lone_surrogates_are_refused_before_tokenizing():
    # F10
    safe = scripted_ensemble(ANSWERS)
    with pytest.raises(PromptError, match="lone surrogate"):
        safe.generate("x\ud83d")
    with pytest.raises(PromptError, match="lone surrogate"):
        safe.generate([{"role": "user", "content": "x\ud83d"}])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"stop": [""]},
        {"seed": -1},
        {"logprobs": 21},
        {"min_tokens": 300, "max_tokens": 10},
    ],
)
def test_bad_parameters_are_refused(params):
    with pytest.raises(ConfigError):
        scripted_ensemble(ANSWERS).stream("Who?", **params)


def test_unknown_parameter_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'temperature'"):
        scripted_ensemble(ANSWERS).generate("Who?", temperatur=1)


# ---------------------------------------------------------------------- leaving early


def test_cancel_stops_within_one_round():
    # F15
    safe = scripted_ensemble({"Who?": "The position is Incorrect " * 50})
    cancel = threading.Event()
    stream = safe.stream("Who?", cancel=cancel, max_tokens=500, events=True)
    rounds = (event for event in stream if isinstance(event, RoundFinished))
    for _ in range(3):
        next(rounds)
    cancel.set()
    with pytest.raises(Cancelled):
        list(rounds)
    assert len(safe.members[1].backend.calls) == 3 + 1  # and the prefill
    assert open_rows(safe) == 0
    assert [m.num_sessions for m in safe.members] == [0, 0]


def test_closing_a_stream_frees_its_row_and_stops_decoding():
    safe = scripted_ensemble({"Who?": "The position is Incorrect " * 50})
    stream = safe.stream("Who?", max_tokens=500)
    next(stream)
    forwards = safe.members[0].backend.num_forwards
    stream.close()
    assert open_rows(safe) == 0
    assert safe.members[0].backend.num_forwards == forwards
    other = safe.stream("Who?", max_tokens=500)
    next(other)
    del other
    gc.collect()
    assert open_rows(safe) == 0


def test_a_stream_that_nobody_reads_costs_nothing_and_harms_nobody():
    safe = scripted_ensemble(ANSWERS | {"long": "The position is Incorrect " * 50})
    idle = safe.stream("long", max_tokens=300)
    next(idle)
    assert safe.generate("Who?").text == ANSWERS["Who?"]
    assert "".join(["", *idle]) != ""


def test_cancelling_one_request_does_not_disturb_the_others_in_its_batch():
    safe = scripted_ensemble(ANSWERS)
    first, second = safe.stream("Who?"), safe.stream("How?")
    parts = [next(first), next(second)]
    first.close()
    assert parts[1] + "".join(second) == ANSWERS["How?"]


def test_rows_wait_for_a_place_in_the_batch():
    safe = scripted_ensemble(ANSWERS, max_batch_size=2)
    results = safe.generate(["Who?", "How?", "Why?"] * 3)
    assert [r.text for r in results] == [ANSWERS["Who?"], ANSWERS["How?"], ANSWERS["Why?"]] * 3
    assert max(len(call) for call in safe.members[0].backend.calls) == 2


def test_closed_ensemble_refuses_and_ends_what_runs():
    with scripted_ensemble(ANSWERS) as safe:
        stream = safe.stream("Who?")
        next(stream)
    with pytest.raises(SafeLLMError, match="closed"):
        list(stream)
    with pytest.raises(SafeLLMError, match="closed"):
        safe.generate("Who?")
    assert [m.num_sessions for m in safe.members] == [0, 0]


def test_events_end_with_exactly_one_finish():
    # B13, B15: one finish per request, streamed or not
    safe = scripted_ensemble(ANSWERS)
    events = list(safe.stream("Who?", events=True))
    assert [isinstance(e, GenerationFinished) for e in events].count(True) == 1
    assert isinstance(events[-1], GenerationFinished)
    assert events[-1].result.text == safe.generate("Who?").text


def test_stream_takes_one_prompt():
    with pytest.raises(PromptError, match="one prompt"):
        scripted_ensemble(ANSWERS).stream(["Who?", "How?"])


# ---------------------------------------------------------------------- identity


def test_fingerprint_tells_ensembles_apart():
    # E01, E02: members, weights, method, thresholds
    base = scripted_ensemble(ANSWERS, lookahead=5)
    assert base.fingerprint == ensemble(*base.members).fingerprint
    others = [
        ensemble(*base.members, method="gac"),
        ensemble(*base.members, weights=(2.0, 1.0)),
        ensemble(*base.members, consensus_threshold=0.6),
        ensemble(*base.members, lookahead=4),
        ensemble(*reversed(base.members)),
        Ensemble(base.members, sampling={"temperature": 1.0}),
        Ensemble(base.members, method=UniTE(top_k=3)),
        scripted_ensemble(ANSWERS),  # the same names, but nobody knows whether also the same weights
    ]
    assert len({base.fingerprint, *(o.fingerprint for o in others)}) == 1 + len(others)
    assert "drafter" in repr(base)


def test_defaults_of_the_ensemble_are_used_and_overridden():
    members = scripted_ensemble(ANSWERS).members
    safe = Ensemble(members, sampling={"max_tokens": 3})
    assert safe.generate("Who?").usage.completion_tokens == 3
    assert safe.generate("Who?", max_tokens=5).usage.completion_tokens == 5
    assert safe.generate("Who?", max_tokens=None).usage.completion_tokens == 3
    with pytest.raises(UnknownNameError):
        Ensemble(members, sampling={"max_token": 3})


def test_answering_follows_a_text_written_in_other_pieces():
    member = scripted_member("m", byte_level(), ANSWERS)
    script = answering(member.vocabulary, ANSWERS)
    other = [member.vocabulary.ids[bytes([b])] for b in b"Who?The po"]
    assert member.vocabulary.surface(int(np.argmax(script(tuple(other)))))[:1] == b"s"


def test_two_tokenizers_of_one_size_with_other_content_are_told_apart():
    # D11
    from safe_llm.vocabulary import Vocabulary

    first, second = Vocabulary(characters(["ab"])), Vocabulary(characters(["cd"]))
    assert first.width == second.width
    assert not first.same_as(second)
    assert first.same_as(Vocabulary(characters(["ab"])))

"""How far drafts go, and the guesses that the drafter checks many at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import reference
from helpers import QUESTION, ensemble, tiny_member
from safe_llm.drafting import Draft, DraftTask, draft
from safe_llm.events import RoundFinished
from safe_llm.lookahead import AdaptiveLookahead, FixedLookahead, verify_cost
from safe_llm.lookup import Lookup
from safe_llm.testing import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram
from safe_llm.types import SamplingParams

SURE = [1.0] * 64


def length(rule, confidences):
    """How many tokens the rule drafts where the drafter is so sure of each."""
    return next(rule.enough(n, confidences[:n]) for n in range(1, 65) if rule.enough(n, confidences[:n]) is not None)


def test_fixed_lookahead_is_a_number():
    rule = FixedLookahead(5)
    assert [rule.enough(n, []) for n in (0, 4, 5, 9)] == [None, None, 5, 5]


def test_sure_drafts_grow_from_round_to_round_up_to_sixteen():
    rule, lengths = AdaptiveLookahead(1.0), []
    for _ in range(5):
        lengths.append(length(rule, SURE))
        rule.learn(SURE[: lengths[-1]], num_decided=lengths[-1], was_replaced=False)
    assert lengths == [4, 8, 16, 16, 16]


def test_draft_ends_with_the_token_that_is_unsure():
    rule = AdaptiveLookahead(1.0)
    assert length(rule, [1.0, 0.3, 1.0, 1.0]) == 2
    assert length(rule, [0.3, 1.0]) == 1
    assert rule.enough(0, []) is None
    assert rule.enough(4, [1.0, 0.3, 1.0, 1.0]) == 2, "what was drafted beyond it waits"


@pytest.mark.parametrize("share", [0.01, 0.05, 0.15])
@pytest.mark.parametrize("cost", [0.3, 1.0, 2.0])
def test_rate_is_that_of_the_best_fixed_lookahead(share, cost):
    # every token is replaced with the same probability, which is not the one that its confidence stands for
    rng = np.random.default_rng(5)
    rule, decided, spent = AdaptiveLookahead(cost), 0, 0.0
    for _ in range(1500):
        drafted = length(rule, [0.9] * 64)
        survived = int(np.argmax(np.append(rng.random(drafted) < share, True)))
        was_replaced = survived < drafted
        rule.learn([0.9] * drafted, num_decided=survived + was_replaced, was_replaced=was_replaced)
        decided += survived + was_replaced
        spent += drafted + cost
    best = max((1 - (1 - share) ** n) / share / (n + cost) for n in range(1, 17))
    assert decided / spent > 0.94 * best
    assert rule.enough(64, [0.9] * 64) == pytest.approx(math.sqrt(cost**2 + 2 * cost / share) - cost, abs=3) or (
        rule.enough(64, [0.9] * 64) == 16
    )


def test_cost_of_verifying_grows_with_the_verifiers():
    assert verify_cost([4]) == 0.0
    assert verify_cost([None, 7]) == verify_cost([7, None]) == verify_cost([3, 3]) == pytest.approx(0.6)
    assert verify_cost([8, 2, 4]) == pytest.approx(0.6 * (0.625 + 0.75))


def test_rows_that_are_done_do_not_wait_for_the_few_that_are_not():
    member = scripted_member("m", characters([]), {"Q": "a long answer"})
    tasks = []
    for num_tokens in (2, 9, 2, 9, 2):
        session = member.open(member.prompter.encode("Q"))
        member.prefill(session)
        tasks.append(
            DraftTask(
                session=session,
                ids=[],
                stable=0,
                draft=Draft(),
                limit=20,
                lookahead=FixedLookahead(num_tokens),
                sampling=SamplingParams(),
                uniform=lambda: 0.0,
            )
        )
    before = member.backend.num_forwards
    assert draft(member, tasks) == [True, False, True, False, True]
    assert member.backend.num_forwards - before == 2
    assert [len(task.draft.ids) for task in tasks] == [2] * 5
    assert draft(member, tasks[1:2]) == [True], "alone it goes on to its end"
    assert [len(task.draft.ids) for task in tasks] == [2, 9, 2, 2, 2]


# ---------------------------------------------------------------------- guesses


def test_guess_is_what_followed_the_last_tokens_before():
    lookup = Lookup([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert lookup.guess([]) == [3, 4, 5, 6]
    assert lookup.guess([3]) == [4, 5, 6, 7]
    assert lookup.guess([9]) == []
    lookup.extend([9, 3, 4])
    assert lookup.guess([]) == [5, 6, 7, 1]
    assert Lookup([1]).guess([]) == Lookup([]).guess([2]) == []


def test_longer_and_later_repetitions_win():
    assert Lookup([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).guess([]) == [7, 9, 2, 3], "three tokens tell more than two"
    assert Lookup([2, 3, 7, 2, 3, 8, 2, 3]).guess([]) == [8, 2, 3]


def test_guesses_grow_while_they_are_right_and_shrink_while_they_are_wrong():
    lookup = Lookup([*range(30), 0, 1])
    for right, expected in ((4, 8), (8, 15), (15, 15), (3, 15), (0, 7), (0, 3), (0, 2), (0, 2)):
        lookup.learn(len(lookup.guess([])), right)
        assert len(lookup.guess([])) == expected


PAIRS = [(byte_level, metaspace), (metaspace, byte_level), (byte_level, unigram)]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("method", ["unite", "prefix-mass"])
@pytest.mark.parametrize(
    "options", [{"lookup": False}, {"run_ahead": True}, {"run_ahead": True, "lookup": False}], ids=str
)
def test_guesses_and_running_ahead_change_nothing_but_the_number_of_passes(pair, method, options):
    members = [tiny_member(str(i), make(), seed=i + 3, sharpness=15.0) for i, make in enumerate(pair)]
    prompts = [QUESTION, QUESTION * 3, "one two one two one two one"]
    seen = []
    for chosen in ({}, options):
        safe = ensemble(*members, method=method, lookahead="adaptive", **chosen)
        events = [list(safe.stream(prompt, max_tokens=40, events=True)) for prompt in prompts]
        rounds = [[e for e in stream if isinstance(e, RoundFinished)] for stream in events]
        seen.append([[(d.position, d.token, d.outcome) for e in some for d in e.decisions] for some in rounds])
        texts = [stream[-1].result.text for stream in events]
        assert texts == [r.text for r in safe.generate(prompts, max_tokens=40)], "in a batch as alone"
    assert seen[0] == seen[1]


def drafter_passes(answer, **options):
    safe = scripted_ensemble({"Q": answer}, **options)
    result = safe.generate("Q", max_tokens=200)
    assert result.text == answer
    return result.counters.num_forwards["drafter"], result.counters.num_tokens


def test_repetition_is_drafted_in_few_passes():
    answer = "the cat sat on the mat. " * 8
    passes, tokens = drafter_passes(answer.strip())
    plain, _ = drafter_passes(answer.strip(), lookup=False)
    assert plain >= tokens
    assert passes < tokens / 2


def test_verifiers_next_token_saves_passes_where_nothing_is_repeated():
    answer = "Pack my box with five dozen liquor jugs, quickly vexing brown foxes."
    guessed, tokens = drafter_passes(answer, lookahead=2)
    plain, _ = drafter_passes(answer, lookahead=2, lookup=False)
    assert plain >= tokens > guessed


def test_where_a_pass_pays_for_every_token_nothing_is_guessed():
    answer = "the cat sat on the mat. " * 8
    safe = scripted_ensemble({"Q": answer})
    backend = safe.members[0].backend
    backend.cheap_tokens = 1
    result = safe.generate("Q", max_tokens=200)
    assert result.text == answer
    fed = [len(feed.ids) for feeds in backend.calls[1:] for feed in feeds]
    assert set(fed) == {1}  # the first call is the prompt's


def test_no_guess_is_longer_than_what_is_left_to_generate():
    safe = scripted_ensemble({"Q": "a b " * 30})
    for max_tokens in range(1, 14):
        result = safe.generate("Q", max_tokens=max_tokens)
        assert result.counters.num_tokens == max_tokens


def test_sampling_with_guesses_is_distributed_as_without(monkeypatch):
    # chi-square of the second token behind the likeliest first one, where the lookup has a guess at it
    member = tiny_member("a", characters([]), seed=41, sharpness=14.0)
    prompt = "abcabcabcab"
    ids = member.prompter.encode(prompt)
    first = int(reference.logits_after(member, ids).argmax())
    assert Lookup(ids).guess([]), "there is nothing to guess: the test shows nothing"
    expected = reference.softmax(reference.logits_after(member, [*ids, first]))
    seeds = itertools.count()
    monkeypatch.setattr("secrets.randbits", lambda _: next(seeds))
    safe = ensemble(member, mode="drafter", max_batch_size=8)
    counts, token = np.zeros(len(expected)), member.vocabulary.surface(first)
    for _ in range(0, 2000, 80):
        for result in safe.generate([prompt] * 80, max_tokens=3, temperature=1.0, logprobs=0):
            if result.logprobs[0].token == token and len(result.logprobs) > 1:
                second = result.logprobs[1].token
                counts[member.vocabulary.ids[second] if second else member.vocabulary.symbols.end_id] += 1
    total = counts.sum()
    assert total > 200
    likely = expected * total > 5
    merged = np.append(counts[likely], counts[~likely].sum()), np.append(expected[likely], expected[~likely].sum())
    statistic = float((((merged[0] - total * merged[1]) ** 2) / np.maximum(total * merged[1], 1e-9)).sum())
    degrees = int(likely.sum())
    assert statistic < degrees + 4 * math.sqrt(2 * degrees)

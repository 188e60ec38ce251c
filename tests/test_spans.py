"""Prefix mass in the engine: numbers that the drafter cuts into digits and a verifier does not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import reference_mass
from helpers import QUESTION, tiny_member
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.errors import GenerationError
from safe_llm.events import Outcome, RoundFinished
from safe_llm.methods import PrefixMass
from safe_llm.testing import NextLogits, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram
from safe_llm.vocabulary import Vocabulary

PROMPT = "How many?"
FIRST, SECOND = b"has 49 now and 31.", b"has 52 now and 31."
END = "<|im_end|>"
DOUBTS = {b"has ": {b"4": 0.6, b"5": 0.3}}


def believing(vocabulary: Vocabulary, exceptions: Mapping[bytes, Mapping[bytes, float]]) -> NextLogits:
    """Follow FIRST or SECOND, whichever the text begins, in the member's own tokens, but for `exceptions`."""

    def next_logits(ids: tuple[int, ...]) -> np.ndarray:
        text = b"".join(vocabulary.surface(i) for i in ids).removeprefix(PROMPT.encode())
        answer = next((a for a in (FIRST, SECOND) if a.startswith(text)), text)
        rest = answer[len(text) :]
        wanted = exceptions.get(text, {vocabulary.surface(vocabulary.encode(rest).ids[0]): 0.9} if rest else {})
        logits = np.full(vocabulary.width, -12.0)
        logits[vocabulary.symbols.end_id] = np.log(1e-4 if wanted else 0.9)
        for key, probability in wanted.items():
            logits[vocabulary.ids[key]] = np.log(probability)
        return logits

    return next_logits


def ensemble(verifier_wants: Mapping[bytes, float], **options) -> Ensemble:
    digits, numbers = characters([], special=(END,)), characters([" 49", " 52", " 31"], special=(END,))
    drafter = scripted_member("digits", digits, lambda v: believing(v, DOUBTS))
    verifier = scripted_member("numbers", numbers, lambda v: believing(v, {b"has": verifier_wants}))
    return Ensemble([drafter, verifier], EnsembleConfig(method="prefix-mass", **options))


SURE = {b" 52": 0.8, b" 49": 0.1}


def test_whole_number_of_the_verifier_takes_the_place_of_the_drafters_digits():
    safe = ensemble(SURE, lookahead=6)
    result = safe.generate(PROMPT)
    assert result.text.encode() == SECOND
    (point,) = result.points
    assert (point.drafted, point.chosen, point.byte_offset, point.replaced) == (b" 49", b" 52", 3, True)
    assert point.candidates[0].probabilities["numbers"] == pytest.approx(8 / 9, abs=0.01)
    assert ensemble(SURE, mode="drafter").generate(PROMPT).text.encode() == FIRST


def test_number_that_wins_against_the_verifier_is_confirmed():
    result = ensemble({b" 52": 0.3, b" 49": 0.25, b" 31": 0.3}, lookahead=6).generate(PROMPT)
    assert result.text.encode() == FIRST
    assert [(point.drafted, point.chosen, point.replaced) for point in result.points] == [(b" 49", b" 49", False)]
    assert result.counters.outcomes[Outcome.CONFIRMED] == 1


@pytest.mark.parametrize("lookahead", [3, 4, 5, 6, 7, 8, 11, 16])
def test_number_at_the_end_of_a_draft_is_judged_in_the_next_round(lookahead):
    safe = ensemble(SURE, lookahead=lookahead)
    assert safe.generate(PROMPT).text.encode() == SECOND
    events = list(safe.stream(PROMPT, events=True))
    assert b"".join(e.committed for e in events if isinstance(e, RoundFinished)) == SECOND


def test_draft_that_is_one_open_span_is_judged_as_it_is():
    # lookahead 1: there is nothing else to commit, so it must not wait for ever
    assert ensemble(SURE, lookahead=1).generate(PROMPT).text.encode() in (FIRST, SECOND)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {}], ids=["sampling", "every-token"])
def test_sampling_and_every_token_never_wait(options, monkeypatch):
    # what is left to the next round would be drawn again, which favours what is not left
    def refuse(self, point):
        raise AssertionError("asked")

    with monkeypatch.context() as patched:
        patched.setattr(PrefixMass, "waits", refuse)
        mode = "safe" if options else "every-token"
        assert ensemble(SURE, lookahead=4, mode=mode).generate(PROMPT, **options).text
        with pytest.raises(GenerationError, match="asked"):
            ensemble(SURE, lookahead=4).generate(PROMPT)


# ---------------------------------------------------------------------- the slow reference

PAIRS = {
    "byte-level + sentencepiece": (byte_level, metaspace),
    "sentencepiece + byte-level": (metaspace, byte_level),
    "single digits + byte-level": (lambda: byte_level(420, individual_digits=True), byte_level),
    "byte-level + unigram": (byte_level, unigram),
    "three": (byte_level, metaspace, lambda: byte_level(420, individual_digits=True)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("sharpness", "lookahead"), [(12.0, 6), (25.0, 6), (12.0, "adaptive"), (25.0, "adaptive")])
def test_engine_agrees_with_the_slow_reference(pair, sharpness, lookahead):
    members = [tiny_member(str(i), make(), seed=i + 7, sharpness=sharpness) for i, make in enumerate(PAIRS[pair])]
    config = EnsembleConfig(method="prefix-mass", lookahead=lookahead)
    expected = reference_mass.generate(members, QUESTION, config, 30)
    events = list(Ensemble(members, config).stream(QUESTION, max_tokens=30, events=True))
    decisions = [d for e in events if isinstance(e, RoundFinished) for d in e.decisions]
    blocked = {"oov-like": "blocked", "unrepresentable": "blocked"}
    assert [(d.position, d.token, blocked.get(d.outcome, d.outcome)) for d in decisions] == expected.decisions
    assert b"".join(e.committed for e in events if isinstance(e, RoundFinished)) == expected.text
    assert any(outcome == "replaced" for *_, outcome in expected.decisions), "the test shows nothing"

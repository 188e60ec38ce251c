"""The paper's Figure 3 through the real verification code, and the two checks one by one."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import ensemble
from safe_llm.events import EnsemblePoint, Outcome, RoundFinished
from safe_llm.member import Member
from safe_llm.methods.base import MemberView
from safe_llm.prompting import Prompter
from safe_llm.testing.backends import ScriptedBackend
from safe_llm.testing.tokenizers import characters
from safe_llm.vocabulary import Vocabulary

PROMPT = ">"


def member(name: str, words: list[str], beliefs: dict[str, dict[str, float]]) -> Member:
    """A member with the given word tokens, and what it believes after each generated text."""
    tokenizer = characters(words)
    vocabulary = Vocabulary(tokenizer)

    def next_logits(ids):
        text = b"".join(vocabulary.surface(i) for i in ids).decode("utf-8", errors="replace")
        chosen = beliefs.get(text.removeprefix(PROMPT), {"<end>": 0.99})
        rest = max(1.0 - sum(chosen.values()), 1e-6) / vocabulary.width
        logits = np.full(vocabulary.width, np.log(rest))
        for word, probability in chosen.items():
            token_id = vocabulary.symbols.end_id if word == "<end>" else vocabulary.ids[word.encode()]
            logits[token_id] = np.log(probability)
        return logits

    backend = ScriptedBackend(next_logits, vocabulary.width, vocabulary.symbols, name)
    return Member(name, backend, vocabulary, prompter=Prompter(vocabulary))


def chain(*steps: tuple[str, float], extra: dict[int, dict[str, float]] | None = None) -> dict[str, dict[str, float]]:
    """Beliefs along one tokenization: after each piece, the next piece with its probability (and rivals)."""
    beliefs, text = {}, ""
    for i, (piece, probability) in enumerate(steps):
        beliefs[text] = {piece: probability} | (extra or {}).get(i, {})
        text += piece
    return beliefs


def figure_3() -> list[Member]:
    drafter = member(
        "D",
        ["En", "semb", "le", " position", " is", " Inc", "orr", "ect", " Correct"],
        chain(
            ("En", 0.9),
            ("semb", 0.7),
            ("le", 0.9),
            (" position", 0.6),
            (" is", 0.98),
            (" Inc", 0.7),
            ("orr", 0.8),
            ("ect", 0.9),
            extra={5: {" Correct": 0.25}},
        ),
    )
    first = member(
        "V1",
        ["En", "emble", " position", " is", " Inc", "orrect", " Correct"],
        chain(
            ("En", 0.9),
            ("s", 0.8),
            ("emble", 0.9),
            (" position", 0.7),
            (" is", 0.98),
            (" Inc", 0.3),
            ("orrect", 0.7),
            extra={5: {" Correct": 0.6}},
        ),
    )
    second = member(
        "V2",
        ["En", "semble", " position", " is", " Incorrect", " Correct"],
        chain(
            ("En", 0.9),
            ("semble", 0.9),
            (" position", 0.5),
            (" is", 0.98),
            (" Incorrect", 0.2),
            extra={4: {" Correct": 0.7}},
        ),
    )
    return [drafter, first, second]


def run(members, lookahead=8, **options):
    events = list(ensemble(*members, lookahead=lookahead, **options).stream(PROMPT, events=True, max_tokens=40))
    rounds = [e for e in events if isinstance(e, RoundFinished)]
    return rounds, [e for e in events if isinstance(e, EnsemblePoint)]


def test_figure_3_of_the_paper():
    rounds, points = run(figure_3())
    decisions = rounds[0].decisions
    assert rounds[0].num_draft_tokens == 8
    assert [d.token.decode() for d in decisions] == ["En", "semb", "le", " position", " is", " Inc"]
    assert [d.outcome for d in decisions] == [
        Outcome.C1,
        Outcome.C1,
        Outcome.OOV_LIKE,  # "semb" is OOV-like for both verifiers, so "le" is not tested
        Outcome.C1,
        Outcome.C1,
        Outcome.REPLACED,
    ]
    means = [np.mean(list(d.probabilities.values())) if d.probabilities else None for d in decisions]
    assert means[2] is None
    assert np.allclose([means[0], means[1], means[3], means[4], means[5]], [0.9, 0.8, 0.6, 0.98, 0.4], atol=0.01)
    assert rounds[0].committed == b"Ensemble position is Correct"
    assert (points[0].drafted, points[0].chosen, points[0].position) == (b" Inc", b" Correct", 5)
    assert points[0].byte_offset == len("Ensemble position is")
    assert set(points[0].probabilities) == {"D", "V1", "V2"}
    assert points[0].probabilities["V2"] == pytest.approx(0.2, abs=1e-3)


def test_consensus_by_c2_where_a_verifier_prefers_something_else():
    drafter = member("D", ["yes", "no"], {"": {"yes": 0.9}})
    verifier = member("V", ["yes", "no"], {"": {"yes": 0.4, "no": 0.5}})
    assert run([drafter, verifier])[0][0].decisions[0].outcome is Outcome.C2
    tight = run([drafter, verifier], consensus_threshold=0.7)[0][0].decisions[0].outcome
    assert tight is not Outcome.C2


def test_weights_count_in_c2():
    drafter = member("D", ["yes", "no"], {"": {"yes": 0.9}})
    verifier = member("V", ["yes", "no"], {"": {"yes": 0.05, "no": 0.9}})
    assert run([drafter, verifier], weights=(3.0, 1.0))[0][0].decisions[0].outcome is Outcome.C2
    assert run([drafter, verifier], weights=(1.0, 1.0))[0][0].decisions[0].outcome is not Outcome.C2


def test_number_spans_that_are_cut_differently_are_skipped_until_a_common_boundary():
    # A23: " 1850" against " 1", "8", "5", "0": the ensemble may act before and after, never inside
    drafter = member("D", ["In", " 18", "50", " the"], chain(("In", 0.9), (" 18", 0.9), ("50", 0.9), (" the", 0.4)))
    verifier = member("V", ["In", " 1850", " the", " one"], chain(("In", 0.9), (" 1850", 0.9), (" one", 0.9)))
    decisions = run([drafter, verifier])[0][0].decisions
    assert [d.outcome for d in decisions[:3]] == [Outcome.C1, Outcome.C1, Outcome.OOV_LIKE]
    assert decisions[3].outcome.is_ensembled


def test_a_boundary_can_disappear_when_more_text_is_drafted():
    # ending on "Inc" is a boundary of V while nothing follows; with more text V reads on
    steps = chain(("Inc", 0.9), ("orr", 0.9), ("ect", 0.9))
    drafter = member("D", ["Inc", "orr", "ect"], steps)
    verifier = member("V", ["Inc", "Incorrect"], {"": {"Incorrect": 0.5, "Inc": 0.45}, "Inc": {"o": 0.5}})
    long = run([drafter, verifier], lookahead=3)[0][0].decisions
    assert [d.outcome for d in long] == [Outcome.C1, Outcome.OOV_LIKE, Outcome.OOV_LIKE]
    short = run([drafter, verifier], lookahead=1)[0]
    assert [r.decisions[0].outcome for r in short[:2]] == [Outcome.C2, Outcome.OOV_LIKE]


def test_draft_without_any_candidate_costs_no_verifier_pass():
    drafter = member("D", ["ab", "cd"], chain(("ab", 0.9), ("cd", 0.9), ("<end>", 0.9)))
    verifier = member("V", ["abcd"], {"": {"abcd": 0.9}, "abcd": {"<end>": 0.9}})
    rounds, _ = run([drafter, verifier], lookahead=1)
    outcomes = [d.outcome for r in rounds for d in r.decisions]
    assert outcomes[-1] is Outcome.C1
    assert verifier.backend.num_forwards <= 1 + len(rounds)


def test_end_takes_part_in_consensus_and_replacement():
    drafter = member("D", ["more"], {"": {"<end>": 0.5, "more": 0.4}, "more": {"<end>": 0.9}})
    verifier = member("V", ["more"], {"": {"more": 0.95}, "more": {"<end>": 0.9}})
    rounds, points = run([drafter, verifier])
    assert (points[0].drafted, points[0].chosen) == (b"", b"more")
    assert b"".join(r.committed for r in rounds) == b"more"


def test_draft_that_begins_with_end_makes_progress():
    # D08
    drafter = member("D", ["x"], {"": {"<end>": 0.9}})
    verifier = member("V", ["x"], {"": {"<end>": 0.9}})
    result = ensemble(drafter, verifier).generate(PROMPT)
    assert (result.text, result.finish_detail, result.usage.completion_tokens) == ("", "end", 1)
    assert result.counters.num_rounds == 1


def test_nothing_after_an_end_inside_the_draft_is_emitted():
    # D03
    drafter = member("D", ["a", "b"], chain(("a", 0.9), ("<end>", 0.9), ("b", 0.9)))
    verifier = member("V", ["a", "b"], chain(("a", 0.9), ("<end>", 0.9), ("b", 0.9)))
    result = ensemble(drafter, verifier, lookahead=4).generate(PROMPT)
    assert (result.text, result.usage.completion_tokens, result.finish_reason) == ("a", 2, "stop")


def detailed_decisions(members, *, detailed=True, **options):
    events = ensemble(*members, lookahead=8, **options).stream(PROMPT, events=True, detailed=detailed, max_tokens=40)
    return [d for e in events if isinstance(e, RoundFinished) for d in e.decisions]


def test_detailed_decisions_have_the_best_tokens_of_everybody_who_was_asked():
    decisions = detailed_decisions(figure_3())
    assert [set(d.tops) for d in decisions[:3]] == [{"D", "V1", "V2"}, {"D", "V1", "V2"}, {"D"}]  # "le" is OOV-like
    replaced = decisions[5]
    assert [token for token, _ in replaced.tops["V1"][:2]] == [b" Correct", b" Inc"]
    assert [p for _, p in replaced.tops["V1"][:2]] == pytest.approx([0.6, 0.3], abs=1e-3)
    for decision in decisions:
        assert all(len(top) == 3 for top in decision.tops.values())
        for name, p in decision.probabilities.items():
            assert decision.tops[name][0][1] >= p - 1e-12


def test_without_verifiers_the_drafter_alone_has_best_tokens():
    decisions = detailed_decisions(figure_3(), mode="drafter")
    assert {frozenset(d.tops) for d in decisions} == {frozenset({"D"})}
    assert decisions[0].tops["D"][0] == (b"En", pytest.approx(0.9, abs=1e-3))
    assert all(d.probabilities == {} for d in decisions)


def test_best_tokens_are_looked_up_in_detail_only(monkeypatch):
    asked = []
    original = MemberView.best_tokens
    monkeypatch.setattr(MemberView, "best_tokens", lambda view, k: asked.append(view.name) or original(view, k))
    assert all(d.tops == {} for d in detailed_decisions(figure_3(), detailed=False))
    assert asked == []
    detailed_decisions(figure_3())
    assert asked


def test_best_tokens_change_no_verdict():
    brief, full = (detailed_decisions(figure_3(), detailed=detailed) for detailed in (False, True))
    assert [(d.token, d.outcome) for d in brief] == [(d.token, d.outcome) for d in full]


def test_confirmed_token_does_not_end_the_round():
    unsure = {1: {"x": 0.1}, 3: {"y": 0.1}}
    drafter = member("D", [], chain(*zip("abcde", (0.9, 0.45, 0.9, 0.45, 0.9), strict=True), extra=unsure))
    other = {1: {"x": 0.3}, 3: {"y": 0.3}}
    verifier = member("V", [], chain(*zip("abcde", (0.9, 0.25, 0.9, 0.25, 0.9), strict=True), extra=other))
    rounds, points = run([drafter, verifier])
    assert [d.outcome for d in rounds[0].decisions] == ["c1", "confirmed", "c1", "confirmed", "c1", "c1"]
    assert rounds[0].committed == b"abcde"
    assert len(rounds) == 1
    assert [(p.position, p.drafted, p.chosen, p.byte_offset) for p in points] == [
        (1, b"b", b"b", 1),
        (3, b"d", b"d", 3),
    ]


def test_points_behind_the_end_of_an_answer_are_not_reported():
    # the draft goes on behind the stop string, and the ensemble would act there
    drafter = member("D", [], chain(*zip("abcde", (0.9, 0.9, 0.9, 0.45, 0.9), strict=True), extra={3: {"y": 0.1}}))
    verifier = member("V", [], chain(*zip("abcde", (0.9, 0.9, 0.9, 0.25, 0.9), strict=True), extra={3: {"y": 0.3}}))
    result = ensemble(drafter, verifier, lookahead=8).generate(PROMPT, stop="c")
    assert (result.text, result.points) == ("ab", ())
    assert "confirmed" not in result.counters.outcomes

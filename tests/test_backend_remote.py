"""Rows on a server: what is asked, what is remembered, and what becomes of errors. No HTTP here."""

from __future__ import annotations

import numpy as np
import pytest

from model_servers import DirectServer
from safe_llm.backends.base import Feed
from safe_llm.backends.remote import RemoteBackend, position
from safe_llm.backends.sparse import SparseScores
from safe_llm.errors import ConfigError, MemberError
from safe_llm.testing import BackendConformance, plain_symbols, scripted

WIDTH = 40
SYMBOLS = plain_symbols(WIDTH, end_ids=(2, 5), unusable=(0, 39))


def hashed_logits(ids):
    return np.random.default_rng(ids).normal(size=WIDTH)


class TestRemoteBackend(BackendConformance):
    def make_backend(self):
        return RemoteBackend(DirectServer(hashed_logits), SYMBOLS, tokens_per_call=4), SYMBOLS


def counting(**options):
    """A model that counts up, on a server."""
    server = DirectServer(scripted(WIDTH, {(i,): i + 1 for i in range(10, 30)}), **options)
    return server, RemoteBackend(server, plain_symbols(WIDTH), tokens_per_call=4)


# ---------------------------------------------------------------------- scores


def sparse(*rows, symbols=SYMBOLS, top_k=3):
    positions = [position("m", {i: float(np.log(p)) for i, p in row.items()}, top_k) for row in rows]
    return SparseScores(len(rows), symbols, lambda: positions)


def test_what_is_left_is_spread_evenly_and_never_named():
    scores = sparse({7: 0.5, 8: 0.2, 9: 0.1})
    usable = 37  # of 40 ids, two cannot be chosen and two are one
    log_probs = scores.log_probs([0], np.arange(WIDTH))
    assert np.exp(log_probs).sum() == pytest.approx(1.0)
    np.testing.assert_allclose(np.exp(log_probs[[7, 8, 9]]), [0.5, 0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(np.exp(log_probs[[1, 2, 20]]), 0.2 / (usable - 3), rtol=1e-6)
    ids, logits = scores.top_k([0], 5)
    assert ids[0, :3].tolist() == [7, 8, 9]
    assert len({*ids[0].tolist()}) == 5
    assert np.isneginf(logits[0, 3:]).all()


def test_no_guess_is_above_the_least_likely_of_the_named_ids():
    # id 20 is known as the id that was fed; the server does not say that it is among the best three
    symbols = plain_symbols(6)
    scores = sparse({0: 0.2, 1: 0.1, 2: 0.05, 3: 0.001}, symbols=symbols)
    np.testing.assert_allclose(np.exp(scores.logits([0], [3, 4, 5])), [0.001, 0.05, 0.05])
    assert scores.top1()[0].tolist() == [0]


def test_named_ends_are_one_symbol_and_hidden_ids_have_no_mass():
    scores = sparse({2: 0.2, 5: 0.3, 0: 0.4})
    assert scores.top1()[0].tolist() == [2]
    np.testing.assert_allclose(np.exp(scores.logits([0, 0, 0], [2, 5, 0])), [0.5, 0.0, 0.0])
    assert np.exp(scores.log_probs([0], np.arange(WIDTH))).sum() == pytest.approx(1.0)


def test_a_grammar_that_allows_nothing_named_leaves_an_even_choice_and_names_none():
    scores = sparse({7: 0.5, 8: 0.2, 9: 0.1}, {7: 0.5, 8: 0.2, 9: 0.1})
    allowed = np.zeros((1, WIDTH), dtype=bool)
    allowed[0, [11, 12]] = True
    scores.restrict([0], allowed)
    np.testing.assert_allclose(scores.log_probs([0], [11, 12]), np.log([0.5, 0.5]))
    assert np.isneginf(scores.top_k([0], 2)[1]).all()
    assert scores.top1()[0].tolist() == [11, 7]
    assert scores.top1()[1].all()


def test_ids_that_no_longer_can_be_chosen_make_no_room_for_others():
    scores = sparse({7: 0.5, 8: 0.2, 9: 0.1})
    before = scores.logits([0], [20])
    allowed = np.zeros((1, WIDTH), dtype=bool)
    allowed[0, [7, 20]] = True
    scores.restrict([0], allowed)
    assert scores.logits([0], [20]) == before
    scores.restrict([0], ~allowed)
    assert scores.top1()[1].tolist() == [False]


def test_scores_without_an_end_have_none_to_forbid():
    scores = sparse({7: 0.5}, symbols=plain_symbols(WIDTH))
    scores.forbid_end([0])
    assert scores.top1()[0].tolist() == [7]
    with pytest.raises(NotImplementedError):
        scores.dense([0])


# ---------------------------------------------------------------------- calls


def test_drafting_token_by_token_calls_once_for_several():
    server, backend = counting()
    row = backend.open()
    backend.forward([Feed(row=row, ids=[3, 10])])
    token = 11
    for _ in range(8):
        scores = backend.forward([Feed(row=row, ids=[token])])
        assert scores.top1()[0].tolist() == [token + 1]
        token += 1
    assert [(len(q.ids), q.num_new) for q in server.questions] == [(2, 1), (3, 4), (7, 4)]
    assert (backend.num_forwards, backend.num_calls, backend.num_sent) == (3, 3, 12)


def test_another_token_than_was_generated_makes_a_new_call():
    server, backend = counting()
    row = backend.open()
    for ids in ([3, 10], [11], [12], [20]):
        found = backend.forward([Feed(row=row, ids=ids)]).top1()[0]
    assert found.tolist() == [21]
    assert [q.ids for q in server.questions] == [(3, 10), (3, 10, 11), (3, 10, 11, 12, 20)]
    backend.rollback(row, 3)
    assert backend.forward([Feed(row=row, ids=[12])]).top1()[0].tolist() == [13]
    assert len(server.questions) == 3, "what came after (3, 10, 11, 12) was known"


def test_positions_that_are_known_are_not_asked_for_again():
    server, backend = counting()
    row = backend.open()
    backend.forward([Feed(row=row, ids=[3, 10, 11, 15], keep=3)]).top1()
    backend.rollback(row, 3)
    scores = backend.forward([Feed(row=row, ids=[12, 13], keep=2)])
    assert scores.top1()[0].tolist() == [13, 14]
    backend.rollback(row, 2)
    scores = backend.forward([Feed(row=row, ids=[11, 12, 13, 14], keep=4)])
    assert scores.top1()[0].tolist() == [12, 13, 14, 15]
    assert [q.first for q in server.questions] == [2, 4, 6]


def test_what_is_far_behind_is_forgotten():
    server, backend = counting(context=2000)
    row = backend.open()
    backend.forward([Feed(row=row, ids=[10] * 900, keep=900)]).top1()
    backend.forward([Feed(row=row, ids=[10])]).top1()
    assert len(backend._rows[row].known) < 300
    backend.rollback(row, 10)
    assert backend.forward([Feed(row=row, ids=[10])]).top1()[0].tolist() == [11]
    assert len(server.questions) == 3


def test_a_call_asks_for_no_more_than_fits():
    server, backend = counting(context=8)
    assert backend.max_context == 7
    row = backend.open()
    backend.forward([Feed(row=row, ids=[3, 3, 3, 3, 10])])
    assert backend.forward([Feed(row=row, ids=[11])]).top1()[0].tolist() == [12]
    assert server.questions[-1].num_new == 2
    assert RemoteBackend(server, plain_symbols(WIDTH), max_context=5).max_context == 5


def test_calls_of_a_row_carry_its_name():
    server, backend = counting()
    rows = [backend.open(), backend.open()]
    for ids in ([10], [20]):
        backend.forward([Feed(row=row, ids=ids) for row in rows]).top1()
    names = [q.session for q in server.questions]
    assert len({*names}) == 2
    assert {q.session for q in server.questions if q.ids[0] == 10 and len(q.ids) == 2} == {*names}


# ---------------------------------------------------------------------- errors


def test_an_error_surfaces_with_the_scores_and_the_next_call_is_complete():
    server, backend = counting()
    row = backend.open()
    server.fails = [ConfigError("too many ids", hint="fewer"), MemberError("there", "gone"), RuntimeError("boom")]
    scores = backend.forward([Feed(row=row, ids=[3, 10])])
    assert len(scores) == 1
    for _ in range(2):
        with pytest.raises(MemberError, match="member 'there': too many ids \\(fewer\\)") as caught:
            scores.top1()
        assert isinstance(caught.value.__cause__, ConfigError)
    with pytest.raises(MemberError, match="gone"):
        backend.forward([Feed(row=row, ids=[11])]).top1()
    with pytest.raises(RuntimeError, match="boom"):
        backend.forward([Feed(row=row, ids=[12])]).top1()
    assert backend.forward([Feed(row=row, ids=[13])]).top1()[0].tolist() == [14]
    assert server.questions[-1].ids == (3, 10, 11, 12, 13)
    assert backend.forward_s > 0


def test_wrong_feeds_are_refused_before_a_call():
    server, backend = counting()
    row = backend.open()
    for feeds in ([], [Feed(row=row, ids=[1]), Feed(row=row, ids=[1])], [Feed(row=row, ids=[1], keep=2)]):
        with pytest.raises(ValueError, match=r"forward needs|keep must be"):
            backend.forward(feeds)
    for ids in ([-1], [WIDTH]):
        with pytest.raises(MemberError, match="outside of its vocabulary of 40"):
            backend.forward([Feed(row=row, ids=ids)])
    assert not server.questions
    assert backend.length(row) == 0


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({1: float("nan")}, "NaN or infinite"),
        ({1: float("-inf")}, "NaN or infinite"),
        ({1: 0.5}, "above 0"),
        ({-1: -1.0}, "negative id"),
    ],
)
def test_log_probabilities_that_are_none_are_refused(named, message):  # F09
    with pytest.raises(MemberError, match=message):
        position("m", named, 1)


class Wrong(DirectServer):
    """Answers something else than was asked for."""

    def __init__(self, change):
        super().__init__(hashed_logits)
        self.change = change

    def ask(self, question):
        return self.change(super().ask(question))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: type(a)(positions=a.positions[1:], generated=a.generated, num_computed=0), "1 positions where 2"),
        (lambda a: type(a)(positions=[], generated=[], num_computed=0), "0 positions where 1"),
        (
            lambda a: type(a)(positions=[position("m", {1: -1.0}, 64)] * 2, generated=a.generated, num_computed=0),
            "names 1 ids at a position where 64",
        ),
        (
            lambda a: type(a)(
                positions=[position("m", dict.fromkeys(range(1, 41), -9.0), 64)] * 2,
                generated=a.generated,
                num_computed=0,
            ),
            "outside of the vocabulary of 40",
        ),
    ],
)
def test_answers_to_another_question_are_refused(change, message):
    backend = RemoteBackend(Wrong(change), SYMBOLS)
    with pytest.raises(MemberError, match=message):
        backend.forward([Feed(row=backend.open(), ids=[7, 8], keep=2)]).top1()

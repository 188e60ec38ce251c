"""Methods: the conformance class on each, and what each promises beyond it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.config import EnsembleConfig
from safe_llm.events import Outcome
from safe_llm.methods import GaC, PrefixMass, UniTE, make_method
from safe_llm.methods.base import END, MemberView, Point
from safe_llm.methods.prefix_mass import _longest_prefixes
from safe_llm.methods.sharpening import sharpen
from safe_llm.testing import MethodConformance, Opinion, point_of
from safe_llm.testing.tokenizers import byte_level, characters
from safe_llm.vocabulary import Vocabulary


class TestUniTE(MethodConformance):
    def make_method(self):
        return UniTE()


class TestUniTEGeometric(MethodConformance):
    def make_method(self):
        return UniTE(sharpening="geometric")


class TestGaC(MethodConformance):
    def make_method(self):
        return GaC()


class TestPrefixMass(MethodConformance):
    def make_method(self):
        return PrefixMass()


@pytest.mark.parametrize(("name", "kind"), [("unite", UniTE), ("gac", GaC), ("prefix-mass", PrefixMass)])
def test_configuration_names_the_method(name, kind):
    assert make_method(EnsembleConfig(method=name, top_k=7)) == kind(top_k=7)


# ---------------------------------------------------------------------- UniTE


def words(*extra: str) -> Vocabulary:
    return Vocabulary(characters(list(extra)))


def test_unite_gives_a_missing_key_to_the_first_piece_of_its_encoding():
    # the verifier has no " Correct": its " C" stands in, and " C" itself is not in the union
    drafter, verifier = words(" Correct", " Inc"), words(" C", "orrect")
    point = point_of(
        [
            Opinion(vocabulary=drafter, probs={b" Correct": 0.5, b" Inc": 0.45}, own=b" Inc"),
            Opinion(vocabulary=verifier, probs={b"x": 0.5, b" C": 0.4}, own=b"x"),
        ]
    )
    keys, logits, _ = UniTE(top_k=1)._union(point)
    assert keys == [b" Correct", b"x"]
    assert np.isclose(logits[1][0], np.log(0.4), atol=1e-5)


def test_unite_counts_an_id_once_for_the_key_it_spells():
    drafter, verifier = words(" Correct", " C"), words(" C", "orrect")
    point = point_of(
        [
            Opinion(vocabulary=drafter, probs={b" Correct": 0.5, b" C": 0.4}),
            Opinion(vocabulary=verifier, probs={b" C": 0.9}),
        ]
    )
    keys, logits, _ = UniTE(top_k=2)._union(point)
    shares = dict(zip(keys, logits[1], strict=True))
    assert np.isclose(shares[b" C"], np.log(0.9), atol=1e-5)
    assert shares[b" Correct"] == -np.inf


def test_unite_skips_a_bare_space_when_it_looks_for_the_first_piece():
    drafter, verifier = words(" 49"), words()
    point = point_of(
        [
            Opinion(vocabulary=drafter, probs={b" 49": 0.9}),
            Opinion(vocabulary=verifier, probs={b"a": 0.5, b"4": 0.3, b" ": 0.1}),
        ]
    )
    keys, logits, _ = UniTE(top_k=1)._union(point)
    assert np.isclose(logits[1][keys.index(b" 49")], np.log(0.3), atol=1e-5)


def test_unite_softmax_is_over_the_union_only():
    vocabulary = words()
    point = point_of(
        [
            Opinion(vocabulary=vocabulary, probs={b"a": 0.2, b"b": 0.1}, own=b"a"),
            Opinion(vocabulary=vocabulary, probs={b"a": 0.1, b"b": 0.2}, own=b"a"),
        ]
    )
    merged = UniTE(top_k=2, sharpening="none").merge(point)
    assert np.isclose(sum(c.probability for c in merged.candidates), 1.0)
    assert merged.chosen == b"a", "a tie goes to the drafter's lowest id"


def test_unite_gives_no_mass_to_what_a_member_cannot_spell():
    from safe_llm.testing.tokenizers import wordpiece

    drafter, verifier = Vocabulary(byte_level()), Vocabulary(wordpiece())
    point = point_of(
        [
            Opinion(vocabulary=drafter, probs={b"\n": 0.6, b" the": 0.3}),
            Opinion(vocabulary=verifier, probs={b" the": 0.9}),
        ]
    )
    assert UniTE().merge(point).chosen == b" the"
    with_newline = dict(UniTE().distribution(point, 1.0))
    assert 0.0 < with_newline[b"\n"] < 0.5


# ---------------------------------------------------------------------- sharpening

KEYS = [b"Inc", b"Incorrect", b"Correct", b" "]


def sharpened(kind, ensembled, members=None, drafter_top=(b"Inc", b"Correct", b" "), threshold=0.1):
    ensembled = np.array(ensembled)
    return sharpen(
        kind,
        keys=KEYS,
        ensembled=ensembled,
        members=np.stack([ensembled] * 2) if members is None else np.array(members),
        weights=np.array([0.5, 0.5]),
        drafter_top=frozenset(drafter_top),
        threshold=threshold,
    )


def test_prefix_sharpening_moves_mass_to_the_prefix():
    out = sharpened("prefix", [0.3, 0.2, 0.4, 0.1])
    assert np.allclose(out, [0.5, 0.2, 0.4, 0.1])


@pytest.mark.parametrize(
    ("ensembled", "changes"),
    [
        ([0.3, 0.1, 0.5, 0.1], {}),  # some candidate has 1/2 already
        ([0.1, 0.45, 0.4, 0.05], {}),  # the prefix is not above lambda
        ([0.3, 0.2, 0.1, 0.4], {"drafter_top": (b"Correct", b" ")}),  # not among the drafter's own
    ],
)
def test_prefix_sharpening_leaves_the_rest_alone(ensembled, changes):
    assert np.allclose(sharpened("prefix", ensembled, **changes), ensembled)


def test_prefix_sharpening_never_feeds_a_bare_space():
    keys = [b" ", b" a", b" b"]
    out = sharpen(
        "prefix",
        keys=keys,
        ensembled=np.array([0.2, 0.4, 0.4]),
        members=np.ones((1, 3)),
        weights=np.ones(1),
        drafter_top=frozenset(keys),
        threshold=0.1,
    )
    assert np.allclose(out, [0.2, 0.4, 0.4])


def test_geometric_sharpening_is_the_weighted_geometric_mean():
    members = [[0.9, 0.0, 0.1, 0.0], [0.0, 0.3, 0.4, 0.3]]
    out = sharpened("geometric", [0.45, 0.15, 0.25, 0.15], members)
    assert np.allclose(out, [0.0, 0.0, 0.2, 0.0])
    assert np.allclose(sharpened("none", [0.4, 0.3, 0.2, 0.1]), [0.4, 0.3, 0.2, 0.1])


# ---------------------------------------------------------------------- GaC


def test_gac_equals_the_dense_mean_over_bytes():
    first, second = words("ab", "cd"), words("ab", "zz")
    opinions = [
        Opinion(vocabulary=first, probs={b"ab": 0.3, b"cd": 0.25}, own=b"ab"),
        Opinion(vocabulary=second, probs={b"cd"[:1]: 0.2, b"ab": 0.3, b"zz": 0.4}, own=b"ab"),
    ]
    merged = GaC(sharpening="none").merge(point_of(opinions))
    scores = {c.token: c.probability for c in merged.candidates}
    assert np.isclose(scores[b"ab"], 0.3, atol=1e-4)
    assert np.isclose(scores[b"zz"], 0.2, atol=1e-4)
    assert merged.chosen == b"ab"


def test_gac_gate_keeps_a_confident_drafter():
    vocabulary = words()
    sure = point_of(
        [
            Opinion(vocabulary=vocabulary, probs={b"a": 0.55}),
            Opinion(vocabulary=vocabulary, probs={b"b": 0.9}, own=b"a"),
        ]
    )
    assert GaC().consensus(sure, 0.5) is Outcome.GATE
    assert UniTE().consensus(sure, 0.5) is None


def test_gac_winner_may_take_several_drafter_tokens():
    drafter, verifier = words(), words("cat")
    point = point_of(
        [
            Opinion(vocabulary=drafter, probs={b"a": 0.2}),
            Opinion(vocabulary=verifier, probs={b"cat": 0.9}),
        ]
    )
    assert GaC().merge(point).chosen == b"cat"
    assert len(drafter.ids_of(b"cat")) == 3


# ---------------------------------------------------------------------- prefix mass

TOY = Vocabulary(characters(["ab", "abc", "bc", "ca", "cab"], special=("<|im_end|>",)))
LETTERS = [i for i, token in enumerate(TOY.tokens) if token and set(token) <= set(b"abc")]


class Chain:
    """A toy verifier whose next-token distribution depends on the last two ids."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def logits(self, ids: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *ids[-2:], len(ids) % 3])
        logits = np.full(TOY.width, -30.0)
        logits[LETTERS] = rng.normal(size=len(LETTERS)) * 2
        logits[TOY.symbols.end_id] = rng.normal()
        return logits

    def probs(self, ids: tuple[int, ...]) -> np.ndarray:
        weights = np.exp(self.logits(ids))
        weights[~TOY.symbols.usable] = 0.0
        return weights / weights.sum()

    def scores(self, *prefixes: tuple[int, ...]) -> DenseScores:
        table = torch.tensor(np.stack([self.logits(p) for p in prefixes]), dtype=torch.float32)
        return DenseScores(table, SymbolColumns.of(TOY.symbols, "cpu"))


def enumerated_mass(chain: Chain, ids: tuple[int, ...], text: bytes) -> float:
    """The slow reference: sum over every tokenization of a text that begins with `text`."""
    total = 0.0
    for token_id, probability in enumerate(chain.probs(ids)):
        token = TOY.tokens[token_id]
        if not token or probability == 0.0:
            continue
        if token.startswith(text):
            total += probability
        elif text.startswith(token):
            total += probability * enumerated_mass(chain, (*ids, token_id), text[len(token) :])
    return total


def view_on(chain: Chain, own: list[int], *, exact: bool) -> MemberView:
    scores = chain.scores(*(tuple(own[:n]) for n in range(len(own) + 1)))
    return MemberView(
        name="v",
        vocabulary=TOY,
        scores=scores,
        position=0,
        weight=0.5,
        following=own,
        path=[(scores, n) for n in range(len(own) + 1)],
        after=(lambda ids: chain.scores(tuple(ids))) if exact else None,
    )


OTHER = Vocabulary(characters(["abcab", "cabc"]))
DRAFTER = point_of([Opinion(vocabulary=OTHER, probs={b"a": 0.5})]).drafter


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.text("abc", min_size=1, max_size=6), st.text("abc", max_size=6))
def test_prefix_mass_exact_equals_enumeration_of_tokenizations(seed, text, drafted):
    chain = Chain(seed)
    view = view_on(chain, TOY.encode(drafted.encode()).ids if drafted else [], exact=True)
    point = Point(views=(DRAFTER, view), drafted=b"a")
    mass = PrefixMass(exact=True).mass(point, view, text.encode())
    assert np.isclose(mass, enumerated_mass(chain, (), text.encode()), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.one_of(st.text("abc", max_size=6), st.just("ax")), min_size=1, max_size=5),
    st.text("abc", max_size=6),
    st.booleans(),
)
def test_prefix_masses_of_many_texts_are_those_of_each(seed, texts, drafted, exact):
    chain, method = Chain(seed), PrefixMass(exact=exact)
    view = view_on(chain, TOY.encode(drafted.encode()).ids if drafted else [], exact=exact)
    point = Point(views=(DRAFTER, view), drafted=b"a")
    masses = method._masses(point, view, [text.encode() for text in texts])
    assert np.allclose(masses, [method.mass(point, view, text.encode()) for text in texts], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.text("abc", min_size=1, max_size=6))
def test_prefix_mass_without_extra_passes_is_an_upper_bound(seed, text):
    chain = Chain(seed)
    view = view_on(chain, TOY.encode(text.encode()).ids, exact=False)
    point = Point(views=(DRAFTER, view), drafted=b"a")
    bound = PrefixMass().mass(point, view, text.encode())
    assert enumerated_mass(chain, (), text.encode()) - 1e-6 <= bound <= 1.0


def test_prefix_mass_of_ends_and_of_the_same_tokenizer_is_the_plain_probability():
    chain = Chain(3)
    view = view_on(chain, [], exact=False)
    other = Point(views=(DRAFTER, view), drafted=b"a")
    same = Point(views=(view, view), drafted=b"a")
    probs = chain.probs(())
    assert np.isclose(PrefixMass().mass(other, view, END), probs[TOY.symbols.end_id], atol=1e-6)
    view.memo.clear()
    assert np.isclose(PrefixMass().mass(same, view, b"ab"), probs[TOY.ids[b"ab"]], atol=1e-6)


def view_of(vocabulary: Vocabulary, own: list[bytes], *probs: dict[bytes, float], weight: float = 0.5) -> MemberView:
    """A member whose tokens of the draft are `own`, with its distributions before each of them (and after them)."""
    first, *rest = (point_of([Opinion(vocabulary=vocabulary, probs=p)]).drafter.scores.dense([0]) for p in probs)
    scores = DenseScores(torch.cat([first, *rest]), SymbolColumns.of(vocabulary.symbols, "cpu"))
    ids = [vocabulary.ids[key] for key in own]
    return MemberView(
        name="m",
        vocabulary=vocabulary,
        scores=scores,
        position=0,
        weight=weight,
        own=ids[0],
        own_is_best=int(scores.top1()[0][0]) == ids[0],
        following=ids,
        path=[(scores, n) for n in range(len(probs))],
    )


def test_prefix_mass_repairs_the_first_piece_fallacy():
    # H1 of docs/concepts.md: a verifier that merely expects a space agrees with every number under C1, not under C1'
    drafter, verifier = Vocabulary(characters([" 49", " 52"])), Vocabulary(characters([]))
    space = Opinion(vocabulary=verifier, probs={b" ": 0.95}, own=b" ")
    point = point_of([Opinion(vocabulary=drafter, probs={b" 49": 0.45, b" 52": 0.4}), space])
    assert UniTE().consensus(point, 0.5) is Outcome.C1
    # after the space (on the verifier's own path) it wants a 5
    view = view_of(verifier, [b" ", b"5"], {b" ": 0.95}, {b"5": 0.9}, {b"2": 0.9})
    repaired = Point(views=(point.drafter, view), drafted=b" 49")
    assert PrefixMass().consensus(repaired, 0.5) is None
    assert PrefixMass().merge(repaired).chosen == b" 52"


def test_prefix_mass_keeps_the_drafter_on_its_own_tokens_where_it_has_some():
    drafter, verifier = Vocabulary(characters([" 49"])), Vocabulary(characters([]))
    opinions = [
        Opinion(vocabulary=drafter, probs={b"x": 0.4, b" 49": 0.3}),
        Opinion(vocabulary=verifier, probs={b" ": 0.95}),
    ]
    point = point_of(opinions)
    assert PrefixMass(top_k=1).merge(point).chosen == b" 49"
    keys = PrefixMass(top_k=1).distribution(point, 1.0)
    assert b" 49" in keys
    assert all(key == END or key in drafter.ids for key in keys)


DIGITS = Vocabulary(characters([]))
NUMBERS = Vocabulary(characters([" 49", " 52"]))


def number_point(*, drafter_sure: float, verifier: dict[bytes, float], is_open: bool = False) -> Point:
    """The drafter writes " 49" digit by digit, the verifier has it as one token."""
    first = view_of(DIGITS, [b" ", b"4", b"9"], {b" ": 0.99}, {b"4": drafter_sure, b"5": 0.3}, {b"9": 0.9})
    second = view_of(NUMBERS, [b" 49"], verifier, {b".": 0.9})
    return Point(views=(first, second), drafted=b" ", rest=b"49", is_open=is_open)


def test_prefix_mass_judges_the_span_where_the_drafter_cuts_finer():
    # the mirror image of H1: nobody is asked about the digits, since the verifier's token spans them
    doubted = number_point(drafter_sure=0.6, verifier={b" 52": 0.8, b" 49": 0.1})
    assert PrefixMass().consensus(doubted, 0.5) is None
    merged = PrefixMass().merge(doubted)
    assert (merged.chosen, merged.drafted) == (b" 52", b" 49")
    believed = number_point(drafter_sure=0.6, verifier={b" 52": 0.1, b" 49": 0.8})
    assert PrefixMass().consensus(believed, 0.5) is Outcome.C1
    assert PrefixMass().merge(believed).chosen == b" 49"
    sure = number_point(drafter_sure=0.99, verifier={b" 52": 0.5, b" 49": 0.4})
    assert PrefixMass().consensus(sure, 0.5) is Outcome.C2


def test_prefix_mass_lets_the_draft_win_that_no_verifier_names():
    point = number_point(drafter_sure=0.95, verifier={b" 52": 0.5, b" 49": 0.4})
    assert PrefixMass(verifier_top_k=1).merge(point).chosen == b" 49"


def test_prefix_mass_of_one_tokenizer_takes_tokens_as_they_are():
    vocabulary = Vocabulary(characters(["ab"]))
    opinion = Opinion(vocabulary=vocabulary, probs={b"a": 0.4, b"ab": 0.3, b"b": 0.2})
    merged = PrefixMass().merge(point_of([opinion, opinion]))
    assert merged.chosen == b"a"
    assert np.isclose(merged.candidates[0].probability, 0.4, atol=1e-3)


def test_mass_of_a_candidate_goes_from_its_longest_prefix():
    assert _longest_prefixes([b"a", END, b"abc", b"ab", b"b"]) == [(2, 3), (3, 0)]


def test_prefix_mass_of_candidates_excludes_longer_ones():
    doubted = number_point(drafter_sure=0.6, verifier={b" 52": 0.8, b" 49": 0.1})
    found = {c.token: c for c in PrefixMass().merge(doubted).candidates}
    verifier = {token: c.probabilities["m"] for token, c in found.items()}  # both are called m; the last one stays
    assert np.isclose(verifier[b" 52"], 0.8, atol=1e-3)
    assert np.isclose(verifier[b" 49"], 0.1, atol=1e-3)
    assert verifier.get(b" ", 0.0) < 0.1  # nearly all that begins with a space goes on with a number


def test_prefix_mass_asks_for_the_drafters_likeliest_beginning_of_each_verifier_token():
    drafter = Opinion(vocabulary=words(" Correct", "xy", "xz"), probs={b" Correct": 0.6, b"xz": 0.2, b"xy": 0.1})
    wants = {b" Cor": 0.4, END: 0.3, b"x": 0.2, b" zebra": 0.08}
    verifier = Opinion(vocabulary=words(" Cor", " zebra"), probs=wants)
    tokens, texts = PrefixMass(top_k=1, verifier_top_k=4)._candidates(point_of([drafter, verifier]))
    assert tokens == [b" Correct", END, b"xz", END]  # the likeliest with " Cor" is there already
    assert texts == [b" zebra"]


def test_prefix_mass_of_a_drafter_follows_its_own_draft():
    point = number_point(drafter_sure=0.6, verifier={b" 52": 0.8})
    own = PrefixMass().mass(point, point.drafter, b" 49")
    assert np.isclose(own, 0.99 * 0.6 * 0.9, atol=1e-3)
    unknown = PrefixMass().mass(point, point.drafter, b" 52")  # what follows the 5 is not known: at most 1
    assert np.isclose(unknown, 0.99 * 0.3, atol=1e-3)


@pytest.mark.parametrize(
    ("here", "waits"),
    [({b" 49": 0.6, b" ": 0.3}, True), ({b" 49": 0.1, b" ": 0.8}, False)],
)
def test_prefix_mass_waits_where_a_verifier_expects_a_longer_token(here, waits):
    first = view_of(DIGITS, [b" "], {b" ": 0.9})
    second = view_of(NUMBERS, [b" "], here, {b"4": 0.9})
    point = Point(views=(first, second), drafted=b" ", is_open=True)
    assert PrefixMass().waits(point) is waits
    same = view_of(NUMBERS, [b" "], here, {b"4": 0.9})
    assert not PrefixMass().waits(Point(views=(same, same), drafted=b" ", is_open=True))  # the same boundaries
    assert not UniTE().waits(point)
    assert not GaC().waits(point)


def test_sorted_ranges_cover_each_prefix_once():
    for length, letters in itertools.product((1, 2, 3), itertools.product(b"abc", repeat=2)):
        prefix = bytes(letters)[:length]
        low, high = TOY.prefix_range(prefix)
        found = {int(i) for i in TOY.sorted_ids[low:high]}
        assert found == {i for i, token in enumerate(TOY.tokens) if token and token.startswith(prefix)}

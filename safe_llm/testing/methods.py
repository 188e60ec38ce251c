"""What any ensemble method must do, and how to build a position to try it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from safe_llm.backends.dense import DenseScores, SymbolColumns
from safe_llm.events import Outcome
from safe_llm.methods.base import END, MemberView, Method, Point
from safe_llm.testing.tokenizers import byte_level, characters, metaspace
from safe_llm.vocabulary import Vocabulary

__all__ = ["MethodConformance", "Opinion", "point_of"]


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """One member's distribution at a position.

    Attributes:
        vocabulary: The member's vocabulary.
        probs: Token bytes (b"" is END) -> probability; what is left over is spread over the other tokens.
        own: Bytes of the member's own token here; by default its likeliest.
        weight: Its weight, on any scale.
    """

    vocabulary: Vocabulary
    probs: Mapping[bytes, float]
    own: bytes | None = None
    weight: float = 1.0

    def token_id(self, key: bytes) -> int:
        """The member's token for a key."""
        end_id = self.vocabulary.symbols.end_id
        return end_id if key == END and end_id is not None else self.vocabulary.ids[key]


def point_of(opinions: Sequence[Opinion]) -> Point:
    """Build the candidate position at which members have these opinions, the drafter first."""
    total = sum(opinion.weight for opinion in opinions)
    views = tuple(_view(f"member{i}", opinion, opinion.weight / total) for i, opinion in enumerate(opinions))
    own = views[0].own
    return Point(views=views, drafted=END if own is None else views[0].key(own))


def _view(name: str, opinion: Opinion, weight: float) -> MemberView:
    vocabulary = opinion.vocabulary
    usable = int(vocabulary.symbols.usable.sum())
    rest = max(1e-9, 1.0 - sum(opinion.probs.values())) / max(1, usable - len(opinion.probs))
    logits = torch.full((1, vocabulary.width), float(np.log(rest)))
    for key, probability in opinion.probs.items():
        logits[0, opinion.token_id(key)] = float(np.log(max(probability, 1e-30)))
    scores = DenseScores(logits, SymbolColumns.of(vocabulary.symbols, "cpu"))
    best = int(scores.top1()[0][0])
    own = best if opinion.own is None else opinion.token_id(opinion.own)
    return MemberView(
        name=name,
        vocabulary=vocabulary,
        scores=scores,
        position=0,
        weight=weight,
        own=own,
        own_is_best=own == best,
    )


class MethodConformance:
    """Tests that every method must pass. Subclass it in a test module and implement `make_method`."""

    def make_method(self) -> Method:
        """Return the method under test."""
        raise NotImplementedError

    @staticmethod
    def _vocabularies() -> tuple[Vocabulary, Vocabulary]:
        sentencepiece = metaspace()
        ends = [i for text in ("</s>",) if (i := sentencepiece.token_to_id(text)) is not None]
        return Vocabulary(byte_level()), Vocabulary(sentencepiece, end_ids=ends)

    def test_identical_members_get_their_own_favourite(self) -> None:
        """Merging copies of one distribution changes nothing."""
        vocabulary = Vocabulary(characters([]))
        opinion = Opinion(vocabulary=vocabulary, probs={b"a": 0.4, b"b": 0.3, b"c": 0.2}, own=b"b")
        assert self.make_method().merge(point_of([opinion, opinion, opinion])).chosen == b"a"

    def test_members_that_agree_need_no_ensemble(self) -> None:
        """A token that everybody gives 0.9 is accepted by consensus."""
        first, second = self._vocabularies()
        point = point_of([Opinion(vocabulary=v, probs={b"a": 0.9}) for v in (first, second)])
        assert self.make_method().consensus(point, 0.5) in (Outcome.C1, Outcome.C2)

    def test_members_with_one_tokenizer_never_wait(self) -> None:
        """A boundary of one is a boundary of all: more text cannot change it."""
        vocabulary = Vocabulary(byte_level())
        opinion = Opinion(vocabulary=vocabulary, probs={b"a": 0.4})
        assert not self.make_method().waits(replace(point_of([opinion, opinion]), is_open=True))

    def test_members_that_disagree_have_no_consensus(self) -> None:
        """Neither C1 nor C2 may hold where each member prefers another token, weakly."""
        first, second = self._vocabularies()
        point = point_of(
            [
                Opinion(vocabulary=first, probs={b"a": 0.4, b"b": 0.3}),
                Opinion(vocabulary=second, probs={b"b": 0.6, b"a": 0.01}, own=b"a"),
            ]
        )
        assert self.make_method().consensus(point, 0.5) is None
        assert self.make_method().merge(point).chosen == b"b"

    def test_end_is_one_symbol_across_members(self) -> None:
        """END has other ids and spellings in every vocabulary, and is the same candidate."""
        first, second = self._vocabularies()
        point = point_of(
            [
                Opinion(vocabulary=first, probs={END: 0.35, b"a": 0.4}, own=b"a"),
                Opinion(vocabulary=second, probs={END: 0.8, b"a": 0.1}, own=b"a"),
            ]
        )
        assert self.make_method().merge(point).chosen == END

    def test_weights_decide(self) -> None:
        """A member with nearly all the weight gets its way."""
        vocabulary = Vocabulary(characters([]))
        one = Opinion(vocabulary=vocabulary, probs={b"a": 0.45, b"b": 0.2}, weight=1.0, own=b"a")
        other = Opinion(vocabulary=vocabulary, probs={b"b": 0.45, b"a": 0.2}, weight=20.0, own=b"a")
        assert self.make_method().merge(point_of([one, other])).chosen == b"b"

    def test_what_is_chosen_can_be_written_by_the_drafter(self) -> None:
        """The winner is spelled by the drafter's tokens; candidates name every member; best comes first."""
        first, second = self._vocabularies()
        point = point_of(
            [
                Opinion(vocabulary=first, probs={b" ": 0.3, b"4": 0.2}, own=b" "),
                Opinion(vocabulary=second, probs={"é".encode(): 0.7}, own=b" "),
            ]
        )
        merged = self.make_method().merge(point)
        assert merged.chosen == END or first.ids_of(merged.chosen)
        assert 1 <= len(merged.candidates) <= 5
        scores = [candidate.probability for candidate in merged.candidates]
        assert scores == sorted(scores, reverse=True)
        assert all(set(c.probabilities) == {"member0", "member1"} for c in merged.candidates)

    def test_distribution_sums_to_one_and_cools_to_the_favourite(self) -> None:
        """For sampling: a proper distribution, greedy as the temperature goes to 0."""
        first, second = self._vocabularies()
        point = point_of(
            [
                Opinion(vocabulary=first, probs={b"a": 0.5, b"b": 0.2}),
                Opinion(vocabulary=second, probs={b"a": 0.6, b"c": 0.2}),
            ]
        )
        method = self.make_method()
        warm = method.distribution(point, 1.0)
        assert abs(sum(warm.values()) - 1.0) < 1e-5
        assert min(warm.values()) >= 0.0
        cold = method.distribution(point, 1e-3)
        assert max(cold, key=lambda key: cold[key]) == b"a"
        assert cold[b"a"] > 0.99

    def test_a_method_is_a_value(self) -> None:
        """Methods are compared and hashed by their parameters, and hold no state."""
        assert self.make_method() == self.make_method()
        assert hash(self.make_method()) == hash(self.make_method())

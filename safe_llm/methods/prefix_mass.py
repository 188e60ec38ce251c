"""Prefix mass: every member is asked for the probability of a *string*, over its own tokenizations.

    pi_m(s | x) =   sum of P_m(u | x) over tokens u that start with s
                  + sum of P_m(u | x) * pi_m(s without u | x u) over tokens u that are proper prefixes of s

The published rules compare single tokens, which goes wrong where tokenizers cut words or numbers differently. Here the
string in question is a *span*: the drafted text from one token boundary of all members to the next. This method is
this project's own; docs/concepts.md gives the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from safe_llm.backends.base import FloatArray, Ints, Scores
from safe_llm.events import Outcome
from safe_llm.methods.base import END, MemberView, Merged, Point, best
from safe_llm.sampling import softmax

__all__ = ["PrefixMass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMass:
    """Consensus and choice by the mass of strings.

    Where all members share one tokenizer, a string's mass is its token's plain probability.

    Attributes:
        top_k: The drafter's tokens among the candidates.
        verifier_top_k: For each of this many best tokens of a verifier, the drafter's likeliest token that starts
            with it is a candidate too, or the token's own text where the drafter has none.
        exact: Ask a verifier about continuations that are not on its tokenization of the draft, one forward pass
            each, instead of bounding them by 1.
    """

    top_k: int = 10
    verifier_top_k: int = 5
    exact: bool = False

    @property
    def needs_dense(self) -> bool:
        """Sums over ranges of the vocabulary need full rows."""
        return True

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        """C1': every verifier gives the drafted span over 1/2. C2': the weighted mean is over `threshold`."""
        masses = [self.mass(point, view, point.span) for view in point.verifiers]
        if all(mass > 0.5 for mass in masses):
            return Outcome.C1
        mean = point.drafter.weight * self.mass(point, point.drafter, point.span)
        mean += sum(view.weight * mass for view, mass in zip(point.verifiers, masses, strict=True))
        return Outcome.C2 if mean > threshold else None

    def keeps_drafter(self, point: Point) -> bool:  # noqa: ARG002 - there is no gate
        """There is no gate."""
        return False

    def waits(self, point: Point) -> bool:
        """Whether a verifier would rather have a longer token at the end of the draft than the one it has there.

        Then that end will hardly stay a boundary, and what stands before it is better judged as a whole.
        """
        return any(_would_go_on(view) for view in point.verifiers if not _shares_tokenizer(point, view))

    def merge(self, point: Point) -> Merged:
        """Argmax over the candidates of the weighted mean of exclusive masses."""
        tokens, texts = self._candidates(point)
        keys, members = self._exclusive_masses(point, [*tokens, point.span, *texts])
        weights = np.array([view.weight for view in point.views])
        return replace(best(point, keys, weights @ members, members), drafted=point.span)

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """The weighted mean of exclusive masses of the drafter's tokens, tempered and normalized."""
        keys, members = self._exclusive_masses(point, self._candidates(point)[0])
        weights = np.array([view.weight for view in point.views])
        with np.errstate(divide="ignore"):
            return dict(zip(keys, softmax(np.log(weights @ members), temperature).tolist(), strict=True))

    # ------------------------------------------------------------------ masses

    def mass(self, point: Point, view: MemberView, text: bytes) -> float:
        """Return pi(text): the probability that the member's continuation begins with these bytes."""
        return float(self._masses(point, view, [text])[0])

    def _masses(self, point: Point, view: MemberView, texts: Sequence[bytes]) -> FloatArray:
        """Return the mass of each text [U], END's too."""
        if _has_one_tokenizer(point):
            tokens = [view.id_of(text) for text in texts]
            return _sums(view.scores, view.position, [[] if i is None else [i] for i in tokens])
        path = tuple(view.path) or ((view.scores, view.position),)
        return np.minimum(1.0, self._string_masses(view, texts, _Place(path, (), view.following)))

    def _string_masses(self, view: MemberView, texts: Sequence[bytes], place: _Place) -> FloatArray:
        vocabulary = view.vocabulary
        beginnings = dict.fromkeys(text[:n] for text in texts for n in range(1, len(text)))
        pieces = [piece for piece in beginnings if piece in vocabulary.ids]
        groups = [_ids_of_beginning(view, text) for text in texts]
        sums = _sums(*place.path[0], [*groups, *map(vocabulary.ids_with, pieces)])
        masses, mass_of = sums[: len(texts)], dict(zip(pieces, sums[len(texts) :].tolist(), strict=True))
        for piece in pieces:
            following = self._follow(view, piece, place) if mass_of[piece] > 0.0 else None
            if following is not None:
                longer = [i for i, text in enumerate(texts) if len(text) > len(piece) and text.startswith(piece)]
                rests = [texts[i][len(piece) :] for i in longer]
                masses[longer] += mass_of.pop(piece) * self._string_masses(view, rests, following)
        # what follows on the other pieces is not known: at most all of it
        masses += [sum(mass_of.get(text[:n], 0.0) for n in range(1, len(text))) for text in texts]
        return masses

    def _follow(self, view: MemberView, piece: bytes, place: _Place) -> _Place | None:
        """Where the member stands after one more token with these bytes, if its scores there are known."""
        if len(place.path) > 1 and place.rest and view.vocabulary.surface(place.rest[0]) == piece:
            return _Place(place.path[1:], (*place.ids, place.rest[0]), place.rest[1:])
        if not self.exact or view.after is None:
            return None
        ids = (*place.ids, view.vocabulary.ids[piece])
        key = ("after", ids, view.position)
        if key not in view.memo:
            view.memo[key] = view.after(ids)
        return _Place(((view.memo[key], 0),), ids, ())

    # ------------------------------------------------------------------ candidates

    def _exclusive_masses(self, point: Point, candidates: Sequence[bytes]) -> tuple[list[bytes], FloatArray]:
        """Return the candidates [U] that the drafter can write, and each member's exclusive mass of them [M, U].

        A candidate's mass includes that of every longer one which starts with it, so short ones would always win. The
        exclusive mass is what is left of it without them: the candidates are then events that exclude each other.
        """
        keys = [key for key in dict.fromkeys(candidates) if point.spellable(key)]
        masses = np.stack([self._masses(point, view, keys) for view in point.views])
        if _has_one_tokenizer(point):
            return keys, masses  # tokens exclude each other as they are
        members = masses.copy()
        for child, parent in _longest_prefixes(keys):
            members[:, parent] -= masses[:, child]
        return keys, np.maximum(members, 0.0)  # bounds by 1 may leave less than nothing

    def _candidates(self, point: Point) -> tuple[list[bytes], list[bytes]]:
        """Return tokens of the drafter, and texts that it has to spell with several.

        The first are its own best, and its likeliest that start with a best token of a verifier; the second are such
        tokens of verifiers that it has none for.
        """
        best = point.drafter.top(self.top_k)[0]
        tokens, texts = [*best], []
        for view in point.verifiers:
            for token in view.top(self.verifier_top_k)[0]:
                if token != END and any(key.startswith(token) for key in best):
                    continue  # the drafter's likeliest is among its best
                likeliest = END if token == END else _likeliest_with_prefix(point.drafter, token)
                if likeliest is None:
                    texts.append(token)
                else:
                    tokens.append(likeliest)
        return [*tokens, END], texts


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a member stands: what is known from there on, the ids since the point, the rest of its tokens of the draft.

    `path` begins with the scores of what comes next.
    """

    path: Sequence[tuple[Scores, int]]
    ids: tuple[int, ...]
    rest: Sequence[int]


def _shares_tokenizer(point: Point, view: MemberView) -> bool:
    known = view.memo.get("shares_tokenizer")
    if known is None:
        known = view.memo["shares_tokenizer"] = view.vocabulary.same_as(point.drafter.vocabulary)
    return bool(known)


def _has_one_tokenizer(point: Point) -> bool:
    return all(_shares_tokenizer(point, view) for view in point.verifiers)


def _would_go_on(view: MemberView) -> bool:
    """Whether the member gives tokens that extend the last one of its draft more mass than that one."""
    surface = view.vocabulary.surface(view.following[-1]) if view.following else END
    if surface == END:
        return False
    scores, position = view.path[len(view.following) - 1]
    longer, last = _sums(scores, position, [_ids_of_beginning(view, surface), view.vocabulary.ids_with(surface)])
    return bool(longer > 2 * last)


def _longest_prefixes(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """Indices of each key that has proper prefixes among the keys, and of the longest of these."""
    found = []
    for child, key in enumerate(keys):
        prefixes = [
            i for i, other in enumerate(keys) if other != END and len(other) < len(key) and key.startswith(other)
        ]
        if prefixes:
            found.append((child, max(prefixes, key=lambda i: len(keys[i]))))
    return found


def _ids_of_beginning(view: MemberView, text: bytes) -> Ints:
    """The tokens that start with `text`; END's for END."""
    if text != END:
        low, high = view.vocabulary.prefix_range(text)
        return view.vocabulary.sorted_ids[low:high]
    end_id = view.vocabulary.symbols.end_id
    return [] if end_id is None else [end_id]


def _sums(scores: Scores, position: int, groups: Sequence[Ints]) -> FloatArray:
    """Return the probability of each group of ids at a position [G], all by one look-up."""
    sizes = np.array([len(group) for group in groups])
    ids = np.concatenate(groups, dtype=np.int64, casting="unsafe")  # an empty list has no integers
    probs = np.exp(np.append(scores.log_probs([position], ids), -np.inf))  # a last group may be empty
    sums: FloatArray = np.add.reduceat(probs, sizes.cumsum() - sizes)
    return np.where(sizes, sums, 0.0)


def _likeliest_with_prefix(drafter: MemberView, prefix: bytes) -> bytes | None:
    """The drafter's likeliest token that starts with `prefix`, ties to the lowest id; None if there is none."""
    low, high = drafter.vocabulary.prefix_range(prefix)
    if low == high:
        return None
    ids = drafter.vocabulary.sorted_ids[low:high]
    logits = drafter.scores.logits([drafter.position], ids)
    return drafter.key(int(ids[logits == logits.max()].min()))

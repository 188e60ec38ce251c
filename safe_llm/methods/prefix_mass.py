"""Prefix mass: every verifier is asked for the probability of the *string*, over its own tokenizations.

    pi_v(s | x) =   sum of P_v(u | x) over tokens u that start with s
                  + sum of P_v(u | x) * pi_v(s without u | x u) over tokens u that are proper prefixes of s

The published rules compare the first piece of a verifier's tokenization with the drafter's token, which goes wrong
where the tokenizers cut words or numbers differently. This method is this project's own; docs/concepts.md gives the
argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from safe_llm.backends.base import FloatArray, Scores
from safe_llm.events import Outcome
from safe_llm.methods.base import END, MemberView, Merged, Point, best
from safe_llm.sampling import softmax

__all__ = ["PrefixMass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMass:
    """Consensus and choice by the mass of strings.

    Attributes:
        top_k: The drafter's tokens among the candidates.
        verifier_top_k: For each of this many best tokens of a verifier, the drafter's likeliest token that starts
            with it is a candidate too.
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
        """C1': every verifier gives the drafted string over 1/2. C2': the weighted mean is over `threshold`."""
        masses = [self.mass(point, view, point.drafted) for view in point.verifiers]
        if all(mass > 0.5 for mass in masses):
            return Outcome.C1
        mean = point.drafter.weight * point.drafter.own_probability
        mean += sum(view.weight * mass for view, mass in zip(point.verifiers, masses, strict=True))
        return Outcome.C2 if mean > threshold else None

    def keeps_drafter(self, point: Point) -> bool:  # noqa: ARG002 - there is no gate
        """There is no gate."""
        return False

    def merge(self, point: Point) -> Merged:
        """Argmax of w_D P_D(c) + sum of w_v pi_v(c) over the candidates; all of them are tokens of the drafter."""
        keys, members = self._masses(point)
        weights = np.array([view.weight for view in point.views])
        return best(point, keys, weights @ members, members)

    def distribution(self, point: Point, temperature: float) -> Mapping[bytes, float]:
        """The candidates' scores, tempered and normalized: masses of strings overlap, so they do not sum to 1."""
        keys, members = self._masses(point)
        weights = np.array([view.weight for view in point.views])
        with np.errstate(divide="ignore"):
            return dict(zip(keys, softmax(np.log(weights @ members), temperature).tolist(), strict=True))

    # ------------------------------------------------------------------ masses

    def mass(self, point: Point, view: MemberView, text: bytes) -> float:
        """Return pi_v(text): the probability that the verifier's continuation begins with these bytes.

        A verifier with the drafter's own tokenizer gives its plain token probability.
        """
        if text == END or _shares_tokenizer(point, view):
            token_id = view.id_of(text)
            if token_id is None:
                return 0.0
            return float(np.exp(view.scores.log_probs([view.position], [token_id])[0]))
        return min(1.0, self._string_mass(view, text, _Place(view.scores, view.position, (), view.following)))

    def _string_mass(self, view: MemberView, text: bytes, place: _Place) -> float:
        vocabulary = view.vocabulary
        cumulative = _cumulative(view, place)
        low, high = vocabulary.prefix_range(text)
        total = float(cumulative[high] - cumulative[low])
        for length in range(1, len(text)):
            piece = text[:length]
            low, high = vocabulary.exact_range(piece)
            mass = float(cumulative[high] - cumulative[low])
            if mass > 0.0:
                following = self._follow(view, piece, place)
                # unknown: at most 1
                total += mass * (1.0 if following is None else self._string_mass(view, text[length:], following))
        return total

    def _follow(self, view: MemberView, piece: bytes, place: _Place) -> _Place | None:
        """Where the verifier stands after one more token with these bytes, if its scores there are known."""
        if place.path and view.vocabulary.surface(place.path[0]) == piece:
            return _Place(view.scores, place.position + 1, (*place.ids, place.path[0]), place.path[1:])
        if not self.exact or view.after is None:
            return None
        ids = (*place.ids, view.vocabulary.ids[piece])
        key = ("after", ids, view.position)
        if key not in view.memo:
            view.memo[key] = view.after(ids)
        return _Place(view.memo[key], 0, ids, ())

    # ------------------------------------------------------------------ candidates

    def _masses(self, point: Point) -> tuple[list[bytes], FloatArray]:
        """Return the candidates [U] and each member's probability of them [M, U]."""
        keys = self._candidates(point)
        drafter = point.drafter
        ids = [token_id for key in keys if (token_id := drafter.id_of(key)) is not None]
        rows = [np.exp(drafter.scores.log_probs([drafter.position] * len(ids), ids))]
        rows += [np.array([self.mass(point, view, key) for key in keys]) for view in point.verifiers]
        return keys, np.stack(rows)

    def _candidates(self, point: Point) -> list[bytes]:
        drafter = point.drafter
        keys = dict.fromkeys(drafter.top(self.top_k)[0])
        for view in point.verifiers:
            for token in view.top(self.verifier_top_k)[0]:
                likeliest = END if token == END else _likeliest_with_prefix(drafter, token)
                if likeliest is not None:
                    keys.setdefault(likeliest)
        keys.setdefault(END)
        return [key for key in keys if drafter.id_of(key) is not None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a verifier stands: scores, the ids since the point, and what is left of its own tokens of the draft."""

    scores: Scores
    position: int
    ids: tuple[int, ...]
    path: Sequence[int]


def _shares_tokenizer(point: Point, view: MemberView) -> bool:
    known = view.memo.get("shares_tokenizer")
    if known is None:
        known = view.memo["shares_tokenizer"] = view.vocabulary.same_as(point.drafter.vocabulary)
    return bool(known)


def _cumulative(view: MemberView, place: _Place) -> FloatArray:
    """Cumulative probability over the byte-sorted vocabulary [S + 1], float64: a range's mass is one difference."""
    key = ("cumulative", id(place.scores), place.position)
    if key not in view.memo:
        logits = place.scores.dense([place.position])[0]
        order = torch.from_numpy(view.vocabulary.sorted_ids).to(logits.device)
        sums = torch.softmax(logits.double(), dim=-1)[order].cumsum(0)
        # the scores are kept with the sums, so that their id() cannot be reused meanwhile
        view.memo[key] = place.scores, np.concatenate([[0.0], sums.cpu().numpy()])
    sums_of: FloatArray = view.memo[key][1]
    return sums_of


def _likeliest_with_prefix(drafter: MemberView, prefix: bytes) -> bytes | None:
    """The drafter's likeliest token that starts with `prefix`, ties to the lowest id; None if there is none."""
    low, high = drafter.vocabulary.prefix_range(prefix)
    if low == high:
        return None
    ids = drafter.vocabulary.sorted_ids[low:high]
    logits = drafter.scores.dense([drafter.position])[0][torch.from_numpy(ids)].cpu().numpy()
    return drafter.key(int(ids[logits == logits.max()].min()))

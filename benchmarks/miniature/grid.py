"""What is compared: members alone, methods, lookaheads, each check taken away, each member as drafter.

Two regimes, each with three members: numbers cut `alike` (d, b, c: digits one by one, only words differ) and
`differently` (a keeps numbers whole, b and c do not). a and d are good at the same skill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from safe_llm.config import EnsembleConfig
from safe_llm.events import Outcome
from safe_llm.methods import MemberView, Merged, Method, Point, make_method

REGIMES = {"alike": "d", "differently": "a"}  # regime -> the member good at sums
METHODS: dict[str, dict[str, Any]] = {
    "UniTE, unsharpened": {"method": "unite", "sharpening": "none"},
    "UniTE, prefix": {"method": "unite", "sharpening": "prefix"},
    "UniTE, geometric": {"method": "unite", "sharpening": "geometric"},
    "GaC": {"method": "gac"},
    "prefix mass": {"method": "prefix-mass"},
}


@dataclass(frozen=True, slots=True)
class NoConsensus:
    """A method without its consensus check: the ensemble acts at every candidate."""

    inner: Method

    @property
    def needs_dense(self) -> bool:
        return self.inner.needs_dense

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        return None

    def keeps_drafter(self, point: Point) -> bool:
        return False

    def waits(self, point: Point) -> bool:
        return self.inner.waits(point)

    def merge(self, point: Point) -> Merged:
        return self.inner.merge(point)

    def distribution(self, point: Point, temperature: float) -> Any:
        return self.inner.distribution(point, temperature)


@dataclass(frozen=True, slots=True)
class NoBoundaries:
    """A method with its consensus check but without the boundary check, for mode `every-token`.

    That mode asks every verifier right behind the text so far, wherever that falls in its tokens; the token it would
    vote for the draft with is the first of its own encoding of the drafted token.
    """

    inner: Method
    threshold: float = 0.5

    @property
    def needs_dense(self) -> bool:
        return self.inner.needs_dense

    def consensus(self, point: Point, threshold: float) -> Outcome | None:
        return self.inner.consensus(point, threshold)

    def keeps_drafter(self, point: Point) -> bool:
        views = (point.drafter, *(_voting(view, point.drafted) for view in point.verifiers))
        return self.inner.consensus(Point(views=views, drafted=point.drafted), self.threshold) is not None

    def waits(self, point: Point) -> bool:
        return self.inner.waits(point)

    def merge(self, point: Point) -> Merged:
        return self.inner.merge(point)

    def distribution(self, point: Point, temperature: float) -> Any:
        return self.inner.distribution(point, temperature)


def _voting(view: MemberView, drafted: bytes) -> MemberView:
    ids = view.vocabulary.ids_of(drafted) if drafted else [view.vocabulary.symbols.end_id]
    own = ids[0] if ids else None
    best = int(view.scores.top1()[0][view.position])
    return MemberView(
        name=view.name,
        vocabulary=view.vocabulary,
        scores=view.scores,
        position=view.position,
        weight=view.weight,
        own=own,
        own_is_best=own == best,
        memo=view.memo,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to answer the problems.

    Attributes:
        regime: `alike` or `differently`.
        members: Names, the drafter first.
        label: The row of the table.
        options: Fields of `EnsembleConfig`.
        without: The check that is taken away: "boundary", "consensus" or "".
    """

    regime: str
    members: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    without: str = ""

    @property
    def key(self) -> str:
        """Identity in the results."""
        return f"{self.regime} | {self.members} | {self.label}"

    def config(self) -> EnsembleConfig:
        """Its configuration."""
        return EnsembleConfig(**{"max_batch_size": 64, "lookahead": 5, **self.options})

    def method(self) -> Method | None:
        """Its method, if it is not the configuration's own."""
        inner = make_method(self.config())
        if self.without == "consensus":
            return NoConsensus(inner)
        return NoBoundaries(inner) if self.without == "boundary" else None


def contenders() -> Iterator[Contender]:
    """Yield everything that is compared."""
    for regime, first in REGIMES.items():
        for name in (first, "b", "c"):
            yield Contender(regime=regime, members=name, label="alone", options={"mode": "drafter"})
        for members in (f"{first}b", f"b{first}", f"{first}bc"):
            yield from _all_of(regime, members)
        for members in (f"b{first}c", f"c{first}b"):
            yield from _some_of(regime, members)
        for lookahead in (3, 8, 16, "adaptive"):
            for label in ("UniTE, prefix", "prefix mass"):
                options = METHODS[label] | {"lookahead": lookahead}
                yield Contender(
                    regime=regime,
                    members=f"{first}b",
                    label=f"SAFE, {label}, lookahead {lookahead}",
                    options=options,
                )


def _all_of(regime: str, members: str) -> Iterator[Contender]:
    """Every method, and two of them without each check."""
    for label in ("UniTE, prefix", "GaC"):
        yield _every_token(regime, members, label)
    for label in METHODS:
        yield _safe(regime, members, label)
    for label in ("UniTE, prefix", "prefix mass"):
        every = {"mode": "every-token"}
        for check, options in (("boundary", every), ("consensus", {})):
            yield Contender(
                regime=regime,
                members=members,
                label=f"SAFE, {label}, no {check} check",
                options=METHODS[label] | options,
                without=check,
            )


def _some_of(regime: str, members: str) -> Iterator[Contender]:
    yield _every_token(regime, members, "UniTE, prefix")
    for label in ("UniTE, prefix", "UniTE, geometric", "prefix mass"):
        yield _safe(regime, members, label)


def _safe(regime: str, members: str, label: str) -> Contender:
    return Contender(regime=regime, members=members, label=f"SAFE, {label}", options=METHODS[label])


def _every_token(regime: str, members: str, label: str) -> Contender:
    options = METHODS[label] | {"mode": "every-token"}
    return Contender(regime=regime, members=members, label=f"every token, {label}", options=options)

"""The table and the plot: accuracies over seeds with intervals, and paired differences to the best member."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corpus import KINDS
from grid import REGIMES, Contender, contenders

Bits = np.ndarray[Any, np.dtype[np.float64]]
RESAMPLES = 10_000


class Results:
    """What every contender got right: [seeds, problems] by key."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.seeds = [json.loads(file.read_text("utf-8")) for file in files]
        self.num_problems = len(next(iter(self.seeds[0].values()))["right"])
        self._resampled = np.random.default_rng(0).integers(0, self.num_problems, (RESAMPLES, self.num_problems))

    def has(self, key: str) -> bool:
        """Whether every seed has it."""
        return all(key in seed for seed in self.seeds)

    def bits(self, key: str) -> Bits:
        """1.0 where the answer was right [seeds, problems]."""
        return np.array([[float(bit) for bit in seed[key]["right"]] for seed in self.seeds])

    def share(self, key: str, part: str, of: str = "tokens") -> float:
        """A count over another, summed over the seeds."""
        return sum(seed[key][part] for seed in self.seeds) / sum(seed[key][of] for seed in self.seeds)

    def outcome(self, key: str, name: str) -> float:
        """Share of the tokens that had this outcome."""
        return sum(s[key]["outcomes"].get(name, 0) for s in self.seeds) / sum(s[key]["tokens"] for s in self.seeds)

    def interval(self, per_problem: Bits) -> tuple[float, float]:
        """95 % percentile bootstrap of a mean over problems [problems]; a problem keeps its seeds together."""
        means = per_problem[self._resampled].mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        return float(low), float(high)

    def best_member(self, contender: Contender) -> str:
        """Key of the best of the contender's members alone, by mean over the seeds."""
        alone = [f"{contender.regime} | {name} | alone" for name in contender.members]
        return max(alone, key=lambda key: self.bits(key).mean())


def markdown(results: Results) -> str:
    """Return one table per regime and set of members."""
    parts: list[str] = []
    for regime in REGIMES:
        for members, group in _groups(regime):
            rows = [_row(results, contender) for contender in group if results.has(contender.key)]
            if rows:
                parts += [f"**Numbers cut {regime}, {_title(members)}**", "", *HEAD, *rows, ""]
    return "\n".join(parts)


HEAD = (
    "| | accuracy % (95 % interval) | seeds | to the best member (paired) | "
    + " ".join(KINDS)
    + " | E/T % | replaced % "
    "| off the boundaries % |",
    "|---|---|---|---|---|---|---|---|",
)


def _groups(regime: str) -> Iterator[tuple[str, list[Contender]]]:
    grouped: dict[str, list[Contender]] = {}
    for contender in contenders():
        if contender.regime == regime:
            grouped.setdefault(contender.members if len(contender.members) > 1 else "", []).append(contender)
    yield from grouped.items()


def _title(members: str) -> str:
    return f"{members[0]} drafts, {' and '.join(members[1:])} verify" if members else "members alone"


def _row(results: Results, contender: Contender) -> str:
    key = contender.key
    bits = results.bits(key)
    low, high = results.interval(bits.mean(axis=0))
    label = contender.label if len(contender.members) > 1 else contender.members
    cells = [
        label,
        f"{100 * bits.mean():.1f} ({100 * low:.1f} to {100 * high:.1f})",
        " ".join(f"{100 * seed.mean():.1f}" for seed in bits),
        _difference(results, contender, bits),
        " ".join(f"{100 * bits[:, i :: len(KINDS)].mean():.0f}" for i in range(len(KINDS))),
    ]
    if len(contender.members) > 1:
        cells += [f"{100 * results.share(key, part):.1f}" for part in ("ensembled", "replaced")]
        cells.append(f"{100 * results.outcome(key, 'oov-like'):.1f}")
    else:
        cells += ["", "", ""]
    return "| " + " | ".join(cells) + " |"


def _difference(results: Results, contender: Contender, bits: Bits) -> str:
    if len(contender.members) == 1:
        return ""
    differences = (bits - results.bits(results.best_member(contender))).mean(axis=0)
    low, high = results.interval(differences)
    return f"{100 * differences.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def plot(results: Results, file: Path) -> None:
    """Draw accuracies of the main contenders, one panel per regime."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(REGIMES), figsize=(12, 6.5), sharex=True, layout="constrained")
    for axis, (regime, first) in zip(axes, REGIMES.items(), strict=True):
        shown = [
            c
            for c in contenders()
            if c.regime == regime and c.members in (first, "b", "c", f"{first}b", f"{first}bc") and results.has(c.key)
            if "lookahead" not in c.label
        ]
        _panel(axis, results, shown[::-1], f"numbers cut {regime}")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, results: Results, shown: Sequence[Contender], title: str) -> None:
    colours: Mapping[str, str] = {"alone": "#888888", "every": "#c0504d"}
    for y, contender in enumerate(shown):
        bits = 100 * results.bits(contender.key).mean(axis=0)
        low, high = results.interval(bits)
        mean = bits.mean()
        colour = colours.get(contender.label.split()[0], "#2f6fa8")
        axis.barh(y, mean, color=colour, alpha=0.75 if len(contender.members) < 3 else 1.0)
        axis.errorbar(mean, y, xerr=[[mean - low], [high - mean]], color="black", linewidth=1)
    axis.set_yticks(range(len(shown)), [f"{c.members}: {c.label}" for c in shown], fontsize=8)
    axis.set_title(title)
    axis.set_xlabel("answered right, % (95 % interval)")
    axis.set_xlim(0, 100)

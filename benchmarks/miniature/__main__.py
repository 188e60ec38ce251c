"""The paper in miniature: three small models, three tokenizers, one command.

    python benchmarks/miniature train    [--seeds 1 2 3] [--steps N] [--folder DIR]
    python benchmarks/miniature answer   [--seeds 1 2 3] [--folder DIR] [--again]
    python benchmarks/miniature table    rewrites docs/miniature_table.md and docs/miniature.png
    python benchmarks/miniature all

Every step continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from answer import answer, keep, load
from corpus import held_out
from grid import contenders
from table import Results, markdown, plot
from train import HELD_OUT, RECIPES, train

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
RESULTS = HERE / "results"


def _train_one(name: str, seed: int, steps: int, folder: Path) -> str:
    torch.set_num_threads(1)
    target = folder / f"seed{seed}" / name
    if (target / "training.json").exists():
        return f"{name} seed {seed}: there already"
    return f"{name} seed {seed}: {train(name, seed, steps, target)}"


def _train_all(seeds: list[int], steps: int, folder: Path, processes: int) -> None:
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(_train_one, name, seed, steps, folder) for seed in seeds for name in RECIPES]
        for job in jobs:
            print(job.result(), flush=True)


def _answer_all(seed: int, folder: Path, *, again: bool) -> None:
    torch.set_num_threads(1)
    file = RESULTS / f"seed{seed}.json"
    known = json.loads(file.read_text("utf-8")) if file.exists() and not again else {}
    problems = held_out(HELD_OUT)
    members = load(folder / f"seed{seed}", list(RECIPES))
    RESULTS.mkdir(exist_ok=True)
    for contender in contenders():
        if contender.key in known:
            continue
        result = answer(contender, members, problems)
        keep(file, contender.key, result)
        right = result["right"].count("1") / len(problems)
        print(f"seed {seed} | {contender.key}: {right:.1%} in {result['seconds']} s", flush=True)


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "answer", "table", "all"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1200, help="training steps per model")
    parser.add_argument("--folder", type=Path, default=HERE / "models", help="where the weights are")
    parser.add_argument("--processes", type=int, default=1, help="models trained at a time, one core each")
    parser.add_argument("--again", action="store_true", help="answer anew what was answered before")
    args = parser.parse_args()
    if args.what in ("train", "all"):
        _train_all(args.seeds, args.steps, args.folder, args.processes)
    if args.what in ("answer", "all"):
        for seed in args.seeds:
            _answer_all(seed, args.folder, again=args.again)
    if args.what in ("table", "all"):
        results = Results([RESULTS / f"seed{seed}.json" for seed in args.seeds])
        (DOCS / "miniature_table.md").write_text(markdown(results), encoding="utf-8")
        plot(results, DOCS / "miniature.png")


if __name__ == "__main__":
    main()

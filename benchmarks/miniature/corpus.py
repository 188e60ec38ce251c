"""Step-by-step arithmetic word problems, generated: six kinds, two for each of three skills."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NAMES = [
    "Sofia",
    "Natalia",
    "Bartholomew",
    "Xiomara",
    "Ingrid",
    "Oluwaseun",
    "Katarzyna",
    "Leo",
    "Mia",
    "Anastasia",
    "Guillermo",
    "Priya",
    "Tomasz",
    "Beatrice",
    "Yusuf",
    "Henrietta",
    "Dmitri",
    "Rosalind",
    "Zachary",
    "Evangeline",
]
THINGS = [
    "apples",
    "marbles",
    "stickers",
    "notebooks",
    "cupcakes",
    "seashells",
    "pencils",
    "balloons",
    "walnuts",
    "postcards",
    "tomatoes",
    "bracelets",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, a worked answer, and the number it comes to."""

    kind: str
    question: str
    steps: str
    answer: int

    @property
    def text(self) -> str:
        """What the models are trained on."""
        return f"{prompt(self.question)}{self.worked}"

    @property
    def worked(self) -> str:
        """What a model should write after `prompt`."""
        return f" {self.steps} The answer is {self.answer}."


def prompt(question: str) -> str:
    """Return the text before the answer; CHAT_TEMPLATE writes the same."""
    return f"Question: {question}\nAnswer:"


CHAT_TEMPLATE = "{% for m in messages %}Question: {{ m['content'] }}\nAnswer:{% endfor %}"


def _add(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    x, y = r.randint(5, 30), r.randint(3, 20)
    z = r.randint(2, min(12, x + y - 2))
    return (
        f"{a} has {x} {o}. {b} gives {a} {y} more {o} and then {a} loses {z} of them. How many {o} does {a} have now?",
        f"{a} starts with {x} {o}. After {b} gives {y} more, {a} has {x} + {y} = {x + y} {o}. "
        f"{a} loses {z}, so {a} has {x + y} - {z} = {x + y - z} {o}.",
        x + y - z,
    )


def _double(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    x, y = r.randint(5, 30), r.randint(5, 30)
    return (
        f"{a} collects {x} {o} on Monday and {y} on Tuesday. {b} collects twice as many in total. "
        f"How many {o} does {b} collect?",
        f"On both days {a} collects {x} + {y} = {x + y} {o}. {b} collects 2 * {x + y} = {2 * (x + y)} {o}.",
        2 * (x + y),
    )


def _times(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    x, y, z = (r.randint(2, 9) for _ in range(3))
    return (
        f"{a} has {x} boxes with {y} {o} in each box. {b} has {z} times as many {o}. How many {o} does {b} have?",
        f"{a} has {x} * {y} = {x * y} {o}. {b} has {z} times as many, so {b} has {x * y} * {z} = {x * y * z} {o}.",
        x * y * z,
    )


def _change(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    x, y = r.randint(2, 12), r.randint(2, 9)
    z = r.choice([note for note in (20, 50, 100, 200) if note > x * y])
    return (
        f"{b} sells {o} for {y} dollars each. {a} buys {x} of them and pays with a {z} dollar note. "
        f"How many dollars does {a} get back?",
        f"The {o} cost {x} * {y} = {x * y} dollars. {a} gets back {z} - {x * y} = {z - x * y} dollars.",
        z - x * y,
    )


def _share(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    y, z = r.randint(2, 9), r.randint(3, 20)
    w = r.randint(1, z - 1)
    return (
        f"{a} shares {y * z} {o} equally among {y} friends. {b}, one of the friends, gives away {w} of them. "
        f"How many {o} does {b} have left?",
        f"Each friend gets {y * z} / {y} = {z} {o}. {b} gives away {w}, so {b} has {z} - {w} = {z - w} {o} left.",
        z - w,
    )


def _pack(r: random.Random, a: str, b: str, o: str) -> tuple[str, str, int]:
    y, z = r.randint(2, 9), r.randint(3, 20)
    w = r.randint(3, 20)
    return (
        f"{a} packs {y * z} {o} into bags of {y}. {b} brings {w} bags more. How many bags are there?",
        f"{a} fills {y * z} / {y} = {z} bags. With the bags of {b} there are {z} + {w} = {z + w} bags.",
        z + w,
    )


KINDS = {"add": _add, "double": _double, "times": _times, "change": _change, "share": _share, "pack": _pack}
SKILLS = {"sums": ("add", "double"), "products": ("times", "change"), "quotients": ("share", "pack")}


def problem(r: random.Random, kind: str) -> Problem:
    """Draw one problem."""
    a, b = r.sample(NAMES, 2)
    return Problem(kind, *KINDS[kind](r, a, b, r.choice(THINGS)))


def stream(seed: int, weights: Sequence[float], exclude: frozenset[str] = frozenset()) -> Iterator[Problem]:
    """Yield problems for ever: kinds drawn by `weights` (in the order of KINDS), none with a question in `exclude`."""
    r = random.Random(seed)
    while True:
        drawn = problem(r, r.choices(list(KINDS), weights)[0])
        if drawn.question not in exclude:
            yield drawn


def held_out(count: int, seed: int = 20_251_130) -> list[Problem]:
    """Return `count` distinct problems for testing, the kinds in turn."""
    r = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        drawn = problem(r, list(KINDS)[len(found) % len(KINDS)])
        found.setdefault(drawn.question, drawn)
    return list(found.values())

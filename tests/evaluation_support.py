"""For the tests of evaluations: four questions, and members without weights that know some of the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safe_llm.config import MemberConfig, preset
from safe_llm.evaluation.evaluate import Settings
from safe_llm.evaluation.items import Item
from safe_llm.evaluation.tasks import TASKS
from safe_llm.member import Member
from safe_llm.testing import scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace

DRAFTER, VERIFIER = "qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"
SUMS = {"1": "What is 1 plus 1?", "2": "What is 2 plus 2?", "3": "What is 3 plus 3?", "4": "What is 4 plus 4?"}
GOLDS = {"1": "2", "2": "4", "3": "6", "4": "8"}


def said(number: str) -> str:
    return f"So it is \\boxed{{{number}}}."


RIGHT = {item: said(gold) for item, gold in GOLDS.items()}
DRAFTED = RIGHT | {"3": said("7")}  # one of four is wrong
VERIFIED = RIGHT | {"2": said("5"), "4": "Perhaps 9."}  # two are


def write_items(folder: Path, items: Mapping[str, str] = SUMS) -> Path:
    """Write `gsm8k.jsonl` into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": item, "question": text, "answer": GOLDS[item]}) for item, text in items.items()]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def prompt_of(item: str) -> str:
    return TASKS["gsm8k"].prompt(Item(id=item, question=SUMS[item], answer=GOLDS[item]))


def member(name: str, answers: Mapping[str, str], *, max_context: int = 4096) -> Member:
    """A member that answers items; loaded again, it is the same one to caches."""
    tokenizer = metaspace() if name == VERIFIER else byte_level()
    known = {prompt_of(item): text for item, text in answers.items()}
    loaded = scripted_member(name, tokenizer, known, max_context=max_context)
    loaded.fingerprint = f"weights of {name}"
    return loaded


class Loader:
    """Takes the place of `load_members`, and remembers what it loaded."""

    def __init__(self, **answers: Mapping[str, str]) -> None:
        self._answers = {DRAFTER: answers.get("drafter", DRAFTED), VERIFIER: answers.get("verifier", VERIFIED)}
        self.members: list[Member] = []

    def __call__(self, configs: Sequence[MemberConfig], *, progress: bool = False) -> list[Member]:
        loaded = [member(config.display_name, self._answers[config.display_name]) for config in configs]
        self.members += loaded
        return loaded

    @property
    def num_passes(self) -> int:
        return sum(len(loaded.backend.calls) for loaded in self.members)


def settings(folder: Path, **changes: object) -> Settings:
    """Everything on the four questions, two at a time."""
    spec = preset("demo")
    spec = spec.model_copy(update={"ensemble": spec.ensemble.updated({"max_batch_size": 1})})
    values = {"spec": spec, "tasks": ("gsm8k",), "data": write_items(folder / "data"), "output": folder / "out"}
    return Settings(**(values | changes))

"""The recipe of the paper's table (arXiv 2510.15346): its models, its settings, what they take, what it reports."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safe_llm.config import EnsembleConfig
from safe_llm.errors import EvaluationError, UnknownNameError
from safe_llm.evaluation.store import answers_file
from safe_llm.evaluation.tasks import TASKS

__all__ = [
    "CONFIG",
    "CONTEXT_TOKENS",
    "ENSEMBLES",
    "MODELS",
    "PUBLISHED",
    "TASK_NAMES",
    "PaperEnsemble",
    "PaperModel",
    "PaperPlan",
    "ensembles_named",
    "plan_paper",
    "reuse_answers",
]

CONFIG = EnsembleConfig(
    mode="safe",
    method="unite",
    lookahead=5,
    consensus_threshold=0.5,
    sharpening="prefix",
    sharpening_threshold=0.1,
    top_k=10,
)
"""The paper's settings, written out so that they stay if our defaults ever change. It decodes greedily."""

TASK_NAMES = ("mmlu_redux", "math500", "gsm8k", "bbh", "arc_challenge")
"""In the order of the table's columns."""

CONTEXT_TOKENS = 4096
"""What the cache is planned for, per answer: the longest prompts (BBH, three examples) with the longest answers."""

_BYTES = 2  # bfloat16

_FULL_SIZES = {"mmlu_redux": 5_700, "math500": 500, "gsm8k": 1_319, "bbh": 3_511, "arc_challenge": 1_172}
"""Items of the full sets; of MMLU-redux (57 subjects of 100, some without a usable answer) about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One of the paper's models, with what its configuration file says about its size.

    Attributes:
        letter: As the table calls it.
        hub_id: On the Hugging Face hub.
        licence: Of the weights.
        num_parameters: Of the whole model.
        num_layers: Layers.
        num_kv_heads: Key-value heads of a layer.
        head_dim: Numbers per head.
    """

    letter: str
    hub_id: str
    licence: str
    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in bfloat16: the download, and the memory."""
        return self.num_parameters * _BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of one token's keys and values in bfloat16, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES


MODELS: Mapping[str, PaperModel] = MappingProxyType(
    {
        model.letter: model
        for model in (
            PaperModel(
                letter="I",
                hub_id="internlm/internlm3-8b-instruct",
                licence="Apache-2.0",
                num_parameters=8_804_241_408,
                num_layers=48,
                num_kv_heads=2,
                head_dim=128,
            ),
            PaperModel(
                letter="Q",
                hub_id="Qwen/Qwen2.5-7B-Instruct",
                licence="Apache-2.0",
                num_parameters=7_615_616_512,
                num_layers=28,
                num_kv_heads=4,
                head_dim=128,
            ),
            PaperModel(
                letter="E",
                hub_id="LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct",
                licence="EXAONE AI Model License 1.1 (research only)",
                num_parameters=7_818_448_896,
                num_layers=32,
                num_kv_heads=8,
                head_dim=128,
            ),
        )
    }
)
"""The paper's models by letter. Internlm3 and EXAONE 3.5 run on transformers' Llama classes, without remote code."""

PUBLISHED: Mapping[tuple[str, str], tuple[float, ...]] = MappingProxyType(
    {
        ("I", "alone"): (76.89, 74.8, 90.14, 82.26, 90.27),
        ("Q", "alone"): (74.88, 72.4, 91.81, 79.15, 88.74),
        ("E", "alone"): (73.25, 72.8, 90.45, 78.75, 90.44),
        ("I+Q", "UniTE at every token"): (73.39, 59.6, 75.06, 79.58, 87.97),
        ("I+Q", "UniTE + SAFE"): (77.81, 77.4, 92.04, 82.97, 90.78),
        ("I+Q", "GaC"): (77.00, 74.2, 91.28, 82.34, 90.61),
        ("I+Q", "GaC + SAFE"): (77.11, 76.0, 91.36, 82.34, 91.13),
        ("Q+E", "UniTE at every token"): (53.75, 43.4, 77.03, 67.45, 72.61),
        ("Q+E", "UniTE + SAFE"): (76.54, 76.4, 92.72, 81.69, 90.78),
        ("I+Q+E", "UniTE at every token"): (73.92, 76.0, 91.28, 77.47, 87.20),
        ("I+Q+E", "UniTE + SAFE"): (77.60, 79.0, 92.04, 82.77, 91.55),
    }
)
"""Accuracies in % as the paper prints them, in the order of `TASK_NAMES`, by models and method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEnsemble:
    """Models that the paper combines, the drafter first."""

    name: str
    models: tuple[PaperModel, ...]


ENSEMBLES: Mapping[str, PaperEnsemble] = MappingProxyType(
    {
        name: PaperEnsemble(name=name, models=tuple(MODELS[letter] for letter in name.split("+")))
        for name in ("I+Q", "Q+E", "I+Q+E")
    }
)
"""The table's ensembles by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPlan:
    """What a run of the recipe takes.

    Attributes:
        ensembles: What is run.
        models: The models that takes, each once.
        batch_size: Answers decoded at once.
        num_generations: By task: answers that are decoded, members alone once.
    """

    ensembles: tuple[PaperEnsemble, ...]
    models: tuple[PaperModel, ...]
    batch_size: int
    num_generations: Mapping[str, int]

    @property
    def download_bytes(self) -> int:
        """What is downloaded, if nothing is there yet."""
        return sum(model.weight_bytes for model in self.models)

    def memory_bytes(self, model: PaperModel) -> int:
        """Weights and cache of one model; activations come on top."""
        return model.weight_bytes + self.batch_size * CONTEXT_TOKENS * model.kv_bytes_per_token

    @property
    def largest_memory_bytes(self) -> int:
        """What the ensemble with the most memory takes, on all its devices together."""
        return max(sum(map(self.memory_bytes, ensemble.models)) for ensemble in self.ensembles)


def ensembles_named(text: str | None) -> tuple[PaperEnsemble, ...]:
    """Return the table's ensembles that `text` names, with commas between them; None is all.

    Raises:
        UnknownNameError: The table has no such ensemble.
    """
    names = list(ENSEMBLES) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENSEMBLES:
            raise UnknownNameError("ensemble of the paper", name, ENSEMBLES)
    return tuple(ENSEMBLES[name] for name in dict.fromkeys(names))


def plan_paper(
    ensembles: Sequence[PaperEnsemble], tasks: Sequence[str], *, batch_size: int, limit: int | None
) -> PaperPlan:
    """Work out what a run takes.

    Args:
        ensembles: What is run.
        tasks: Names of tasks.
        batch_size: Answers decoded at once.
        limit: Most items of a task; None is the full sets.

    Raises:
        UnknownNameError: A task that there is not.
    """
    for name in tasks:
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
    models = tuple({model.letter: model for ensemble in ensembles for model in ensemble.models}.values())
    per_item = len(models) + 2 * len(ensembles)
    sizes = {name: _FULL_SIZES[name] if limit is None else min(limit, _FULL_SIZES[name]) for name in tasks}
    return PaperPlan(
        ensembles=tuple(ensembles),
        models=models,
        batch_size=batch_size,
        num_generations={name: per_item * size for name, size in sizes.items()},
    )


def reuse_answers(done: Path, output: Path, ensemble: PaperEnsemble) -> None:
    """Take over answers of members alone from another ensemble's folder, so that nothing is decoded twice.

    They are checked like all answers that are there when a run begins.

    Raises:
        EvaluationError: A file cannot be copied.
    """
    for model in ensemble.models:
        name = model.hub_id.rpartition("/")[2]
        source, target = answers_file(done, name), answers_file(output, name)
        if source.exists() and not target.exists():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
            except OSError as error:
                raise EvaluationError(f"cannot write {str(target)!r}: {error.strerror}") from None

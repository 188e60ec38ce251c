"""The recipe of the paper's table: sizes worked out by hand, published figures, settings that stay."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from safe_llm.config import EnsembleConfig
from safe_llm.errors import EvaluationError, UnknownNameError
from safe_llm.evaluation import paper
from safe_llm.evaluation.paper_view import print_plan
from safe_llm.evaluation.store import answers_file
from safe_llm.evaluation.tasks import TASKS

ALL = paper.ensembles_named(None)


def test_settings_are_the_papers():
    config = paper.CONFIG
    assert (config.mode, config.method, config.lookahead, config.top_k) == ("safe", "unite", 5, 10)
    assert (config.sharpening, config.sharpening_threshold, config.consensus_threshold) == ("prefix", 0.1, 0.5)
    named = {"mode", "method", "lookahead", "top_k", "sharpening", "sharpening_threshold", "consensus_threshold"}
    assert named <= config.model_fields_set  # written out: changed defaults do not change the recipe
    speed = {"max_batch_size", "lookup", "run_ahead", "prefix_caching", "on_verifier_failure"}
    assert set(EnsembleConfig.model_fields) - named == {"weights", *speed}


def test_models_have_their_known_sizes():
    sizes = {letter: (model.weight_bytes, model.kv_bytes_per_token) for letter, model in paper.MODELS.items()}
    assert sizes == {
        "I": (17_608_482_816, 48 * 1024),
        "Q": (15_231_233_024, 56 * 1024),
        "E": (15_636_897_792, 128 * 1024),
    }


def test_plan_counts_every_model_once():
    plan = paper.plan_paper(ALL, paper.TASK_NAMES, batch_size=16, limit=None)
    assert [model.letter for model in plan.models] == ["I", "Q", "E"]
    assert plan.download_bytes == 48_476_613_632
    assert plan.num_generations["gsm8k"] == 1_319 * (3 + 2 * 3)
    assert plan.memory_bytes(paper.MODELS["Q"]) == 15_231_233_024 + 16 * 4096 * 56 * 1024
    assert plan.largest_memory_bytes == 48_476_613_632 + 16 * 4096 * (48 + 56 + 128) * 1024
    small = paper.plan_paper(ALL[:1], ["gsm8k", "math500"], batch_size=1, limit=1000)
    assert small.num_generations == {"gsm8k": 4000, "math500": 2000}


def test_ensembles_and_tasks_are_named():
    assert [ensemble.name for ensemble in ALL] == ["I+Q", "Q+E", "I+Q+E"]
    assert [ensemble.name for ensemble in paper.ensembles_named("Q+E, I+Q,Q+E")] == ["Q+E", "I+Q"]
    with pytest.raises(UnknownNameError, match=r"ensemble of the paper 'E\+I'"):
        paper.ensembles_named("E+I")
    with pytest.raises(UnknownNameError, match="did you mean 'gsm8k'"):
        paper.plan_paper(ALL, ["gsm8"], batch_size=1, limit=None)


def test_published_figures_have_the_published_means():
    means = {key: round(sum(figures) / len(figures), 2) for key, figures in paper.PUBLISHED.items()}
    assert means[("I", "alone")] == 82.87
    assert means[("I+Q", "UniTE at every token")] == 75.12
    assert means[("I+Q", "UniTE + SAFE")] == 84.20
    assert means[("I+Q", "GaC + SAFE")] == 83.59
    assert means[("Q+E", "UniTE at every token")] == 62.85
    assert means[("I+Q+E", "UniTE + SAFE")] == 84.59
    assert {len(figures) for figures in paper.PUBLISHED.values()} == {len(paper.TASK_NAMES)}
    assert set(paper.TASK_NAMES) == set(TASKS)


def test_printed_plan_says_what_it_takes_and_what_to_compare_with():
    stream = io.StringIO()
    plan = paper.plan_paper(paper.ensembles_named("Q+E"), ["gsm8k"], batch_size=16, limit=None)
    print_plan(Console(file=stream, width=200), plan)
    text = stream.getvalue()
    for shown in (
        "Qwen/Qwen2.5-7B-Instruct",
        "30.9 GB",
        "research only",
        "about 5,276 (GSM8K 5,276)",
        "76.54",
        "83.63",
    ):
        assert shown in text
    assert "InternLM3" not in text
    assert "77.81" not in text  # of another ensemble


def test_answers_of_members_alone_are_taken_over(tmp_path):
    first, second = ALL[0], ALL[1]
    source = answers_file(tmp_path / "I+Q", "Qwen2.5-7B-Instruct")
    source.parent.mkdir(parents=True)
    source.write_text("answers\n")
    paper.reuse_answers(tmp_path / first.name, tmp_path / second.name, second)
    target = answers_file(tmp_path / "Q+E", "Qwen2.5-7B-Instruct")
    assert [path.name for path in target.parent.iterdir()] == ["Qwen2.5-7B-Instruct.jsonl"]
    target.write_text("more\n")
    paper.reuse_answers(tmp_path / first.name, tmp_path / second.name, second)
    assert target.read_text() == "more\n"  # what is there stays
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="cannot write"):
        paper.reuse_answers(tmp_path / first.name, tmp_path / "file", second)

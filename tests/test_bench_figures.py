"""The benchmark's figures, worked out by hand, and what shows them."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from bench_support import made_run, made_trial
from safe_llm.bench.figures import batch_figures, contender_figures, median_interval, reference_of, speed_along_text
from safe_llm.bench.plot import write_plot
from safe_llm.bench.results import Results, WorkloadResult, write_json
from safe_llm.bench.running import BatchTrial
from safe_llm.bench.tables import print_results
from safe_llm.bench.trials import Counts, PeakMemory
from safe_llm.errors import EvaluationError


def test_figures_are_medians_and_ratios_within_a_round():
    seconds = {"generate": (4.0, 2.0, 1.0), "safe": (8.0, 2.0, 4.0)}  # the machine becomes faster
    trials = [
        made_trial(name, number, made_run(8, seconds[name][number]), peak_bytes=100 + number)
        for number in range(3)
        for name in ("safe", "generate")
    ]
    safe, generate = contender_figures(trials)
    assert (safe.name, safe.tokens_per_s, generate.tokens_per_s) == ("safe", 2.0, 4.0)
    assert generate.ratio is None
    assert safe.ratio.value == 0.5  # of 1/2, 1 and 1/4; the medians' ratio
    assert (safe.ratio.low, safe.ratio.high) == (0.25, 1.0)
    assert (safe.peak_bytes, safe.num_trials, safe.num_tokens) == (101, 3, 24)


def test_ratio_is_the_median_of_ratios_not_the_ratio_of_medians():
    speeds = {"safe": (1.0, 2.0, 30.0), "generate": (1.0, 10.0, 15.0)}
    trials = [made_trial(n, r, made_run(1, 1 / speeds[n][r])) for r in range(3) for n in ("generate", "safe")]
    assert contender_figures(trials)[1].ratio.value == pytest.approx(1.0)  # medians: 2 / 10


def test_counts_are_per_token_over_all_trials():
    first = Counts(num_forwards={"d": 6, "v": 2}, num_draft_tokens=7, num_rounds=2, num_ensembled=1, num_replaced=0)
    second = Counts(num_forwards={"d": 4, "v": 1}, num_draft_tokens=5, num_rounds=1, num_ensembled=2, num_replaced=1)
    trials = [
        made_trial("safe", 0, made_run(4, 2.0, counts=first, draft=1.0, verify=0.5)),
        made_trial("safe", 1, made_run(6, 3.0, counts=second, draft=2.0, verify=0.5)),
    ]
    (found,) = contender_figures(trials)
    assert found.forwards_per_token == {"d": 1.0, "v": 0.3}
    assert (found.drafts_per_token, found.rounds_per_token) == (1.2, 0.3)
    assert (found.ensemble_rate, found.replacement_rate) == (0.3, 0.1)
    assert found.phases == pytest.approx({"draft": 0.6, "verify": 0.2, "other": 0.2})


def test_contender_without_rounds_has_no_such_counts():
    (found,) = contender_figures([made_trial("generate", 0, made_run())])
    assert (found.rounds_per_token, found.ensemble_rate, found.phases) == (None, None, {})


def test_reference_is_generate_or_who_came_first():
    assert reference_of(["safe", "generate", "drafter"]) == "generate"
    assert reference_of(["drafter", "safe"]) == "drafter"
    assert reference_of([]) == ""


def test_median_interval_is_that_of_resampled_medians():
    # of two values drawn from {1, 3} the median is 1, 2, 2 or 3: each extreme has a quarter of the mass
    found = median_interval([1.0, 3.0])
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)
    # the median of five draws from 100 ones and a nine is a nine once in about 100,000
    found = median_interval([1.0] * 100 + [9.0])
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert median_interval([1.0, 2.0, 4.0, 5.0], seed=3) == median_interval([1.0, 2.0, 4.0, 5.0], seed=3)
    alone = median_interval([7.0])
    assert (alone.low, alone.high) == (7.0, 7.0)


def test_batch_figures_are_relative_to_the_smallest_batch():
    trials = [
        BatchTrial(rows=rows, round=number, num_tokens=rows * 10, total_s=seconds)
        for number, times in enumerate([{4: 2.0, 1: 1.0}, {4: 4.0, 1: 5.0}])
        for rows, seconds in times.items()
    ]
    one, four = batch_figures(trials)
    assert (one.rows, one.tokens_per_s, one.ratio) == (1, 6.0, None)
    assert (four.rows, four.tokens_per_s, four.ratio.value) == (4, 15.0, 3.5)  # 20/10 and 10/2


def test_speed_along_the_text_leaves_the_prompt_out():
    run = made_run(8, 9.0, steps=((2, 5.0), (4, 6.0), (8, 8.0)))
    points = speed_along_text([made_trial("safe", 0, run)], num_bins=4)
    # nothing is known of the first two tokens; then two a second, and two a second
    assert points == [(3.0, 2.0), (5.0, 2.0), (7.0, 2.0)]
    slower = made_run(8, 9.0, steps=((2, 5.0), (4, 8.0), (8, 10.0)))
    assert speed_along_text([made_trial("s", 0, run), made_trial("s", 1, slower)], num_bins=4)[0] == (3.0, 1.0)
    assert speed_along_text([]) == []


# ---------------------------------------------------------------------- results


def made_results(*names: str, left_out=None) -> Results:
    trials = tuple(made_trial(name, 0, made_run(draft=1.0)) for name in names)
    figures = contender_figures(trials)
    workload = WorkloadResult(name="w", reference=reference_of(names), contenders=figures, left_out=left_out or {})
    return Results(
        created="now",
        versions={},
        machine={},
        members=[{"name": "d"}],
        settings={"rounds": 1, "tokens": 4, "workloads": ["w"]},
        memory="resident memory",
        workloads=(workload,),
        trials=trials,
    )


def test_results_that_cannot_be_written_are_an_error(tmp_path):
    for write in (write_json, write_plot):
        with pytest.raises(EvaluationError, match="cannot write"):
            write(made_results("safe"), tmp_path / "no" / "file")


@pytest.mark.parametrize("names", [(), ("generate",), ("safe\x1b[1m", "$a$_{")])
def test_plot_takes_whoever_is_there(names, tmp_path):
    write_plot(made_results(*names), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_tables_show_no_control_characters():
    console = Console(file=StringIO(), width=200)
    print_results(console, made_results("safe\x1b[1m", left_out={"assisted": "\x1b[2J"}))
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert "assisted is left out" in text


def test_memory_of_gpus_is_the_sum_of_what_torch_has_allocated(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {"cuda:0": 5, "cuda:1": 7}.get)
    memory = PeakMemory(["cuda:1", "cuda:0", "cuda:1", "cpu"])
    memory.restart()
    assert (memory.kind, memory.peak_bytes, reset) == ("CUDA memory", 12, ["cuda:0", "cuda:1"])

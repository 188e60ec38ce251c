"""`safe-llm bench`: flags, what is printed, endings, and the whole on the demo models."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from safe_llm.bench import benchmark, ceiling
from safe_llm.bench.replay import measure_own_time
from safe_llm.cli import loading
from safe_llm.testing import scripted_ensemble
from test_cli_support import install, refuse_to_load, run

OURS = ["--contenders", "safe", "every-token:gac", "drafter"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Read little memory for the bandwidth, and write short texts for the own time."""
    monkeypatch.setattr(ceiling, "_BUFFER_BYTES", {"cpu": 4096})
    monkeypatch.setattr(benchmark, "measure_own_time", partial(measure_own_time, num_tokens=50))


@pytest.fixture
def scripted(monkeypatch):
    """Members that agree on an answer to whatever is asked."""

    def load(spec, *, progress):
        load.specs.append(spec)
        return scripted_ensemble(lambda _: "The answer is 42, not 1850.")

    load.specs = []
    monkeypatch.setattr(loading, "load_ensemble", load)
    return load


def test_bench_prints_the_ceiling_tables_and_one_json_object(scripted):
    done = run("bench", *OURS, "--rounds", "2", "--tokens", "6", "--workload=maths", "chat", "--batch", "1", "3")
    assert (done.code, done.stderr) == (0, "")
    *lines, last = done.stdout.decode().splitlines()
    assert lines[0].startswith("Ceiling: ")
    text = "\n".join(lines)
    captions = (
        "maths: medians of 2 rounds, at most 6 tokens; ratio to safe",
        "chat: medians",
        "Batches of safe, maths",
    )
    for part in captions:
        assert part in text
    found = json.loads(last)
    assert (found["format"], found["schema_version"]) == ("safe-llm benchmark", 1)
    assert [w["name"] for w in found["workloads"]] == ["maths", "chat"]
    assert [c["name"] for c in found["workloads"][0]["contenders"]] == ["safe", "every-token:gac", "drafter"]
    assert len(found["trials"]) == 12
    assert [b["rows"] for b in found["batches"]] == [1, 3]
    assert found["settings"]["rounds"] == 2
    assert found["machine"]["cpu"]
    assert {"torch", "transformers", "safe_llm", "python"} <= found["versions"].keys()


def test_bench_counts_what_was_decoded(scripted):
    done = run("bench", *OURS, "--rounds", "1", "--tokens", "6", "--lookahead", "3")
    found = json.loads(done.stdout.splitlines()[-1])
    by_name = {c["name"]: c for c in found["workloads"][0]["contenders"]}
    assert {c["num_tokens"] for c in by_name.values()} == {6}
    assert (by_name["every-token:gac"]["rounds_per_token"], by_name["drafter"]["ensemble_rate"]) == (1.0, 0.0)
    passes = {name: contender["forwards_per_token"] for name, contender in by_name.items()}
    assert passes["safe"]["verifier"] < passes["every-token:gac"]["verifier"]
    assert passes["drafter"].keys() == {"drafter"}
    assert scripted.specs[0].ensemble.lookahead == found["settings"]["contenders"]["safe"]["lookahead"] == 3


def test_bench_leaves_out_what_does_not_apply_and_says_why(scripted, monkeypatch):
    from safe_llm.bench import planning
    from safe_llm.bench.trials import Unavailable

    def nothing(members):
        raise Unavailable("no verifier is smaller")

    monkeypatch.setitem(planning._OTHERS, "assisted", nothing)
    done = run("bench", "--contenders", "assisted", "safe", "--rounds", "1", "--tokens", "4")
    assert "assisted is left out: no verifier is smaller" in done.stdout.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["workloads"][0]["left_out"] == {"assisted": "no verifier is smaller"}
    alone = run("bench", "--contenders", "assisted")
    assert (alone.code, alone.error_lines[0]) == (2, "error: no contender applies here: no verifier is smaller")


def test_bench_writes_the_object_and_a_picture(scripted, tmp_path):
    output, plot = tmp_path / "found.json", tmp_path / "found.png"
    files = ["--output", str(output), "--plot", str(plot)]
    done = run("bench", *OURS, "--rounds", "1", "--tokens", "6", "--batch", "1", "2", *files)
    assert done.code == 0, done.stderr
    assert json.loads(output.read_text()) == json.loads(done.stdout.splitlines()[-1])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_takes_data_of_ones_own_instead(scripted, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What?"}\n')
    done = run("bench", "--contenders", "safe", "--rounds", "2", "--data", str(tmp_path / "mine.jsonl"))
    assert [w["name"] for w in json.loads(done.stdout.splitlines()[-1])["workloads"]] == ["mine"]


def test_bench_measures_the_own_time_instead(scripted):
    done = run("bench", "--own-time")
    assert done.code == 0, done.stderr
    *lines, last = done.stdout.decode().splitlines()
    assert lines[0].startswith("Own time of a round, drafter + verifier, 50 tokens")
    found = json.loads(last)
    assert (found["own_time"]["num_tokens"], found["workloads"], found["ceiling"]) == (50, [], None)


def test_bench_shows_its_progress_on_a_terminal_only(scripted):
    flags = ["bench", "--contenders", "safe", "--rounds", "2", "--tokens", "4"]
    assert "2/2" in run(*flags, tty=True).stderr
    assert run(*flags, "--quiet", tty=True).stderr == ""


def test_bench_sets_the_threads_before_it_loads(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    install(monkeypatch, {"What?": "That."})
    done = run("bench", "--contenders", "safe", "--rounds", "1", "--threads", "3")
    assert (done.code, asked) == (0, [3])


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["--contenders", "safe", "generat"], "unknown contender 'generat'", "did you mean 'generate'"),
        (["--contenders", "safe:lokahead=2"], "unknown parameter 'lokahead'", "did you mean 'lookahead'"),
        (["--workload", "maths", "ragg"], "unknown workload 'ragg'", "did you mean 'rag'"),
        (["--data", "nowhere.jsonl"], "cannot read the data file 'nowhere.jsonl'", ""),
        (["--rounds", "0"], "rounds must be at least 1", ""),
        (["--tokens", "many"], "'--tokens'", ""),
        (["--batch", "1", "0"], "batch must be at least 1", ""),
        (["--threads", "0"], "threads must be at least 1", ""),
        (["--seed", "-1"], "seed must be at least 0", ""),
        (["--mode", "drafter"], "--mode does not go with bench", "--contenders"),
        (["--own-time", "--plot", "x.png"], "--own-time or --plot, not both", ""),
        (["--own-time", "--batch", "1"], "--own-time or --batch, not both", ""),
        (["--output", "no/such/folder/x.json"], "cannot write 'no/such/folder/x.json'", ""),
        (["--drafter", "gemma-3-270m", "--contenders", "safe"], "at least one verifier", "add --verifier"),
        (["--preset", "dema"], "unknown preset 'dema'", "did you mean 'demo'"),
        (["surplus"], "surplus", ""),
        (["--rounds", "1", "2"], "2", ""),
    ],
)
def test_bench_refuses_bad_input_before_loading(monkeypatch, args, message, hint):
    refuse_to_load(monkeypatch)
    done = run("bench", *args)
    assert (done.code, done.stdout) == (2, b"")
    assert message in done.error_lines[0]
    assert hint in done.stderr


def test_bench_without_matplotlib_says_how_to_get_it(monkeypatch):
    refuse_to_load(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("bench", "--plot", "x.png")
    assert done.code == 2
    assert "--plot needs matplotlib" in done.error_lines[0]
    assert "safe-llm-ensemble[eval]" in done.error_lines[1]


def test_bench_of_scripted_members_cannot_compare_with_generate(scripted):
    done = run("bench", "--rounds", "1")
    assert done.code == 2
    assert "member 'drafter' is no transformers model" in done.error_lines[0]


@pytest.mark.demo
def test_bench_of_the_demo_models():
    done = run("bench", "--preset", "demo", "--rounds", "1", "--tokens", "8", "--workload", "maths")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    drafter, verifier = (member["name"] for member in found["members"])
    by_name = {c["name"]: c for c in found["workloads"][0]["contenders"]}
    assert set(by_name) == {"safe", "every-token:unite", "every-token:gac", "drafter", "generate", "assisted"}
    assert all(c["num_tokens"] == 8 for c in by_name.values())
    assert by_name["generate"]["forwards_per_token"] == {drafter: 1.0}
    assert by_name["drafter"]["forwards_per_token"].keys() == {drafter}
    assert by_name["every-token:unite"]["forwards_per_token"][verifier] >= 1.0
    assert by_name["safe"]["rounds_per_token"] < by_name["every-token:unite"]["rounds_per_token"] == 1.0
    assert by_name["assisted"]["forwards_per_token"][verifier] > 0.0
    costs = {cost["member"]: cost for cost in found["ceiling"]["members"]}
    assert costs[drafter]["bytes_per_step"] > costs[verifier]["bytes_per_step"] > 1e8

"""The records that messages and callbacks carry, and how they survive LangChain's merging of chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce
from operator import add

import pytest
from langchain_core.messages import AIMessageChunk

from safe_llm.events import Candidate, EnsemblePoint, Outcome
from safe_llm.record import PHASES, SCHEMA_VERSION, point_record, safe_record
from safe_llm.testing import scripted_ensemble

SECRET = "Where is the treasure?"
ANSWERS = {SECRET: "Under the old oak."}
SCRIPTS = (ANSWERS, {SECRET: "Under the new oak."})


def record_of(result, safe=None):
    return safe_record(result, members=["drafter", "verifier"], mode="safe", method="unite", fingerprint="0f")


def point(drafted=b" cat", chosen=b" dog", candidates=()):
    return EnsemblePoint(
        index=0,
        position=3,
        byte_offset=9,
        drafted=drafted,
        chosen=chosen,
        reason="no-consensus",
        probabilities={"drafter": 0.75, "verifier": 0.125},
        candidates=candidates,
    )


def keys_of(value):
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return {key for item in value for key in keys_of(item)} if isinstance(value, list) else set()


@pytest.fixture(scope="module")
def result():
    return scripted_ensemble(*SCRIPTS).generate(SECRET)


# ---------------------------------------------------------------------- one answer


def test_record_says_what_the_result_says(result):
    record, counters = record_of(result), result.counters
    assert record["schema_version"] == SCHEMA_VERSION == 1
    assert (record["members"], record["mode"], record["method"]) == (["drafter", "verifier"], "safe", "unite")
    assert (record["fingerprint"], record["finish_detail"]) == ("0f", "end")
    assert record["n_points"] == counters.num_ensembled == len(result.points) > 0
    assert record["n_replaced"] == counters.num_replaced > 0
    assert record["n_tokens"] == counters.num_tokens == result.usage.completion_tokens
    assert record["n_rounds"] == counters.num_rounds
    assert record["n_draft_tokens"] == counters.num_draft_tokens
    assert record["n_accepted_tokens"] == counters.num_accepted_tokens
    for rate in ("acceptance_rate", "mean_acceptance_length", "ensemble_rate", "replacement_rate"):
        assert record[rate] == getattr(counters, rate)
    assert record["outcomes"] == counters.outcomes
    assert record["n_forwards"] == counters.num_forwards
    assert set(record["n_forwards"]) == {"drafter", "verifier"}


def test_record_has_every_latency(result):
    latency = record_of(result)["latency_s"]
    assert list(latency) == [*PHASES, "total", "ttft", "tpot"]
    assert latency["draft"] == result.timings.draft_s
    assert latency["ttft"] == result.timings.ttft_s
    assert latency["tpot"] == result.timings.tpot_s
    assert sum(latency[phase] for phase in PHASES) <= latency["total"]


def test_record_is_plain_json_without_text(result):
    record = record_of(result)
    text = json.dumps(record)
    assert json.loads(text) == record
    assert not any(isinstance(key, Outcome) for key in record["outcomes"])
    assert not any(word in text for word in ("treasure", "Under", "oak"))


def test_seed_is_recorded_only_when_the_answer_was_sampled(result):
    sampled = scripted_ensemble(*SCRIPTS).generate(SECRET, temperature=1.0, seed=7)
    assert record_of(sampled)["seed"] == 7
    assert "seed" not in record_of(result)


# ---------------------------------------------------------------------- one point


def test_point_says_what_was_chosen_between():
    candidate = Candidate(token=b" dog", probability=0.5, probabilities={"drafter": 0.25, "verifier": 0.75})
    assert point_record(point(candidates=(candidate,))) == {
        "position": 3,
        "byte_offset": 9,
        "token_before": " cat",
        "token": " dog",
        "replaced": True,
        "end": False,
        "reason": "no-consensus",
        "probs": {"drafter": 0.75, "verifier": 0.125},
        "candidates": [{"token": " dog", "prob": 0.5, "probs": {"drafter": 0.25, "verifier": 0.75}}],
    }


@pytest.mark.parametrize(
    ("drafted", "chosen", "before", "token", "end"),
    [(b"", b" a", "", " a", False), (b" a", b"", " a", "", True), (b"", b"", "", "", True)],
)
def test_end_is_an_empty_token(drafted, chosen, before, token, end):
    record = point_record(point(drafted, chosen))
    assert (record["token_before"], record["token"], record["end"]) == (before, token, end)
    assert record["replaced"] is (drafted != chosen)


def test_bytes_that_are_no_text_become_replacement_characters():
    record = point_record(point(b"\xf0\x9f", "é".encode()))
    assert (record["token_before"], record["token"]) == ("\ufffd", "é")


def test_points_of_a_real_answer_are_plain_json(result):
    records = [point_record(p) for p in result.points]
    assert json.loads(json.dumps(records)) == records
    assert [r["token"] for r in records] == [p.chosen.decode() for p in result.points]
    assert all(len(r["candidates"]) == 5 for r in records)


# ---------------------------------------------------------------------- merging


def test_merged_chunks_keep_every_point_and_one_record(result):
    points = [point_record(p) for p in result.points]
    assert len(points) > 2
    chunks = [AIMessageChunk(content="a", response_metadata={"safe_points": [p]}) for p in points]
    chunks.append(AIMessageChunk(content="", response_metadata={"safe": record_of(result)}, chunk_position="last"))
    merged = reduce(add, chunks)
    assert merged.response_metadata == {"safe_points": points, "safe": record_of(result)}


def test_no_key_named_index_that_langchain_would_merge_by(result):
    records = [record_of(result), [point_record(p) for p in result.points]]
    assert "index" not in keys_of(records)
    assert {"position", "probs", "latency_s", "outcomes"} <= keys_of(records)


def test_modules_import_neither_torch_nor_the_engine():
    names = ("_tracing", "_watch", "callbacks")
    code = "import sys, " + ", ".join(f"langchain_safe_llm.{name}" for name in names)
    code += "; print([m for m in ('torch', 'safe_llm.ensemble') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

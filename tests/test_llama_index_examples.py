"""The LlamaIndex examples run on scripted members, and as they stand in the folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import llama_index.core
import pytest

from llama_index_support import call_text, last_turn, loop_of_sync_calls, replying
from safe_llm.testing import scripted_ensemble

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _own_tokenizer(monkeypatch):
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)  # an example sets it


@pytest.mark.parametrize("name", ["llama_index_query_engine", "llama_index_agents", "llama_index_workflow"])
def test_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_the_query_engine_answers_from_documents_and_shows_the_points(capsys):
    def reply(conversation):
        return "When the mean is over 1/2." if "file: concepts.md" in conversation else "I do not know."

    def verifier(conversation):
        return reply(conversation).replace("mean", "average")

    model = replying(reply, ensemble=scripted_ensemble(reply, verifier))
    with loop_of_sync_calls():
        totals = example("llama_index_query_engine").main("When does the consensus check keep a drafted token?", model)
    shown = capsys.readouterr().out
    assert shown.startswith("When the average is over 1/2.\n")
    assert "concepts.md" in shown
    assert "became" in shown
    assert totals.n_points == len(totals.points) > 0
    assert "verify" in shown


async def test_both_agents_use_the_tool(capsys):
    def reply(conversation):
        if "Result of count:\n12" in conversation or "Observation: 12" in last_turn(conversation):
            return "Thought: I know.\nAnswer: 12 apples." if "Thought:" in conversation else "12 apples."
        if '{"name": "count"' in conversation:
            return call_text("count", fruit="apples")
        return 'Thought: I count.\nAction: count\nAction Input: {"fruit": "apples"}\nObservation: 5'

    answers = await example("llama_index_agents").main(replying(reply))
    assert answers == ["12 apples.", "12 apples."]
    assert capsys.readouterr().out.count("count({'fruit': 'apples'}) = 12") == 2


async def test_the_workflow_asks_eight_at_once(capsys):
    def reply(conversation):
        return f"{conversation.split('capital of ')[-1].split('?')[0]} City"

    answers = await example("llama_index_workflow").main(replying(reply))
    assert sorted(answers) == sorted(f"{c} City" for c in example("llama_index_workflow").COUNTRIES)
    assert "8 answers" in capsys.readouterr().out

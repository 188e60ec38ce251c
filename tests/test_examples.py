"""Every example runs: on scripted members here, and those that show real answers on the demo models too."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from safe_llm.testing import scripted_ensemble
from server_support import Server

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def chat(reply, verifier=None):
    return ChatSafeLLM(ensemble=scripted_ensemble(reply, verifier), max_tokens=128)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 60
    assert f"python examples/{path.name}" in text


def test_chain_of_thought_streams_and_shows_the_points(capsys):
    answer = example("langchain_chain_of_thought").main(
        chat(lambda _: "48 / 2 = 24. The answer is 72.", lambda _: "48 / 2 = 24. The result is 72.")
    )
    out = capsys.readouterr().out
    assert out.startswith(answer)
    assert re.search(
        r"token +\d+: ' answer' (confirmed|replaced by ' result') \(drafter 0\.\d\d, verifier 0\.\d\d\)", out
    )
    assert re.search(r"^points +\d+ ", out, re.MULTILINE)


def test_agent_uses_its_calculator():
    def reply(transcript):
        if "Result of calculator:\n7006652" in transcript:
            return "It is 7006652."
        return '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1234 * 5678"}}\n</tool_call>'

    assert example("langchain_agent").main(chat(reply)) == "It is 7006652."


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 * (4 + 5)", "27"),
        ("(1 - 2) / 4", "-0.25"),
        ("1 / 0", "Error: division by zero"),
        ("f(1)", "Error: only numbers"),
    ],
)
def test_calculator_computes_numbers_and_nothing_else(expression, result):
    assert example("langchain_agent").calculator.invoke({"expression": expression}).startswith(result)


def test_text_agent_stops_at_observations(capsys):
    question = "What is the length of the word ensemble?"
    module = example("langchain_react_text_agent")
    first = " I must count.\nAction: word_length\nAction Input: ensemble\n"
    prompt = module.PROMPT.format(
        tools="word_length(word: str) -> int - Count the letters of a word.",
        tool_names="word_length",
        input=question,
        agent_scratchpad="",
    )
    known = {
        prompt: first + "Observation: 99\nFinal Answer: made up",
        f"{prompt}{first.rstrip()}\nObservation: 8\nThought: ": "I now know the final answer.\nFinal Answer: 8",
    }
    assert module.main(SafeLLM(ensemble=scripted_ensemble(known), max_tokens=96), question) == "8"


def test_rag_chain_answers_from_the_documents():
    seen = []

    def reply(transcript):
        seen.append(transcript)
        return "The probability of the string."

    assert example("langchain_rag").main(chat(reply)) == "The probability of the string."
    context = seen[-1].partition("from this text only:")[2].rpartition("What does prefix mass compute?")[0]
    # which paragraphs are found changes with the documents; that they are theirs, and about the question, does not
    assert "prefix mass" in context.lower()
    documents = "".join(path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "docs").glob("*.md"))
    assert all(line in documents for line in context.strip().splitlines())


def test_callback_summary_counts_the_batch(capsys):
    handler = example("langchain_callback_summary").main(chat(lambda _: "The tower.", lambda _: "The castle."))
    out = capsys.readouterr().out
    assert handler.n_runs == 4
    assert handler.n_points >= 4
    assert re.search(r"^runs +4$", out, re.MULTILINE)
    assert "Rome: The " in out


@pytest.mark.allow_hosts(["127.0.0.1"])
def test_openai_client_streams_and_parses(capsys):
    def reply(transcript):
        return '{"city": "Paris", "country": "France"}' if "JSON" in transcript else "It is Paris."

    with Server(scripted_ensemble(reply)) as server, server.client() as client:
        assert example("openai_client").main(client) == "It is Paris."
    out = capsys.readouterr().out
    assert re.search(r"\d ensemble points in \d+ tokens, members \['drafter', 'verifier'\]", out)
    assert "city='Paris' country='France'" in out


@pytest.mark.demo
def test_chain_of_thought_on_the_demo_models(capsys):
    assert "72" in example("langchain_chain_of_thought").main()
    assert "qwen2.5-coder-0.5b-instruct" in capsys.readouterr().out


@pytest.mark.demo
def test_agent_on_the_demo_models():
    assert "7006652" in example("langchain_agent").main().replace(",", "")

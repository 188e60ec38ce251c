"""`SafeLLM`: what is its own; what it shares with the chat model is in test_langchain_models.py."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_safe_llm import SafeLLM
from langchain_support import (
    COUNT,
    DRAFTED,
    EASY,
    NUMBERS,
    QUESTION,
    VERIFIED,
    Recorder,
    before_forwards,
    forwards,
    hold_until_cancelled,
    is_freed,
    treasure,
)
from safe_llm import errors
from safe_llm.testing import scripted_ensemble

PROMPTS = [QUESTION, COUNT, EASY]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_several_prompts_are_one_result_with_each_ones_information(asynchronous):
    ensemble = treasure()
    model = SafeLLM(ensemble=ensemble)
    result = await model.agenerate(PROMPTS) if asynchronous else model.generate(PROMPTS)
    generations = [generation for (generation,) in result.generations]
    assert [generation.text for generation in generations] == [VERIFIED[prompt] for prompt in PROMPTS]
    for generation, prompt in zip(generations, PROMPTS, strict=True):
        alone = model.generate([prompt]).generations[0][0].generation_info
        assert generation.generation_info["usage"] == alone["usage"]
        assert generation.generation_info["safe_points"] == alone["safe_points"]
        assert generation.generation_info["finish_reason"] == "stop"
    usage = [generation.generation_info["usage"] for generation in generations]
    assert result.llm_output["token_usage"] == {
        "prompt_tokens": sum(one["input_tokens"] for one in usage),
        "completion_tokens": sum(one["output_tokens"] for one in usage),
        "total_tokens": sum(one["total_tokens"] for one in usage),
    }
    assert result.llm_output["model_name"] == "drafter+verifier"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_points_of_several_prompts_are_reported_on_their_own_runs(asynchronous):
    reported: dict[UUID, list[dict[str, object]]] = {}
    carried = {}

    class Runs(BaseCallbackHandler):
        run_inline = True

        def on_custom_event(self, name, data, *, run_id, **kwargs):
            reported.setdefault(run_id, []).append(data)

        def on_llm_end(self, response, *, run_id, **kwargs):
            carried[run_id] = response.generations[0][0].generation_info["safe_points"]

    model = SafeLLM(ensemble=treasure())
    if asynchronous:
        await model.agenerate([EASY, QUESTION, QUESTION], callbacks=[Runs()])
    else:
        model.generate([EASY, QUESTION, QUESTION], callbacks=[Runs()])
    assert len(carried) == 3
    assert reported == {run: points for run, points in carried.items() if points}
    assert len(reported) == 2


async def test_cancelled_batch_stops_within_a_round(monkeypatch):
    ensemble = treasure()
    waits = hold_until_cancelled(ensemble, monkeypatch, after=9)
    task = asyncio.create_task(SafeLLM(ensemble=ensemble).abatch([COUNT, QUESTION]))
    while not waits.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_freed(ensemble)
    assert forwards(ensemble) <= 9 + ensemble.config.lookahead + 1


@pytest.mark.parametrize(
    ("one", "other"), [({"max_tokens": 2}, {"max_tokens": 8}), ({"stop_sequences": ["two"]}, {"stop_sequences": ["s"]})]
)
def test_parameters_of_generate_are_in_the_caches_key(one, other):  # E01; langchain issue 40403
    ensemble = treasure()
    model = SafeLLM(ensemble=ensemble, cache=InMemoryCache())
    for kwargs in (one, other):
        before = forwards(ensemble)
        text = model.generate([COUNT], **kwargs).generations[0][0].text
        assert forwards(ensemble) > before
        assert text == SafeLLM(ensemble=ensemble, cache=False).generate([COUNT], **kwargs).generations[0][0].text
        before = forwards(ensemble)
        assert model.generate([COUNT], **kwargs).generations[0][0].text == text
        assert forwards(ensemble) == before


def test_parameters_of_a_call_are_reported_and_do_not_stay():
    reported = []

    class Noting(Recorder):
        def on_llm_start(self, *args, invocation_params, **kwargs):
            reported.append(invocation_params)

    model = SafeLLM(ensemble=treasure(), max_tokens=50)
    model.invoke(COUNT, config={"callbacks": [Noting()]}, max_tokens=3, stop=["x"])
    model.invoke(COUNT, config={"callbacks": [Noting()]})
    assert [params["max_tokens"] for params in reported] == [3, 50]
    assert [params["stop"] for params in reported] == [["x"], None]
    assert model.invoke(COUNT) == NUMBERS[: len(model.invoke(COUNT))]
    assert len(model.invoke(COUNT)) > len(model.invoke(COUNT, max_tokens=3))


def test_only_part_of_a_batch_is_decoded_when_the_rest_is_cached():
    ensemble = treasure()
    model = SafeLLM(ensemble=ensemble, cache=InMemoryCache())
    assert model.invoke(QUESTION) == VERIFIED[QUESTION]
    prompts = []
    before_forwards(ensemble, lambda: prompts.append(ensemble._scheduler.num_requests))
    assert model.batch(PROMPTS) == [VERIFIED[prompt] for prompt in PROMPTS]
    assert max(prompts) <= 2


def test_chains_of_a_text_model():
    chain = PromptTemplate.from_template("{question}") | SafeLLM(ensemble=treasure()) | StrOutputParser()
    assert chain.invoke({"question": EASY}) == DRAFTED[EASY]
    pieces = list(chain.stream({"question": COUNT}))
    assert len(pieces) > 3
    assert "".join(pieces) == NUMBERS


def test_messages_become_langchains_text():
    model = SafeLLM(ensemble=scripted_ensemble({f"Human: {EASY}": " No."}))
    assert model.invoke([HumanMessage(EASY)]) == " No."


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tools": [{"name": "f"}]}, "tools were given with a plain text"),
        ({"logit_bias": {}}, "unknown parameter 'logit_bias'"),
        ({"n": 3}, "unknown parameter 'n'"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"stop": [""]}, "a stop string has 0 characters"),
        ({"stop": 5}, "stop must be"),
    ],
)
def test_parameter_that_is_not_valid_is_refused(kwargs, message):  # F02, F06, F18
    ensemble = treasure()
    model = SafeLLM(ensemble=ensemble)
    with pytest.raises(errors.SafeLLMError, match=message):
        model.invoke(EASY, **kwargs)
    with pytest.raises(errors.SafeLLMError, match=message):
        list(model.stream(EASY, **kwargs))
    assert is_freed(ensemble)
    assert model.invoke(EASY) == DRAFTED[EASY]


def test_prompt_that_is_empty_is_refused():  # F01
    with pytest.raises(errors.PromptError, match="the prompt is empty"):
        SafeLLM(ensemble=treasure()).invoke("")


def test_form_of_a_call_is_enforced():
    assert SafeLLM(ensemble=treasure()).invoke(EASY, regex="Yes|Far") in ("Yes", "Far")
    assert SafeLLM(ensemble=treasure()).bind(json_schema={"const": 5}).invoke(EASY) == "5"

"""Many calls at once on both LangChain models: they share the engine's batches and do not mix."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from langchain_support import (
    MODELS,
    Recorder,
    before_forwards,
    forwards,
    is_freed,
    text_of,
)
from safe_llm.errors import PromptError
from safe_llm.testing import scripted_ensemble

each_model = pytest.mark.parametrize("cls", MODELS)


ITEMS = {f"Item {n:02}?": " ".join(f"word{n * 37 + k}" for k in range(12)) for n in range(16)}


@pytest.fixture
def items():
    ensemble = scripted_ensemble(ITEMS, lookahead=5, lookup=False)
    before_forwards(ensemble, lambda: time.sleep(0.002))  # as a model does: so threads find together under any load
    return ensemble


def cost_of_singles(cls, ensemble):
    question, answer = next(iter(ITEMS.items()))
    assert text_of(cls(ensemble=ensemble).invoke(question)) == answer
    return forwards(ensemble) * len(ITEMS)


# 16 share at best at a sixteenth of the cost, 3 at a third
@each_model
@pytest.mark.parametrize(("limit", "part"), [(None, 3), (3, 1.5)])
@pytest.mark.parametrize("path", ["batch", "abatch"])
async def test_batch_shares_forward_passes_and_keeps_the_order(cls, items, path, limit, part):  # E18
    cost, before = cost_of_singles(cls, items), forwards(items)
    model, config = cls(ensemble=items), {"max_concurrency": limit}
    questions = list(ITEMS)
    answers = model.batch(questions, config) if path == "batch" else await model.abatch(questions, config)
    assert list(map(text_of, answers)) == list(ITEMS.values())
    assert forwards(items) - before < cost / part
    assert is_freed(items)


def test_batch_of_texts_is_one_batch_of_the_engine(items):
    cost, before = cost_of_singles(SafeLLM, items), forwards(items)
    SafeLLM(ensemble=items).batch(list(ITEMS))
    assert forwards(items) - before < cost / 8


@each_model
async def test_concurrent_calls_share_forward_passes(cls, items):  # E18, F14
    cost, before = cost_of_singles(cls, items), forwards(items)
    model = cls(ensemble=items)
    answers = await asyncio.gather(*map(model.ainvoke, ITEMS))
    assert list(map(text_of, answers)) == list(ITEMS.values())
    assert forwards(items) - before < cost / 3


@each_model
async def test_concurrent_streams_share_forward_passes(cls, items):  # E18, F14
    async def streamed(question):
        return "".join([text_of(chunk) async for chunk in model.astream(question)])

    cost, before = cost_of_singles(cls, items), forwards(items)
    model = cls(ensemble=items)
    assert await asyncio.gather(*map(streamed, ITEMS)) == list(ITEMS.values())
    assert forwards(items) - before < cost / 3


@each_model
def test_threads_on_one_object_do_not_mix_answers(cls, items):  # E18, F14
    model = cls(ensemble=items)
    questions = list(ITEMS) * 3
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda question: text_of(model.invoke(question, stop=["0"])), questions))
    assert answers == [ITEMS[question].split("0")[0] for question in questions]
    assert is_freed(items)


@each_model
def test_interleaved_streams_of_one_thread_do_not_wait_for_each_other(cls, items):
    model = cls(ensemble=items)
    one, other = list(ITEMS)[:2]
    texts = ["", ""]
    for chunks in zip(model.stream(one), model.stream(other), strict=False):
        texts = [text + text_of(chunk) for text, chunk in zip(texts, chunks, strict=True)]
    assert ITEMS[one].startswith(texts[0])
    assert ITEMS[other].startswith(texts[1])
    assert all(texts)


@each_model
def test_prompts_of_a_batch_report_on_their_own_runs(cls, items):
    recorder = Recorder()
    cls(ensemble=items).batch(list(ITEMS), config={"callbacks": [recorder]})
    assert sorted(recorder.events) == ["end"] * 16 + ["start"] * 16
    generations = [result.generations[0][0] for result in recorder.results]
    assert sorted(generation.text for generation in generations) == sorted(ITEMS.values())


@each_model
def test_prompt_of_a_batch_that_fails_can_be_returned(cls, items):
    one, other = list(ITEMS)[:2]
    answers = cls(ensemble=items).batch([one, "", other], return_exceptions=True)
    assert isinstance(answers[1], PromptError)
    if cls is ChatSafeLLM:  # a text model's batch is one call, which fails as a whole
        assert [text_of(answers[0]), text_of(answers[2])] == [ITEMS[one], ITEMS[other]]
    with pytest.raises(PromptError):
        cls(ensemble=items).batch([one, "", other])
    assert is_freed(items)


def test_chat_batch_takes_what_the_base_class_takes(items):
    model = ChatSafeLLM(ensemble=items)
    one, other = list(ITEMS)[:2]
    recorders = [Recorder(), Recorder()]
    answers = model.batch([one, other], [{"callbacks": [recorder]} for recorder in recorders], stop=["0"])
    assert [answer.text for answer in answers] == [ITEMS[one].split("0")[0], ITEMS[other].split("0")[0]]
    assert [recorder.results[0].generations[0][0].text for recorder in recorders] == [a.text for a in answers]
    assert model.batch([]) == []
    with pytest.raises(ValueError, match="config"):
        model.batch([one, other], [{}])


def test_run_id_of_a_chat_batch_is_that_of_its_first_call(items):
    run_ids = []

    class Noting(Recorder):
        def on_chat_model_start(self, *args, run_id, **kwargs):
            run_ids.append(run_id)

    given = uuid.uuid4()
    config = {"run_id": given, "callbacks": [Noting()]}
    with pytest.warns(RuntimeWarning, match="run_id"):
        ChatSafeLLM(ensemble=items).batch(list(ITEMS)[:3], config)
    assert run_ids.count(given) == 1
    assert len(set(run_ids)) == 3

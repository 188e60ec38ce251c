"""Cache keys of both LangChain models: what differs in anything that decides the answer shares no entry."""

from __future__ import annotations

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from langchain_support import (
    COUNT,
    EASY,
    MODELS,
    QUESTION,
    VERIFIED,
    Recorder,
    forwards,
    text_of,
    treasure,
)
from safe_llm.testing import scripted_ensemble

each_model = pytest.mark.parametrize("cls", MODELS)


@pytest.fixture(params=["global", "own"])
def caching(request):
    """A cache for all models, or keywords of one."""
    if request.param == "own":
        yield {"cache": InMemoryCache()}
        return
    set_llm_cache(InMemoryCache())
    yield {}
    set_llm_cache(None)


@each_model
def test_same_call_is_answered_from_the_cache(cls, caching):
    ensemble = treasure()
    model = cls(ensemble=ensemble, **caching)
    first = model.invoke(QUESTION, max_tokens=20, stop=["tree"])
    before = forwards(ensemble)
    for asked in (model, cls(ensemble=ensemble, **caching), model.bind(max_tokens=20)):
        assert text_of(asked.invoke(QUESTION, max_tokens=20, stop=["tree"])) == text_of(first)
    assert forwards(ensemble) == before


@each_model
async def test_same_async_call_is_answered_from_the_cache(cls, caching):
    ensemble = treasure()
    model = cls(ensemble=ensemble, **caching)
    first = await model.ainvoke(QUESTION, max_tokens=20)
    before = forwards(ensemble)
    assert text_of(await model.ainvoke(QUESTION, max_tokens=20)) == text_of(first)
    assert text_of(model.invoke(QUESTION, max_tokens=20)) == text_of(first)
    assert forwards(ensemble) == before
    assert text_of(await model.ainvoke(QUESTION, max_tokens=2)) != text_of(first)


CALLS = [
    ({"max_tokens": 3}, {"max_tokens": 6}),
    ({"max_new_tokens": 3}, {"max_new_tokens": 6}),
    ({}, {"max_tokens": 6}),
    ({"temperature": 2.0, "seed": 1}, {"temperature": 2.0, "seed": 2}),
    ({"temperature": 2.0, "seed": 1}, {"temperature": 0.0, "seed": 1}),
    ({"temperature": 2.0, "seed": 1, "top_p": 1.0}, {"temperature": 2.0, "seed": 1, "top_p": 0.1}),
    ({"stop": ["three"]}, {"stop": ["two"]}),
    ({"stop": ["three"]}, {}),
    ({"stop_sequences": ["three"]}, {"stop_sequences": ["two"]}),
    ({"min_tokens": 80, "max_tokens": 80}, {"min_tokens": 0, "max_tokens": 80}),
    ({"logprobs": 1}, {"logprobs": None}),
]


@each_model
@pytest.mark.parametrize(("one", "other"), CALLS)
def test_calls_that_differ_in_a_parameter_share_no_entry(cls, one, other, caching):  # E01, E02
    ensemble = treasure()
    model = cls(ensemble=ensemble, **caching)
    for kwargs in (one, other):
        before = forwards(ensemble)
        cached = text_of(model.invoke(COUNT, **kwargs))
        assert forwards(ensemble) > before
        assert cached == text_of(cls(ensemble=ensemble, cache=False).invoke(COUNT, **kwargs))


@each_model
@pytest.mark.parametrize(("one", "other"), CALLS)
def test_objects_that_differ_in_a_parameter_share_no_entry(cls, one, other, caching):  # E01, E02
    ensemble = treasure()
    for kwargs in (one, other):
        before = forwards(ensemble)
        cls(ensemble=ensemble, **kwargs, **caching).invoke(COUNT)
        assert forwards(ensemble) > before


@each_model
@pytest.mark.parametrize(
    "options", [{"mode": "drafter"}, {"weights": (1.0, 9.0)}, {"method": "gac"}, {"lookahead": 2}, {"top_k": 3}]
)
def test_ensembles_that_differ_share_no_entry(cls, options, caching):  # E01, E02
    for ensemble in (treasure(), treasure(**options)):
        cls(ensemble=ensemble, **caching).invoke(QUESTION)
        assert forwards(ensemble) > 0


@each_model
def test_ensembles_of_other_weights_share_no_entry(cls, caching):  # E01, E02
    one, other = treasure(), scripted_ensemble({QUESTION: "Nowhere."})
    for ensemble, fingerprint in ((one, "weights 1"), (other, "weights 2")):
        for member in ensemble.members:
            member.fingerprint = f"{member.name}: {fingerprint}"
    assert text_of(cls(ensemble=one, **caching).invoke(QUESTION)) == VERIFIED[QUESTION]
    assert text_of(cls(ensemble=other, **caching).invoke(QUESTION)) == "Nowhere."


def test_chat_and_text_and_tools_share_no_entry(caching):
    def look(place: str) -> str:
        """Look at a place."""

    ensemble = treasure()
    chat = ChatSafeLLM(ensemble=ensemble, **caching)
    for model in (SafeLLM(ensemble=ensemble, **caching), chat, chat.bind_tools([look]), chat.bind(logprobs=1)):
        before = forwards(ensemble)
        model.invoke(EASY)
        assert forwards(ensemble) > before


def test_cached_chat_answer_is_reported_and_whole(caching):
    model = ChatSafeLLM(ensemble=treasure(), **caching)
    first = model.invoke(QUESTION)
    recorder = Recorder()
    again = model.invoke(QUESTION, config={"callbacks": [recorder]})
    assert recorder.events == ["start", "end"]
    assert again.response_metadata == first.response_metadata
    assert again.usage_metadata["total_tokens"] == first.usage_metadata["total_tokens"]

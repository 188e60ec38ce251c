"""Both LangChain models as objects: copied, compared, pickled; nothing is loaded before it is needed."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
from langchain_core.runnables import ConfigurableField

from helpers import tiny_folder
from langchain_safe_llm import ChatSafeLLM
from langchain_support import (
    COUNT,
    DRAFTED,
    EASY,
    MODELS,
    NUMBERS,
    QUESTION,
    text_of,
    treasure,
)
from safe_llm import Ensemble
from safe_llm.testing.tokenizers import metaspace

each_model = pytest.mark.parametrize("cls", MODELS)


def output_tokens(model, question=COUNT, **kwargs):
    return len(model.get_token_ids(text_of(model.invoke(question, **kwargs))))


# ---------------------------------------------------------------------- copies


@each_model
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda model: model.model_copy(),
        lambda model: model.model_copy(deep=True),
        lambda model: model.with_config(tags=["t"]).bound,
    ],
    ids=["copy", "deepcopy", "model_copy", "model_copy_deep", "with_config"],
)
def test_copies_share_the_ensemble(cls, copied):  # E17
    ensemble = treasure()
    model = cls(ensemble=ensemble, max_tokens=60)
    model.invoke(EASY)
    twin = copied(model)
    assert twin.load() is ensemble
    assert twin == model
    assert text_of(twin.invoke(EASY)) == DRAFTED[EASY]


@each_model
def test_copy_with_other_fields_is_another_model(cls):
    ensemble, other = treasure(), treasure(mode="drafter")
    model = cls(ensemble=ensemble)
    short = model.model_copy(update={"max_tokens": 3})
    assert output_tokens(short) == 3
    assert output_tokens(model) > 3
    assert short != model
    moved = model.model_copy(update={"ensemble": other})
    assert moved.load() is other
    assert model.load() is ensemble
    assert text_of(moved.invoke(QUESTION)) == DRAFTED[QUESTION]


@each_model
async def test_fields_can_be_configured_per_call(cls):
    model = cls(ensemble=treasure()).configurable_fields(max_tokens=ConfigurableField(id="size"))
    configured = model.with_config(configurable={"size": 5})
    assert model.prepare({"configurable": {"size": 5}})[0].load() is model.default.load()
    assert NUMBERS.startswith(text_of(configured.invoke(COUNT)))
    assert len(text_of(configured.invoke(COUNT))) < len(text_of(model.invoke(COUNT)))
    chunks = [text_of(chunk) async for chunk in model.astream(COUNT, config={"configurable": {"size": 20}})]
    assert len(chunks) > 3  # configuring turns no streaming off
    assert len(list(configured.stream(COUNT))) > 1


@each_model
def test_ensemble_of_loaded_members_cannot_be_pickled(cls):  # E17
    with pytest.raises(TypeError, match="loaded members cannot be pickled"):
        pickle.dumps(cls(ensemble=treasure()))


# ---------------------------------------------------------------------- laziness


@pytest.fixture
def loads_nothing(monkeypatch):
    """Fail when an ensemble is loaded or a model is looked for."""
    monkeypatch.setattr(Ensemble, "from_spec", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr("safe_llm.models.resolve", lambda *a, **k: pytest.fail("resolved"))


@each_model
@pytest.mark.parametrize(
    "source",
    [
        {"preset": "demo"},
        {"preset": "demo", "ensemble_config": {"lookahead": 3}},
        {"drafter": "qwen2.5-coder-0.5b-instruct", "verifiers": ["smollm2-135m-instruct"]},
        {"drafter": "owner/name", "verifiers": ({"model": "owner/other", "revision": "abc"},)},
    ],
)
def test_object_of_a_description_can_be_handled_without_loading(cls, source, loads_nothing):  # E19
    model, twin, other = cls(**source), cls(**source), cls(**source, seed=3)
    assert model == twin
    assert model != other
    assert model._identifying_params == twin._identifying_params != other._identifying_params
    assert "+" in model.model_name
    assert model._get_ls_params()["ls_model_name"] == model.model_name
    restored = pickle.loads(pickle.dumps(model))
    for same in (restored, copy.copy(model), copy.deepcopy(model), model.model_copy(deep=True)):
        assert same == model
        assert same._identifying_params == model._identifying_params
    for text in (repr(model), str(model), str(model._identifying_params)):
        assert "0x" not in text  # the same in every process
    assert model.with_config(tags=["a"]).bind(stop=["x"])
    if cls is ChatSafeLLM:
        assert model.bind_tools([{"name": "f", "description": "", "parameters": {}}])
        assert model.with_structured_output({"title": "t", "description": "d", "type": "object", "properties": {}})
        assert "max_input_tokens" not in model.profile


@each_model
def test_other_descriptions_have_other_identities(cls, loads_nothing):
    same = {"drafter": "a/b", "verifiers": ["c/d"]}
    models = [
        cls(preset="demo"),
        cls(preset="demo3"),
        cls(preset="demo", ensemble_config={"lookahead": 3}),
        cls(**same),
        cls(drafter="a/b", verifiers=[{"model": "c/d", "revision": "1"}]),
        cls(drafter="a/b", verifiers=["c/d"], ensemble_config={"weights": (1, 2)}),
    ]
    assert len({model._identifying_params["ensemble"] for model in models}) == len(models)
    assert cls(**same, show_progress=False)._identifying_params == cls(**same)._identifying_params


@each_model
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "dmo"}, "did you mean 'demo'"),
        ({"preset": "demo", "drafter": "a/b"}, "give exactly one"),
        ({"preset": "demo", "verifiers": ["a/b"]}, "verifiers"),
        ({"preset": "demo", "ensemble_config": {"lookahed": 3}}, "did you mean 'lookahead'"),
        ({"preset": "demo", "max_tokens": 0}, "max_tokens"),
        ({"preset": "demo", "timeout": 0}, "timeout"),
        ({"preset": "demo", "stop": [""]}, "stop string"),
        ({"preset": "demo", "system_prompt": "Be nice."}, "unknown parameter 'system_prompt'"),
        ({"ensemble": "demo"}, "preset="),
    ],
)
def test_wrong_description_is_refused_at_once(cls, wrong, message, loads_nothing):  # E22
    with pytest.raises(ValueError, match=message):
        cls(**wrong)


def test_import_and_objects_need_no_torch():  # E19
    program = (
        "import sys, pickle, copy\n"
        "from langchain_safe_llm import ChatSafeLLM, SafeLLM\n"
        "for cls in (ChatSafeLLM, SafeLLM):\n"
        "    model = cls(preset='demo', temperature=0.5)\n"
        "    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == model\n"
        "    print(repr(model), model._identifying_params, model.model_name)\n"
        "ChatSafeLLM(preset='demo').bind_tools([{'name': 'f', 'description': '', 'parameters': {}}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=_environment())


def _environment():
    return {**os.environ, "PYTHONPATH": "integrations", "LANGSMITH_TRACING": "false"}


@pytest.fixture
def folders(tmp_path):
    return {
        "drafter": str(tiny_folder(tmp_path / "one", seed=1)),
        "verifiers": [str(tiny_folder(tmp_path / "two", metaspace(), seed=2))],
    }


def test_objects_of_one_description_share_what_is_loaded(folders):
    models = [cls(**folders, max_tokens=6, show_progress=False) for cls in (*MODELS, ChatSafeLLM)]
    restored = pickle.loads(pickle.dumps(models[0]))
    assert models[0].profile.get("max_input_tokens") is None
    text = models[0].invoke("Hello").text
    loaded = models[0].load()
    assert all(model.load() is loaded for model in (*models, restored))
    assert restored.invoke("Hello").text == models[2].invoke("Hello").text == text
    other = ChatSafeLLM(**folders, ensemble_config={"lookahead": 2})
    assert other.load() is not loaded
    assert other.load().members[0] is not loaded.members[0]


def test_profile_knows_the_context_window_once_it_is_loaded(folders):  # E23
    model = ChatSafeLLM(**folders, show_progress=False)
    assert "max_input_tokens" not in model.profile
    model.invoke("Hello", max_tokens=1)
    assert model.profile["max_input_tokens"] == model.load().max_context == 512
    assert ChatSafeLLM(**folders).profile["max_input_tokens"] == 512
    own = ChatSafeLLM(**folders, profile={"max_input_tokens": 100})
    own.load()
    assert own.profile == {"max_input_tokens": 100}

"""Handles on ensembles: checked without loading, loaded once, shared, compared and pickled by what they describe."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest

from helpers import QUESTION, tiny_folder
from safe_llm import Ensemble, EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, ModelNotFoundError
from safe_llm.sharing import LazyEnsemble
from safe_llm.testing import scripted_ensemble

GUARD_S = 60.0  # against a hang only
ANSWERS = {"Who?": "Leo has 12 apples."}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("safe_llm.sharing._LOADED", weakref.WeakValueDictionary())  # nothing of the other tests


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "m")


@pytest.fixture
def loads(monkeypatch):
    """Specs that were loaded, in order; a scripted ensemble takes the place of the weights."""
    specs = []

    def from_spec(spec, *, progress):
        specs.append(spec)
        return scripted_ensemble(ANSWERS)

    monkeypatch.setattr(Ensemble, "from_spec", from_spec)
    return specs


# ---------------------------------------------------------------------- describing


def test_three_ways_and_what_they_describe(tmp_path, loads):
    safe = scripted_ensemble(ANSWERS)
    (tmp_path / "e.toml").write_text(
        '[drafter]\nmodel = "a/b"\n[ensemble]\nlookahead = 3\n[sampling]\nmax_tokens = 7\n'
    )
    toml = EnsembleSpec.from_toml(tmp_path / "e.toml")
    of = LazyEnsemble.of
    assert of(ensemble=safe).get() is safe
    assert of(ensemble=safe).spec is None
    assert of(preset="demo").names == ("qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct")
    assert (
        of(preset=tmp_path / "e.toml").spec == of(preset=str(tmp_path / "e.toml")).spec == of(preset=toml).spec == toml
    )
    assert of(preset=toml).sampling == {"max_tokens": 7}
    assert of(ensemble=safe).sampling == of(preset="demo").sampling == {}
    members = of(drafter="a/d", verifiers=[tmp_path / "v", MemberConfig(model="w"), {"model": "x", "name": "last"}])
    assert members.names == ("d", "v", "w", "last")
    assert of(ensemble=safe).names == ("drafter", "verifier")
    assert loads == []


def test_config_changes_the_presets_or_replaces_it():
    spec = EnsembleSpec(drafter=MemberConfig(model="d"), ensemble=EnsembleConfig(lookahead=3, method="gac"))
    ensemble_of = lambda config: LazyEnsemble.of(preset=spec, config=config).spec.ensemble  # noqa: E731
    assert ensemble_of(None) == spec.ensemble
    assert ensemble_of({"lookahead": 4}) == EnsembleConfig(lookahead=4, method="gac")
    assert ensemble_of(EnsembleConfig(lookahead=4)) == EnsembleConfig(lookahead=4)
    assert LazyEnsemble.of(drafter="d", config={"mode": "drafter"}).spec.ensemble == EnsembleConfig(mode="drafter")


TWO = EnsembleSpec(drafter=MemberConfig(model="d"), verifiers=(MemberConfig(model="v"),))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got none of them.*demo"),
        ({"preset": "demo", "drafter": "d"}, "got preset and drafter"),
        ({"preset": "demo", "verifiers": ["v"]}, "verifiers are given with preset.*drafter only"),
        ({"verifiers": ["v"]}, "got none of them"),
        ({"preset": "dmo"}, "unknown preset 'dmo'.*did you mean 'demo'"),
        ({"preset": "nowhere.toml"}, "cannot read the configuration"),
        ({"preset": 7}, "preset must be a name, a path or an EnsembleSpec, got int"),
        ({"drafter": 7}, "a member must be .*got int.*Ensemble"),
        ({"drafter": "d", "verifiers": "v"}, "verifiers must be a list, got str"),
        ({"drafter": "d", "verifiers": ["d"]}, "two members are called 'd'"),
        ({"drafter": {"model": "d", "dtyp": "float32"}}, "unknown parameter 'dtyp'.*did you mean 'dtype'"),
        ({"preset": "demo", "config": {"weights": (1.0,)}}, "1 weights for 2 members"),
        ({"preset": TWO, "config": EnsembleConfig(weights=(1.0,))}, "1 weights for 2 members"),
        ({"preset": "demo", "config": {"lookahed": 3}}, "did you mean 'lookahead'"),
        ({"preset": "demo", "config": "safe"}, "config must be an EnsembleConfig or a mapping, got str"),
        ({"preset": TWO.model_copy(update={"sampling": {"max_token": 3}})}, "did you mean 'max_tokens'"),
        ({"ensemble": "demo"}, "ensemble must be an Ensemble, got str.*preset="),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(given, message, loads):
    with pytest.raises(ConfigError, match=message):
        LazyEnsemble.of(**given)
    assert loads == []


def test_loaded_ensemble_takes_no_config_and_no_second_way():
    safe = scripted_ensemble(ANSWERS)
    with pytest.raises(ConfigError, match="config is given with a loaded ensemble"):
        LazyEnsemble.of(ensemble=safe, config={"lookahead": 3})
    with pytest.raises(ConfigError, match="got ensemble and preset"):
        LazyEnsemble.of(ensemble=safe, preset="demo")
    with pytest.raises(ConfigError, match="verifiers are given with ensemble"):
        LazyEnsemble.of(ensemble=safe, verifiers=["v"])


def test_describing_imports_no_torch():
    code = """
import sys, copy, pickle
from safe_llm.sharing import LazyEnsemble
handle = LazyEnsemble.of(preset="demo", config={"lookahead": 3})
repr(handle), handle.key, handle.names, hash(handle), handle.is_loaded, copy.deepcopy(handle)
assert pickle.loads(pickle.dumps(handle)) == handle
try:
    LazyEnsemble.of(ensemble=object())
except ValueError:
    print(*[m for m in ("torch", "transformers", "accelerate") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "\n"


# ---------------------------------------------------------------------- loading


def test_folder_is_loaded_on_first_use_and_answers(folder):
    handle = LazyEnsemble.of(
        drafter=MemberConfig(model=str(folder), dtype="float32"), config={"lookahead": 3}, progress=False
    )
    assert not handle.is_loaded
    safe = handle.get()
    assert handle.is_loaded
    assert safe.config.lookahead == 3
    assert [member.name for member in safe.members] == list(handle.names) == ["m"]
    twin = Ensemble.from_pretrained(MemberConfig(model=str(folder), dtype="float32"), lookahead=3, progress=False)
    assert safe.generate(QUESTION, max_tokens=9).text == twin.generate(QUESTION, max_tokens=9).text
    assert safe.fingerprint == twin.fingerprint


def test_sixteen_threads_load_once(monkeypatch):
    loads, got = [], []
    together, first_is_there = threading.Barrier(16), threading.Event()

    def from_spec(spec, *, progress):
        loads.append(spec)
        first_is_there.wait(0.05)  # time for the others to do wrong
        return scripted_ensemble(ANSWERS)

    monkeypatch.setattr(Ensemble, "from_spec", from_spec)

    def ask():
        handle = LazyEnsemble.of(preset="demo")
        together.wait(GUARD_S)
        got.append(handle.get())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert len(loads) == 1
    assert len(got) == 16
    assert len({id(safe) for safe in got}) == 1


def test_different_ensembles_load_at_the_same_time(monkeypatch):
    both_load = threading.Barrier(2)

    def from_spec(spec, *, progress):
        both_load.wait(GUARD_S)
        return scripted_ensemble(ANSWERS)

    monkeypatch.setattr(Ensemble, "from_spec", from_spec)
    handles = [LazyEnsemble.of(preset=name) for name in ("demo", "demo3")]
    threads = [threading.Thread(target=handle.get) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    assert all(handle.is_loaded for handle in handles)


def test_handles_of_an_equal_spec_share_and_others_do_not(loads):
    first, second = (LazyEnsemble.of(preset="demo") for _ in range(2))
    other = LazyEnsemble.of(preset="demo", config={"lookahead": 4})
    safe = first.get()
    assert second.is_loaded
    assert second.get() is first.get() is safe
    assert not other.is_loaded
    assert other.get() is not safe
    assert len(loads) == 2


def test_ensemble_lives_as_long_as_one_of_its_handles(loads):
    first, second = (LazyEnsemble.of(preset="demo") for _ in range(2))
    gone = weakref.ref(first.get())
    second.get()
    del first
    gc.collect()
    assert gone() is second.get()
    del second
    gc.collect()
    assert gone() is None
    assert not LazyEnsemble.of(preset="demo").is_loaded


def test_closed_ensemble_is_freed_and_loaded_anew(loads, monkeypatch):
    handle = LazyEnsemble.of(preset="demo")
    handle.get().close()
    assert handle.get().generate("Who?").text == ANSWERS["Who?"]
    assert len(loads) == 2
    closed = weakref.ref(handle.get())
    handle.get().close()
    assert not handle.is_loaded
    held = []

    def from_spec(spec, *, progress):
        gc.collect()
        held.append(closed())
        return scripted_ensemble(ANSWERS)

    monkeypatch.setattr(Ensemble, "from_spec", from_spec)
    assert not handle.get().is_closed
    assert held == [None], "two sets of weights may not fit"


def test_given_ensemble_is_returned_even_if_closed():
    safe = scripted_ensemble(ANSWERS)
    safe.close()
    handle = LazyEnsemble.of(ensemble=safe)
    assert safe.is_closed
    assert handle.is_loaded
    assert handle.get() is safe


def test_failed_load_raises_and_the_next_get_tries_again(tmp_path):
    handle = LazyEnsemble.of(drafter=str(tmp_path / "late"), progress=False)
    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            handle.get()
    assert not handle.is_loaded
    tiny_folder(tmp_path / "late")
    assert handle.get().members[0].name == "late"


def test_progress_is_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(
        Ensemble, "from_spec", lambda spec, *, progress: (seen.append(progress), scripted_ensemble(ANSWERS))[1]
    )
    quiet = LazyEnsemble.of(preset="demo", progress=False)
    for handle in (quiet, pickle.loads(pickle.dumps(quiet)), LazyEnsemble.of(preset="demo3")):
        handle.get().close()
    assert seen == [False, False, True]


# ---------------------------------------------------------------------- identity


def test_identity_is_json_and_follows_what_decides_the_answers(folder):
    handles = [
        LazyEnsemble.of(**given)
        for given in (
            {"preset": "demo"},
            {"preset": "demo3"},
            {"preset": "demo", "config": {"lookahead": 4}},
            {"preset": TWO},
            {"preset": TWO.model_copy(update={"sampling": {"max_tokens": 3, "stop": ("a",)}})},
            {"drafter": folder},
            {"drafter": MemberConfig(model=str(folder), dtype="float32")},
            {"ensemble": scripted_ensemble(ANSWERS)},
            {"ensemble": scripted_ensemble(ANSWERS, lookahead=4)},
        )
    ]
    assert len({handle.key for handle in handles}) == len(set(handles)) == len(handles)
    for handle in handles:
        assert json.loads(json.dumps(handle.identity)) == handle.identity
        assert len(handle.key) == 16
    assert set(handles[0].identity) == {"members", "config", "sampling"}
    safe = handles[-1].get()
    assert handles[-1].identity == {"fingerprint": safe.fingerprint, "members": ["drafter", "verifier"]}
    assert handles[0].key == LazyEnsemble.of(preset="demo").key


def test_identity_follows_the_files_of_local_weights(tmp_path, folder, loads):
    weights, gguf = folder / "model.safetensors", tmp_path / "x.gguf"
    gguf.write_bytes(b"weights")
    before = [LazyEnsemble.of(drafter=path) for path in (folder, gguf)]
    assert before == [LazyEnsemble.of(drafter=path) for path in (folder, gguf)]
    for handle in before:
        handle.get()
    os.utime(weights, ns=(1, 1))
    gguf.write_bytes(b"other weights")
    after = [LazyEnsemble.of(drafter=path) for path in (folder, gguf)]
    assert not set(before) & set(after)
    assert not after[0].is_loaded, "replaced weights are not served from before"


def test_folder_that_has_a_demo_models_name_does_not_count(tmp_path, monkeypatch):
    before = LazyEnsemble.of(preset="demo").key
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.chdir(tmp_path)
    assert LazyEnsemble.of(preset="demo").key == before


@pytest.mark.parametrize("model", ["a\0b", "x" * 5000, "~nobody-of-that-name/m", "/proc/1/root/m"])
def test_unusual_model_names_have_an_identity(model):
    assert LazyEnsemble.of(drafter=MemberConfig(model=model, name="m")).key


def test_template_variables_that_are_not_json_have_an_identity():
    one, other = (LazyEnsemble.of(drafter={"model": "m", "template_kwargs": {"f": f}}) for f in (len, repr))
    assert one.key != other.key
    assert json.dumps(one.identity)


def test_repr_names_members_and_loads_nothing(loads):
    assert repr(LazyEnsemble.of(preset=TWO)) == "<LazyEnsemble of d, v; safe, auto>"
    assert repr(LazyEnsemble.of(ensemble=scripted_ensemble(ANSWERS))).startswith("<LazyEnsemble of drafter, verifier")
    assert loads == []


# ---------------------------------------------------------------------- as a value


def test_handles_compare_by_spec_or_by_the_given_ensemble():
    safe = scripted_ensemble(ANSWERS)
    of = LazyEnsemble.of
    assert of(preset="demo") == of(preset="demo", progress=False)
    assert hash(of(preset="demo")) == hash(of(preset="demo"))
    assert of(preset="demo") != of(preset="demo3")
    assert of(ensemble=safe) == of(ensemble=safe)
    assert hash(of(ensemble=safe)) == hash(of(ensemble=safe))
    assert of(ensemble=safe) != of(ensemble=scripted_ensemble(ANSWERS))
    assert of(ensemble=safe) != of(preset="demo")
    assert of(preset="demo") != "demo"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_share_the_loaded_ensemble(copied, loads):
    early = LazyEnsemble.of(preset="demo")
    late = copied(early)
    assert early.get() is late.get()
    assert copied(early) == early
    given = LazyEnsemble.of(ensemble=scripted_ensemble(ANSWERS))
    assert copied(given).get() is copied({"llm": given})["llm"].get() is given.get()
    assert len(loads) == 1


def test_pickle_keeps_the_description_and_not_the_weights(loads):
    handle = LazyEnsemble.of(preset=TWO, config={"weights": (2.0, 1.0)})
    handle.get()
    data = pickle.dumps(handle)
    assert len(data) < 10_000
    assert b"Scripted" not in data
    again = pickle.loads(data)
    assert again == handle
    assert again.spec == handle.spec
    assert again.get() is handle.get(), "in one process it is still the shared one"
    with pytest.raises(TypeError, match=r"cannot be pickled; build from preset= or drafter="):
        pickle.dumps(LazyEnsemble.of(ensemble=scripted_ensemble(ANSWERS)))


def test_pickled_handle_loads_in_another_process(folder):
    handle = LazyEnsemble.of(drafter=folder, config={"mode": "drafter"}, progress=False)
    expected = handle.get().generate(QUESTION, max_tokens=5).text
    use = f"generate({QUESTION!r}, max_tokens=5).text"
    code = f"import pickle, sys; print(repr(pickle.load(sys.stdin.buffer).get().{use}))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(handle), capture_output=True, timeout=300)
    assert done.stdout.decode().strip() == repr(expected), done.stderr.decode()


def test_handle_of_the_same_objects_is_the_previous_one():
    config = {"lookahead": 3}
    handle = LazyEnsemble.of(preset="demo", config=config)
    assert LazyEnsemble.of(preset="demo", config=config, previous=handle) is handle
    assert LazyEnsemble.of(preset="demo", config={"lookahead": 4}, previous=handle) is not handle
    assert LazyEnsemble.of(preset="demo3", config=config, previous=handle) is not handle

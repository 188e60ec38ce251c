"""transformers' `generate` beside our engine, on tiny random models; what passes cost; the engine's own time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from helpers import ensemble, tiny_folder, tiny_member
from safe_llm.bench import benchmark, transformers_contender
from safe_llm.bench.benchmark import Settings, bench, bench_own_time, prepare
from safe_llm.bench.ceiling import PASS_TOKENS, bytes_per_step, measure_bandwidth, measure_ceiling
from safe_llm.bench.replay import measure_own_time, shuffled_words
from safe_llm.bench.results import results_as_dict
from safe_llm.bench.transformers_contender import TransformersContender, assisted, generating, untouched_twin
from safe_llm.bench.trials import Unavailable
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig, preset
from safe_llm.errors import ConfigError, MemberError
from safe_llm.events import RoundFinished
from safe_llm.member import Member
from safe_llm.testing import scripted_ensemble
from safe_llm.testing.tokenizers import byte_level, metaspace
from safe_llm.types import Message

QUESTION = (Message(role="user", content="In 1850 Leo has 12 apples"),)


@pytest.fixture
def drafter() -> Member:
    return tiny_member("drafter", byte_level())


def loaded(folder, name: str, **options) -> Member:
    return Member.load(MemberConfig(model=str(tiny_folder(folder / name, **options)), self_check=False))


# ---------------------------------------------------------------------- generate


def test_generate_says_what_the_engine_says_alone(drafter):
    run = generating("generate", [drafter]).run(QUESTION, 12)
    result = ensemble(drafter, mode="drafter").generate(QUESTION, max_tokens=12)
    assert run.num_tokens == result.usage.completion_tokens
    assert [step.num_tokens for step in run.steps] == list(range(1, run.num_tokens + 1))
    seconds = [step.seconds for step in run.steps]
    assert seconds == sorted(seconds)
    assert run.total_s >= seconds[-1]
    assert run.counts.num_forwards == {"drafter": run.num_tokens}


def test_generate_decodes_the_ids_of_the_engine_whatever_the_model_prefers(drafter, monkeypatch):
    own = drafter.backend.model.generation_config
    monkeypatch.setattr(own, "suppress_tokens", list(range(drafter.vocabulary.width - 4)))
    monkeypatch.setattr(own, "do_sample", True)
    contender = generating("generate", [drafter])
    seen = []
    contender._model.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    contender.run(QUESTION, 6)
    ids = torch.cat(seen, dim=1)[0].tolist()
    prompt = drafter.prompter.encode(QUESTION)
    assert ids[: len(prompt)] == prompt
    events = ensemble(drafter, mode="drafter").stream(QUESTION, events=True, max_tokens=5)
    expected = b"".join(event.committed for event in events if isinstance(event, RoundFinished))
    assert b"".join(map(drafter.vocabulary.surface, ids[len(prompt) :])) == expected
    assert len(ids) == len(prompt) + 5  # the sixth token is not fed


def test_twin_shares_weights_and_nothing_else(drafter):
    model = drafter.backend.model
    twin = untouched_twin(drafter)
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "safe_llm_packed"
    assert all(m.config._attn_implementation == "sdpa" for m in twin.modules() if hasattr(m, "config"))
    ids = torch.tensor([drafter.prompter.encode(QUESTION)])
    with torch.inference_mode():
        assert torch.allclose(twin(ids).logits, drafter.fresh_model(ids).logits, atol=1e-5)
    twin.register_forward_pre_hook(lambda *_: pytest.fail("the engine's model runs the twin's hooks"))
    ensemble(drafter, mode="drafter").generate(QUESTION, max_tokens=2)


def test_generate_of_what_is_no_transformers_model_is_refused():
    members = scripted_ensemble({"a": "b"}).members
    for build in (generating, assisted):
        with pytest.raises(ConfigError, match="member 'drafter' is no transformers model"):
            build("x", members)
    prepared = prepare(Settings(spec=preset("demo"), contenders=("safe", "generate")))
    with pytest.raises(ConfigError, match="leave generate and assisted out of --contenders"):
        bench(prepared, members)


def test_failure_of_generate_names_the_member(drafter):
    contender = generating("generate", [drafter])
    contender._model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(MemberError, match="member 'drafter': transformers raised ZeroDivisionError"):
        contender.run(QUESTION, 4)


# ---------------------------------------------------------------------- assisted


def test_assisted_generation_says_the_same_with_another_tokenizer(tmp_path):
    members = [loaded(tmp_path, "large", tokenizer=metaspace()), loaded(tmp_path, "small", seed=1)]
    alone = generating("generate", members).run(QUESTION, 8)
    run = assisted("assisted", members).run(QUESTION, 8)
    assert run.num_tokens == alone.num_tokens == run.steps[-1].num_tokens
    assert run.counts.num_forwards["large"] <= alone.num_tokens
    assert run.counts.num_forwards["small"] > 0


def test_assisted_generation_of_one_vocabulary_needs_no_tokenizers(tmp_path, monkeypatch):
    members = [loaded(tmp_path, "one"), loaded(tmp_path, "other", seed=1)]
    monkeypatch.setattr(transformers_contender, "_size", lambda model: "one" in model.name_or_path)
    contender = assisted("assisted", members)
    assert contender._options.keys() == {"assistant_model"}
    assert contender.run(QUESTION, 8).num_tokens == generating("generate", members).run(QUESTION, 8).num_tokens


def test_assisted_generation_says_why_it_does_not_apply(drafter, tmp_path):
    with pytest.raises(Unavailable, match="no verifier that is a transformers model"):
        assisted("assisted", [drafter, *scripted_ensemble({"a": "b"}).members])
    with pytest.raises(Unavailable, match="no verifier is smaller than the drafter 'drafter'"):
        assisted("assisted", [drafter, tiny_member("other", byte_level(), seed=1)])
    large = tiny_member("large", metaspace())
    with pytest.raises(Unavailable, match="cannot load the tokenizer of 'large'"):
        assisted("assisted", [large, drafter])
    assistant = ("drafter", untouched_twin(drafter))
    without_tokenizers = TransformersContender("assisted", large, untouched_twin(large), assistant=assistant)
    with pytest.raises(Unavailable, match="transformers raised ValueError with the assistant 'drafter'"):
        without_tokenizers.run(QUESTION, 4)


# ---------------------------------------------------------------------- the ceiling


def test_step_reads_all_weights_but_an_input_embedding_of_its_own(drafter):
    model = drafter.backend.model
    everything = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    assert bytes_per_step(drafter) == 4 * (everything - embedding.numel())
    model.get_output_embeddings().weight, head = embedding, model.get_output_embeddings().weight
    try:
        assert bytes_per_step(drafter) == 4 * (everything - head.numel())  # tied: the head reads it
    finally:
        model.get_output_embeddings().weight = head
    assert bytes_per_step(scripted_ensemble({"a": "b"}).members[0]) is None


def test_bandwidth_is_that_of_the_fastest_read_or_copy():
    times = iter([0, 4, 10, 12, *range(100, 200)])
    # a read of 1 KiB in 4 s, a copy (2 KiB) in 2 s, then each in 1 s
    assert measure_bandwidth(torch.device("cpu"), buffer_bytes=1024, clock=lambda: next(times)) == 2048


class Slower:
    """A clock by which the passes of the drafter take 2 s and those of the verifier 3 s and one more per new token."""

    def __init__(self, members) -> None:
        self._now, self.lengths = 0.0, set[int]()
        for cost, member in enumerate(members):
            self._watch(member.backend, cost)

    def _watch(self, backend, cost: int) -> None:
        forward = backend.forward

        def watched(feeds):
            self.lengths.add(backend.length(feeds[0].row))
            self._now += 2 if cost == 0 else 3 + len(feeds[0].ids)
            return forward(feeds)

        backend.forward = watched

    def __call__(self) -> float:
        return self._now


def test_passes_are_relative_to_the_drafters_step():
    members = scripted_ensemble({"a": "b"}).members
    clock = Slower(members)
    drafter, verifier = measure_ceiling(members, QUESTION, clock=clock).members
    assert dict(drafter.relative) == dict.fromkeys(PASS_TOKENS, 1.0)
    assert dict(verifier.relative) == {1: 2.0, 6: 4.5, 16: 9.5}
    assert dict(verifier.pass_s) == {1: 4.0, 6: 9.0, 16: 19.0}
    assert (drafter.roofline, drafter.bytes_per_step) == (None, None)
    assert clock.lengths == {0, *(min(64, len(member.prompter.encode(QUESTION))) for member in members)}
    with pytest.raises(KeyError):  # the rows are given back
        members[0].backend.length(0)


def test_ceiling_of_a_transformers_model_is_bandwidth_over_bytes(drafter):
    (cost,) = measure_ceiling([drafter], QUESTION, buffer_bytes=4096).members
    assert cost.roofline == cost.bandwidth / bytes_per_step(drafter)


# ---------------------------------------------------------------------- own time


def test_own_time_leaves_the_passes_out():
    members = scripted_ensemble({"a": "b"}).members
    own = measure_own_time(members, EnsembleConfig(lookahead=5), num_tokens=500)
    assert (own.members, own.num_tokens) == (("drafter", "verifier"), 500)
    assert 0.01 < own.ensemble_rate < 0.3
    assert own.num_rounds >= 100


def test_own_time_by_a_clock_that_only_passes_move(monkeypatch):
    """Whatever the passes take, it is not the engine's."""
    from safe_llm.bench import replay

    now = [0.0]
    predict = replay.Replay._predict

    def slow(self, logits, offset):
        now[0] += 1000.0
        predict(self, logits, offset)

    monkeypatch.setattr(replay.Replay, "_predict", slow)
    members = scripted_ensemble({"a": "b"}).members
    own = measure_own_time(members, EnsembleConfig(), num_tokens=60, clock=lambda: now[0])
    assert now[0] > 1000
    assert (own.first_s, own.last_s) == (0.0, 0.0)


def test_own_time_of_a_text_that_ends_at_once_is_that_of_its_only_round():
    members = scripted_ensemble({"a": "b"}).members
    own = measure_own_time(members, EnsembleConfig(), num_tokens=1)
    assert own.num_rounds == 1
    assert own.first_s == own.last_s >= 0


def test_text_of_the_own_time_does_not_repeat_itself():
    words = shuffled_words(2000).split()
    assert len(words) == 2000
    passages = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    assert len(set(passages)) == len(passages)


# ---------------------------------------------------------------------- all of it


def test_benchmark_of_tiny_models(tmp_path):
    members = [loaded(tmp_path, "large", tokenizer=metaspace()), loaded(tmp_path, "small", seed=1)]
    spec = EnsembleSpec(drafter=MemberConfig(model="large"), verifiers=(MemberConfig(model="small"),))
    names = ("safe", "safe:lookahead=2", "every-token:gac", "drafter", "generate", "assisted")
    settings = Settings(spec=spec, contenders=names, workloads=("chat",), rounds=2, tokens=9, batch=(1, 2))
    found = results_as_dict(bench(prepare(settings), members))
    (workload,) = found["workloads"]
    by_name = {c["name"]: c for c in workload["contenders"]}
    assert tuple(by_name) == names[: len(by_name)]
    assert workload["reference"] == "generate"
    assert by_name["generate"]["ratio"] is None
    assert by_name["safe"]["ratio"]["low"] <= by_name["safe"]["ratio"]["value"] <= by_name["safe"]["ratio"]["high"]
    assert by_name["every-token:gac"]["drafts_per_token"] <= 1.0 <= by_name["safe:lookahead=2"]["drafts_per_token"]
    assert by_name["drafter"]["ensemble_rate"] == 0.0
    assert len(found["trials"]) == 2 * len(by_name)
    assert all(trial["steps"][-1][0] == trial["num_tokens"] <= 9 for trial in found["trials"])
    assert [b["rows"] for b in found["batches"]] == [1, 2]
    assert len(found["batch_trials"]) == 4
    assert found["settings"]["contenders"]["safe:lookahead=2"]["lookahead"] == 2
    assert [m["bytes_per_step"] for m in found["ceiling"]["members"]] == [bytes_per_step(m) for m in members]
    assert all(m["roofline"] == m["bandwidth"] / m["bytes_per_step"] for m in found["ceiling"]["members"])


def test_own_time_benchmark_says_whose_vocabularies(monkeypatch):
    monkeypatch.setattr(benchmark, "measure_own_time", partial(measure_own_time, num_tokens=50))
    members = scripted_ensemble({"a": "b"}).members
    results = bench_own_time(prepare(Settings(spec=preset("demo"))), members)
    assert results.own_time.members == ("drafter", "verifier")
    assert (results.ceiling, results.workloads) == (None, ())

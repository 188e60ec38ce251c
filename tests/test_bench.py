"""The benchmark's logic, without a clock: who takes part, turns, steps along an answer, figures, workloads."""

from __future__ import annotations

import itertools
import json

import pytest

from bench_support import made_run
from safe_llm.bench.benchmark import Settings, prepare
from safe_llm.bench.engine_contender import EngineContender
from safe_llm.bench.planning import default_contenders, plan_contender
from safe_llm.bench.running import race, race_batches
from safe_llm.bench.trials import PeakMemory, Run, Unavailable
from safe_llm.bench.workloads import WORKLOADS, chosen_prompts, read_workload, shipped_workload
from safe_llm.config import EnsembleConfig, EnsembleSpec, MemberConfig, preset
from safe_llm.errors import ConfigError, EvaluationError, SafeLLMError, UnknownNameError
from safe_llm.events import RoundFinished
from safe_llm.prompting import transcript
from safe_llm.testing import scripted_ensemble
from safe_llm.types import Message

QUESTION = (Message(role="user", content="What is the answer?"),)
ANSWER = "The answer is 42, not 1850."


def ticking():
    """A clock that goes on by one second at each look."""
    return itertools.count().__next__


# ---------------------------------------------------------------------- who takes part


def test_contender_takes_the_configuration_that_is_given_with_its_changes():
    spec = EnsembleSpec(**{**preset("demo").model_dump(), "ensemble": EnsembleConfig(lookahead=7, top_k=3)})
    config = plan_contender("every-token:gac,lookahead=4", spec).config
    assert config == EnsembleConfig(mode="every-token", method="gac", lookahead=4, top_k=3, prefix_caching=False)
    assert plan_contender("safe:method=prefix-mass", spec).config.method == "prefix-mass"
    assert plan_contender("generate", spec).config is None


@pytest.mark.parametrize(
    ("name", "error", "message", "hint"),
    [
        ("sfae", UnknownNameError, "unknown contender 'sfae'", "did you mean 'safe'"),
        ("safe:gax", UnknownNameError, "unknown change of a contender 'gax'", "did you mean 'gac'"),
        ("safe:method=unit", UnknownNameError, "unknown method 'unit'", "did you mean 'unite'"),
        ("safe:lokahead=3", UnknownNameError, "unknown parameter 'lokahead'", "did you mean 'lookahead'"),
        ("safe:lookahead=0", ConfigError, "lookahead", ""),
        ("safe:lookahead=3,lookahead=4", ConfigError, "given twice", ""),
        ("safe:mode=drafter", ConfigError, "its mode is its name", ""),
        ("generate:lookahead=3", ConfigError, "has no settings", ""),
    ],
)
def test_contender_that_cannot_be_is_refused(name, error, message, hint):
    with pytest.raises(error, match=message) as raised:
        plan_contender(name, preset("demo"))
    assert hint in str(raised.value)


def test_one_model_alone_is_compared_with_generate_only():
    alone = EnsembleSpec(drafter=MemberConfig(model="qwen2.5-coder-0.5b-instruct"))
    assert default_contenders(alone) == ("drafter", "generate")
    assert default_contenders(preset("demo"))[0] == "safe"
    with pytest.raises(ConfigError, match="at least one verifier"):
        plan_contender("safe", alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"tokens": -3}, "tokens must be at least 1"),
        ({"batch": (1, 0)}, "batch must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"contenders": ()}, "nobody takes part"),
        ({"workloads": ("math",)}, "unknown workload 'math'"),
        ({"data": "nowhere.jsonl"}, "cannot read the data file 'nowhere.jsonl'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(SafeLLMError, match=message):
        prepare(Settings(spec=preset("demo"), **changes))


def test_configuration_that_samples_is_refused():
    spec = preset("demo").model_copy(update={"sampling": {"temperature": 0.7}})
    with pytest.raises(ConfigError, match="greedily"):
        prepare(Settings(spec=spec))


# ---------------------------------------------------------------------- an answer


@pytest.fixture
def contender():
    config = EnsembleConfig(lookahead=4)
    members = scripted_ensemble({QUESTION[0].content: ANSWER}).members
    return EngineContender("safe", members, config, clock=ticking())


def test_engine_run_says_when_which_tokens_came(contender):
    run = contender.run(QUESTION, 7)
    ensemble, committed, expected = contender.ensemble, b"", []
    for event in ensemble.stream(QUESTION, events=True, max_tokens=7):
        if isinstance(event, RoundFinished):
            committed += event.committed
            expected.append(len(ensemble.members[0].vocabulary.encode(committed).ids))
    assert [step.num_tokens for step in run.steps] == expected
    assert len(expected) == run.counts.num_rounds > 1
    assert run.num_tokens == expected[-1] == 7
    seconds = [step.seconds for step in run.steps]
    assert seconds == sorted(set(seconds))
    assert (run.ttft_s, run.total_s > seconds[-1]) == (seconds[0], True)
    assert run.counts.num_draft_tokens >= 7
    assert set(run.counts.num_forwards) == {"drafter", "verifier"}
    assert {"draft", "verify"} <= set(run.phases)


def test_engine_run_decodes_to_the_end(contender):
    run = contender.run(QUESTION, 500)
    spelled = contender.ensemble.members[0].vocabulary.encode(ANSWER.encode())
    assert run.num_tokens == run.steps[-1].num_tokens == len(spelled.ids) + 1  # and END


def test_time_per_token_leaves_out_what_came_first():
    run = made_run(9, 4.5, steps=((5, 1.0), (7, 2.0), (9, 4.0)))
    assert run.tokens_per_s == 2.0
    assert run.ttft_s == 1.0
    assert run.tpot_s == 0.75  # three seconds for four tokens, not for eight
    assert made_run(1, 1.0, steps=((1, 1.0),)).tpot_s is None


# ---------------------------------------------------------------------- turns


class Fake:
    """A contender that only remembers."""

    def __init__(self, name: str, log: list, *, fails_at: int | None = None) -> None:
        self.name, self._log, self._fails_at, self._runs = name, log, fails_at, 0

    def run(self, prompt, max_tokens: int) -> Run:
        self._log.append((self.name, prompt, max_tokens))
        self._runs += 1
        if self._runs == self._fails_at:
            raise Unavailable("it cannot read this")
        return made_run()


def test_contenders_take_turns_on_the_same_prompt_after_a_warm_up():
    log, reports = [], []
    fakes = [Fake(name, log) for name in "abc"]
    done = race("w", fakes, ["p", "q"], max_tokens=50, memory=PeakMemory([]), progress=lambda *r: reports.append(r))
    names = "".join(name for name, *_ in log)
    assert names[3:] == "abcbca"
    assert sorted(names[:3]) == ["a", "b", "c"]
    assert [(prompt, tokens) for _, prompt, tokens in log] == [("p", 8)] * 3 + [("p", 50)] * 3 + [("q", 50)] * 3
    assert [(t.contender, t.round, t.turn) for t in done.trials[:4]] == [
        ("a", 0, 0),
        ("b", 0, 1),
        ("c", 0, 2),
        ("b", 1, 0),
    ]
    assert reports == [("w", 0, 2), ("w", 1, 2), ("w", 2, 2)]
    assert all(trial.peak_bytes > 1e6 for trial in done.trials)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_contender_that_does_not_apply_leaves_no_trials(fails_at):
    log = []
    done = race(
        "w", [Fake("a", log, fails_at=fails_at), Fake("b", log)], ["p", "q"], max_tokens=5, memory=PeakMemory([])
    )
    assert done.left_out == {"a": "it cannot read this"}
    assert [(t.contender, t.round) for t in done.trials] == [("b", 0), ("b", 1)]
    assert sum(name == "a" for name, *_ in log) == fails_at


def test_batches_of_every_size_take_turns():
    members = scripted_ensemble({QUESTION[0].content: ANSWER, "And then?": "So."}).members
    prompts = [QUESTION, (Message(role="user", content="And then?"),)]
    trials = race_batches(
        members, EnsembleConfig(max_batch_size=1), prompts, (1, 3), rounds=2, max_tokens=6, clock=ticking()
    )
    assert [(t.rows, t.round, t.total_s) for t in trials] == [(1, 0, 1), (3, 0, 1), (3, 1, 1), (1, 1, 1)]
    assert max(len(feeds) for feeds in members[0].backend.calls) == 3  # decoded together
    short = trials[0].num_tokens  # round 0 begins with the second prompt
    assert short < 6
    assert [t.num_tokens for t in trials] == [short, 6 + 2 * short, 12 + short, 6]


def test_memory_peaks_are_of_each_trial_where_the_system_can_tell(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\n")
    memory = PeakMemory(["cpu"], status=tmp_path / "status")
    assert (memory.kind, memory.peak_bytes) == ("resident memory", 2 << 20)
    assert (tmp_path / "clear_refs").read_text() == "5"
    elsewhere = PeakMemory(["cpu"], status=tmp_path / "no" / "status")
    elsewhere.restart()
    assert elsewhere.kind == "resident memory since the process began"
    assert elsewhere.peak_bytes > 1e7


# ---------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_prompts_are_conversations_that_differ(name):
    prompts = shipped_workload(name).prompts
    assert len(set(prompts)) == len(prompts) >= 8
    assert all(prompt[-1].role == "user" for prompt in prompts)
    words = [len(transcript(prompt).split()) for prompt in prompts]
    assert len(set(words)) > 4
    assert (min(words) > 400) == (name == "rag")


def test_prompts_are_chosen_by_the_seed_without_repetition_while_there_are_others():
    workload = shipped_workload("chat")
    size = len(workload.prompts)
    chosen = chosen_prompts(workload, size + 2, seed=1)
    assert len(set(chosen[:size])) == size
    assert chosen[size:] == chosen[:2]
    assert chosen == chosen_prompts(workload, size + 2, seed=1) != chosen_prompts(workload, size + 2, seed=2)


def written(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_data_may_be_messages_prompts_or_items(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    mine = read_workload(written(tmp_path / "mine.jsonl", {"messages": messages}, "", {"prompt": "Hi"}))
    assert mine.name == "mine"
    assert [[message.role for message in prompt] for prompt in mine.prompts] == [["system", "user"], ["user"]]
    items = read_workload(written(tmp_path / "sums.jsonl", {"id": "1", "question": "1 + 1?", "answer": "2"}))
    assert "1 + 1?" in items.prompts[0][0].content
    assert "boxed" in items.prompts[0][0].content  # asked as an evaluation asks it


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "it has no prompts"),
        (["{"], "line 1: it is no JSON object"),
        ([{"prompt": "a"}, "[1]"], "line 2: it is no JSON object"),
        ([{"promt": "a"}], "line 1: field 'promt' is not known"),
        ([{"prompt": "a", "messages": []}], "line 1: expected either messages or prompt"),
        ([{"messages": "Hello"}], "line 1: messages must be a list"),
        ([{"prompt": ""}], "line 1: every message of the conversation is empty"),
        ([{"messages": [{"role": "usr", "content": "x"}]}], "line 1: unknown role 'usr'"),
        ([{"messages": [{"rol": "user"}]}], "line 1: unknown message field 'rol'"),
        ([{"question": "1 + 1?"}], "line 1: field"),
    ],
)
def test_data_that_is_no_workload_is_refused(tmp_path, lines, message):
    path = written(tmp_path / "data.jsonl", *lines)
    with pytest.raises(EvaluationError, match=message) as raised:
        read_workload(path)
    assert "data.jsonl" in str(raised.value)

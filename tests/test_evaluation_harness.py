"""An ensemble as lm-evaluation-harness sees it."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from evaluation_support import write_items
from helpers import tiny_member
from safe_llm.ensemble import Ensemble
from safe_llm.errors import (
    ConfigError,
    ContextOverflowError,
    EvaluationError,
    PromptError,
    SafeLLMError,
    UnknownNameError,
    UnsupportedModelError,
)
from safe_llm.evaluation import __main__ as command
from safe_llm.evaluation import harness
from safe_llm.evaluation.harness import SafeLM, decoding_params
from safe_llm.evaluation.lm_eval_tasks import FOLDER
from safe_llm.evaluation.questions import Conversation, require_extra, sha256_of
from safe_llm.evaluation.scoring import _Collector
from safe_llm.testing import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters
from safe_llm.trace import TraceWriter
from safe_llm.types import Message

ANSWERS = {"What?": "The answer.", "Who?": "Nobody."}


def request(context: str, kind: str = "generate_until", place: int = 0, **gen_kwargs: object) -> Instance:
    return Instance(kind, {"id": f"item {place}"}, (context, gen_kwargs), 0, ("task", place, 1))


def chat(lm: SafeLM, text: str) -> Conversation:
    return lm.apply_chat_template([{"role": "user", "content": text}])


@pytest.fixture
def lm(tmp_path):
    with scripted_ensemble(ANSWERS, max_batch_size=1) as ensemble:
        yield SafeLM(ensemble=ensemble, log=str(tmp_path / "log.jsonl"))


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("until", "stop"),
    [("Question:", ("Question:",)), (["a", "b", "a", ""], ("a", "b")), ([], ()), (None, ()), (("x",), ("x",))],
)
def test_until_is_a_text_or_a_list(until, stop):
    # H04: a str is one stop string, not one per character
    assert decoding_params({"until": until}) == ({"stop": stop}, ())


@pytest.mark.parametrize(
    ("given", "params"),
    [
        ({"max_gen_toks": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.7, "seed": 3}, {"temperature": 0.7, "seed": 3}),
    ],
)
def test_generation_arguments_become_parameters(given, params):
    assert decoding_params(given) == (params | {"stop": ()}, ())


def test_generation_arguments_that_nobody_knows_are_refused():
    with pytest.raises(UnknownNameError, match=r"'top_pp'.*did you mean 'top_p'"):
        decoding_params({"top_pp": 1})
    with pytest.raises(ConfigError, match="give max_gen_toks or max_tokens, not both"):
        decoding_params({"max_gen_toks": 1, "max_tokens": 2})
    with pytest.raises(ConfigError, match="until must be a str or a list of str, got 7"):
        decoding_params({"until": 7})


def test_stop_strings_beyond_the_engines_limits_still_end_answers(lm):
    long = "." + "x" * 2000
    params, late = decoding_params({"until": [long, *map(str, range(70))]})
    assert len(params["stop"]) == 64
    assert late == (long, *map(str, range(64, 70)))
    many = [f"<{i}>" for i in range(64)] + ["swer"]
    assert lm.generate_until([request(chat(lm, "What?"), until=many)]) == ["The an"]


# ---------------------------------------------------------------------- prompts and answers


def test_conversation_is_rendered_by_each_member_and_plain_text_by_none(lm, tmp_path):
    # H06: what was done is stated, and the prompts' hashes are logged
    contexts = [chat(lm, "What?"), "What?"]
    answers = lm.generate_until([request(c, place=i) for i, c in enumerate(contexts)], disable_tqdm=True)
    assert answers == ["The answer.", "The answer."]
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["prompt_sha256"] for line in logged] == [sha256_of(context) for context in contexts]
    assert [line["item"] for line in logged] == ["item 0", "item 1"]
    drafter = lm.ensemble.members[0]
    expected = [drafter.prompter.encode((Message(role="user", content="What?"),)), drafter.prompter.encode("What?")]
    assert [line["prompt_tokens"] for line in logged] == list(map(len, expected))
    assert [line["finish_detail"] for line in logged] == ["end", "end"]  # H05
    info = lm.get_model_info()
    assert info["prompts"] == {"messages": 1, "plain text": 1}
    assert info["finish_details"] == {"end": 2}
    assert [member["name"] for member in info["members"]] == ["drafter", "verifier"]


def test_hash_of_a_conversation_is_the_one_in_traces(lm):
    stream = io.StringIO()
    context = chat(lm, "What? ✓")
    with TraceWriter(stream, lm.ensemble) as trace:
        trace.generate(context.messages)
    (recorded,) = [line for line in map(json.loads, stream.getvalue().splitlines()) if line["type"] == "request"]
    assert recorded["prompt"]["sha256"] == sha256_of(context)


def test_answers_come_in_the_order_of_the_requests(lm):
    texts = ["What?", "Who?", "What?", "Unknown?", "Who?", "What?"]
    limits = [1, 50, 50, 50, 50, 1]
    requests = [request(chat(lm, text), place=i, max_gen_toks=limits[i]) for i, text in enumerate(texts)]
    assert lm.generate_until(requests) == ["The", "Nobody.", "The answer.", "", "Nobody.", "The"]


def test_answers_reach_the_cache(lm, monkeypatch):
    kept = []
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda *facts: kept.append(facts))
    asked = request(chat(lm, "Who?"), until=["\n"])
    lm.generate_until([asked])
    assert kept == [("generate_until", asked.args, "Nobody.")]


def test_request_that_fails_is_an_empty_answer_that_is_counted(tmp_path):
    small = scripted_member("small", byte_level(), ANSWERS, max_context=60)
    lm = SafeLM(ensemble=Ensemble([small]))
    overlong = chat(lm, "x" * 500)
    assert lm.generate_until([request(overlong), request(chat(lm, "Who?"))]) == ["", "Nobody."]
    assert lm.get_model_info()["num_failed"] == 1
    assert lm.get_model_info()["finish_details"] == {"ContextOverflowError": 1, "end": 1}
    with pytest.raises(ContextOverflowError):
        lm.generate_until([request(overlong)])


def test_templates_that_members_cannot_all_have_are_refused(lm):
    with pytest.raises(EvaluationError, match="gen_prefix"):
        lm.apply_chat_template([{"role": "user", "content": "What?"}], add_generation_prompt=False)
    with pytest.raises(EvaluationError, match="no chat template 'rag'"):
        lm.chat_template("rag")
    assert (lm.chat_template(True), lm.chat_template(False)) == ("each member's own", "")
    with pytest.raises(TypeError, match="continued"):
        chat(lm, "What?") + "!"


# ---------------------------------------------------------------------- construction


class Loaded:
    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(harness.Ensemble, "from_spec", self)

    def __call__(self, spec, **options):
        self.spec, self.options = spec, options
        return scripted_ensemble(ANSWERS)


def test_model_arguments_describe_the_ensemble(monkeypatch, tmp_path):
    loaded = Loaded(monkeypatch)
    SafeLM.create_from_arg_string("drafter=a,verifiers=b+c,lookahead=3", {"batch_size": "4", "device": "cpu"})
    assert [(m.model, m.device) for m in loaded.spec.members] == [("a", "cpu"), ("b", "cpu"), ("c", "cpu")]
    assert loaded.options == {"lookahead": 3, "max_batch_size": 4}
    # what lm_eval passes if nobody said anything leaves it to the ensemble
    SafeLM.create_from_arg_string("", {"batch_size": 1, "device": "cuda:0"})
    assert (loaded.spec.drafter.device, loaded.options) == (None, {})
    SafeLM(preset="demo3", batch_size="auto", max_batch_size=8)
    assert (len(loaded.spec.members), loaded.options) == (3, {"max_batch_size": 8})
    (tmp_path / "e.toml").write_text('[drafter]\nmodel = "x"\n')
    SafeLM(config=str(tmp_path / "e.toml"), batch_size="auto:4")
    assert (loaded.spec.drafter.model, loaded.options) == ("x", {})
    assert get_model("safe-llm") is SafeLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "demo", "drafter": "a"}, "give preset or drafter, not both"),
        ({"verifiers": "a"}, "verifiers need a drafter"),
        ({"preset": "dema"}, "did you mean 'demo'"),
        ({"batch_size": "many"}, "batch_size must be a whole number or auto, got 'many'"),
        ({"loglikelihood": "all"}, "loglikelihood must be 'drafter'"),
        ({"lookahed": 3}, "did you mean 'lookahead'"),
        ({"log": "/nowhere/at/all", "ensemble": "given"}, "cannot write the log"),
    ],
)
def test_model_arguments_are_checked(arguments, message):
    if "ensemble" in arguments:
        arguments["ensemble"] = scripted_ensemble(ANSWERS)
    with pytest.raises(SafeLLMError, match=message):
        SafeLM(**arguments)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    require_extra()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(ConfigError, match=r'need lm_eval.*pip install "safe-llm-ensemble\[eval\]"'):
        require_extra()


# ---------------------------------------------------------------------- lm_eval itself


def test_lm_eval_runs_our_task_files_with_the_model(tmp_path):
    folder = write_items(tmp_path / "data", {"1": "What is 1 plus 1?", "2": "What is 2 plus 2?"})
    said = {"What is 1 plus 1?": "\\boxed{2}", "What is 2 plus 2?": "So 5."}
    with scripted_ensemble(lambda text: next(a for q, a in said.items() if q in text)) as ensemble:
        tasks = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"data": str(folder)})
        lm = SafeLM(ensemble=ensemble)
        found = evaluate(lm, tasks.load(["safe_gsm8k"]), bootstrap_iters=0, apply_chat_template=True)
    assert found["results"]["safe_gsm8k"]["strict,none"] == 0.5
    (first, _) = found["samples"]["safe_gsm8k"]
    assert first["prompt_hash"] == lm.answers[0].prompt_sha256


def test_command_is_lm_evals_own_with_our_model_and_tasks(monkeypatch):
    executed = []
    monkeypatch.setattr("lm_eval._cli.HarnessCLI.execute", lambda self, args: executed.append(args))
    for extra in ([], ["--include_path", "mine"]):
        monkeypatch.setattr(sys, "argv", ["x", "run", "--model", "safe-llm", "--tasks", "safe_gsm8k", *extra])
        command.main()
    assert [args.include_path for args in executed] == [[str(FOLDER)], ["mine", str(FOLDER)]]


def test_command_says_our_errors_in_one_line(monkeypatch):
    def fail(self, args):
        raise EvaluationError("no data", hint="give some")

    monkeypatch.setattr("lm_eval._cli.HarnessCLI.execute", fail)
    monkeypatch.setattr(sys, "argv", ["x"])
    with pytest.raises(SystemExit, match=r"^error: no data \(give some\)$"):
        command.main()


# ---------------------------------------------------------------------- log-likelihoods


def reference(member, prompt: list[int], ids: list[int]) -> list[float]:
    """Log-probabilities of `ids` after `prompt`, from one full forward pass without a cache."""
    logits = member.fresh_model(torch.tensor([[*prompt, *ids]])).logits[0].detach().double().numpy()
    symbols = member.vocabulary.symbols
    logits[:, ~symbols.usable] = -np.inf
    logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return [logs[len(prompt) - 1 + place, token] for place, token in enumerate(ids)]


@pytest.fixture(scope="module")
def member():
    return tiny_member("drafter", characters([]), max_context=64)


@pytest.fixture(scope="module")
def drafter_lm(member):
    return SafeLM(ensemble=Ensemble([member]), loglikelihood="drafter")


def spelled(member, text: str) -> list[int]:
    return [member.vocabulary.ids[bytes([byte])] for byte in text.encode()]


def loglikelihood(lm, context: str, text: str) -> tuple[float, bool]:
    (found,) = lm.loglikelihood([Instance("loglikelihood", {}, (context, text), 0)], disable_tqdm=True)
    return found


@pytest.mark.parametrize(("context", "text"), [("abc", "de"), ("abc", "d"), ("abc ", "de"), ("", "abcde")])
def test_continuation_is_scored_exactly(drafter_lm, member, context, text):
    # H12: only the continuation's own tokens, whatever stands before them
    prompt, ids = spelled(member, context.rstrip()), spelled(member, context[len(context.rstrip()) :] + text)
    expected = reference(member, prompt or [member.vocabulary.symbols.end_id], ids)
    found, _ = loglikelihood(drafter_lm, context, text)
    assert found == pytest.approx(sum(expected), abs=1e-4)


def test_continuation_in_a_small_window_keeps_all_of_its_tokens():
    # H12: characters, context `abc`, continuation `de`, window 3
    small = tiny_member("drafter", characters([]), max_context=3)
    lm = SafeLM(ensemble=Ensemble([small]), loglikelihood="drafter")
    expected = reference(small, spelled(small, "bc"), spelled(small, "de"))
    assert loglikelihood(lm, "abc", "de")[0] == pytest.approx(sum(expected), abs=1e-4)
    assert lm.get_model_info()["num_truncated"] == 1
    with pytest.raises(ContextOverflowError, match="4 tokens"):
        loglikelihood(lm, "abc", "defg")


def test_continuation_of_a_conversation_follows_the_template(drafter_lm, member):
    prompt = member.prompter.encode((Message(role="user", content="abc"),))
    expected = reference(member, prompt, spelled(member, "de"))
    assert loglikelihood(drafter_lm, chat(drafter_lm, "abc"), "de")[0] == pytest.approx(sum(expected), abs=1e-4)


def test_greedy_continuations_are_recognised(drafter_lm, member):
    def favourite(context: str) -> bytes:
        prompt = spelled(member, context)
        scores = [reference(member, prompt, [token])[0] for token in range(member.vocabulary.width)]
        return member.vocabulary.surface(int(np.argmax(scores)))

    context, best = next(
        (c, t) for c in "abcdefghijkl" if (t := favourite(c)).decode("ascii", "ignore").isprintable() and t
    )
    found = [loglikelihood(drafter_lm, context, text)[1] for text in (best.decode(), chr(best[0] ^ 1))]
    assert found == [True, False]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 150])
def test_whole_texts_are_scored_in_windows(drafter_lm, member, length):
    text = ("Leo has 12 apples. " * 8)[:length]
    ids = spelled(member, text)
    (found,) = drafter_lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    before = [member.vocabulary.symbols.end_id, *ids]
    expected = sum(reference(member, before[:1], ids[:64])) if ids else 0.0
    for start in range(64, length, 64):  # later windows are full: they begin in the one before
        new = ids[start : start + 64]
        given = before[max(0, start + len(new) - 64) : start + 1]
        expected += sum(reference(member, given, new))
    assert found == pytest.approx(expected, abs=1e-3)


def test_ensemble_has_no_log_likelihood(lm):
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(EvaluationError, match=r"no log-likelihood.*loglikelihood=drafter"):
            method([Instance("loglikelihood", {}, ("a", "b"), 0)])
    with pytest.raises(EvaluationError, match="1 requests for log-likelihoods"):
        _Collector().loglikelihood([None])


def test_nothing_cannot_be_scored(drafter_lm):
    with pytest.raises(PromptError, match="no text to score"):
        loglikelihood(drafter_lm, "abc", "")
    endless = tiny_member("endless", characters([], special=()))
    lm = SafeLM(ensemble=Ensemble([endless]), loglikelihood="drafter")
    with pytest.raises(UnsupportedModelError, match="neither BOS nor END"):
        loglikelihood(lm, "", "abc")

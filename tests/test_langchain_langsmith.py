"""What LangSmith is told about runs of `ChatSafeLLM` and `SafeLLM`, on every path: answers, errors and early ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import threading
from datetime import datetime
from functools import reduce

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from safe_llm import Ensemble, EnsembleConfig
from safe_llm.errors import ContextOverflowError, GenerationError
from safe_llm.record import PHASES
from safe_llm.testing import answering, scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level

pytest_plugins = ["langsmith_server"]
pytestmark = [
    pytest.mark.allow_hosts(["127.0.0.1"]),
    pytest.mark.filterwarnings("ignore:The method `BaseChatModel._a?chat_model_stream_v3` is in beta"),
]

SECRET = "xyzzy-4711"  # of every prompt; no scripted answer has it
QUESTION = f"{SECRET}: where is the treasure?"
OTHER = f"{SECRET}: is it far?"
DRAFTED = {QUESTION: "Under the oak, 2 m.", OTHER: "No, not far."}
VERIFIED = DRAFTED | {QUESTION: "Under the oak, 3 m."}
PARAMS = {"max_tokens": 40, "temperature": 0.0, "stop": ["###"]}

CHAT_PATHS = ("invoke", "stream", "batch", "ainvoke", "astream", "abatch", "stream_v3", "astream_v3")
TEXT_PATHS = ("invoke", "stream", "batch", "ainvoke", "astream", "abatch")
ALL_PATHS = [(ChatSafeLLM, path) for path in CHAT_PATHS] + [(SafeLLM, path) for path in TEXT_PATHS]
each_path = pytest.mark.parametrize(("cls", "path"), ALL_PATHS)
each_model = pytest.mark.parametrize("cls", [ChatSafeLLM, SafeLLM])


def treasure():
    """An ensemble of two members that differ from the middle of one answer on."""
    return scripted_ensemble(DRAFTED, VERIFIED)


class Ended(BaseCallbackHandler):
    """Keeps what runs ended with; the one place where callers of a text model get more than the text."""

    def __init__(self):
        self.results = []
        self.errors = []

    def on_llm_end(self, response, **kwargs):
        self.results.append(response.generations[0][0])

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


async def ask(model, path, prompt=QUESTION, **kwargs):
    """Ask on one of the paths; return the message that came back, or the generation of a text model."""
    ended = Ended()
    kwargs = {"config": {"callbacks": [ended]}, **kwargs}
    try:
        answer = await _asked(model, path, prompt, kwargs)
    finally:
        async with asyncio.timeout(30):
            while not ended.results and not ended.errors:  # on core's asynchronous v3 path the caller is told first
                await asyncio.sleep(0.001)
    return answer if isinstance(model, ChatSafeLLM) else ended.results[0]


async def _asked(model, path, prompt, kwargs):
    if path == "invoke":
        return model.invoke(prompt, **kwargs)
    if path == "ainvoke":
        return await model.ainvoke(prompt, **kwargs)
    if path == "batch":
        return model.batch([prompt], **kwargs)[0]
    if path == "abatch":
        return (await model.abatch([prompt], **kwargs))[0]
    if path == "stream":
        return reduce(operator.add, model.stream(prompt, **kwargs))
    if path == "astream":
        return reduce(operator.add, [chunk async for chunk in model.astream(prompt, **kwargs)])
    if path == "stream_v3":
        stream = model.stream_events(prompt, version="v3", **kwargs)
        list(stream)
        return stream.output
    stream = await model.astream_events(prompt, version="v3", **kwargs)
    async for _ in stream:
        pass
    return await stream.output


def info_of(answer):
    """What the caller got besides the text."""
    return getattr(answer, "response_metadata", None) or answer.generation_info


def prompt_of(cls):
    """The question as the engine takes it."""
    return [{"role": "user", "content": QUESTION}] if cls is ChatSafeLLM else QUESTION


def streams(path):
    return "stream" in path


def has_phases(cls, path):
    """Whether phases are child runs: core tells a chat model of no run in `stream` and `astream` of version 1."""
    return cls is SafeLLM or path not in ("stream", "astream")


# ---------------------------------------------------------------------- reading runs


def llm_runs(server):
    """The LLM runs in the order of their start."""
    found = [run for run in server.runs().values() if run["run_type"] == "llm"]
    return sorted(found, key=lambda run: run["dotted_order"])


def llm_run(server):
    (run,) = llm_runs(server)
    return run


def generation(run):
    """What an LLM run says it made: the text model's generation, or the message in it, and its record."""
    ((made,),) = run["outputs"]["generations"]
    if "message" not in made:
        return made, made["generation_info"]
    message = made["message"]["kwargs"]
    return message, message["response_metadata"]


def text_of(made):
    """The text of a generation, or of a message of either output version."""
    content = made.get("content", made.get("text"))
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def metadata(run):
    return run["extra"]["metadata"]


def event_names(run):
    return [event["name"] for event in run["events"]]


def when(text):
    return datetime.fromisoformat(text.removesuffix("Z")).replace(tzinfo=None)


def check_phases(server, run):
    """The child runs are the record's phases: each as long as it says, one after another, within the LLM run."""
    _, info = generation(run)
    children = server.children(run)
    took = {phase: seconds for phase, seconds in info["safe"]["latency_s"].items() if phase in PHASES and seconds}
    assert [child["name"] for child in children] == [f"safe.{phase}" for phase in took]
    for child, seconds in zip(children, took.values(), strict=True):
        start, end = when(child["start_time"]), when(child["end_time"])
        assert (end - start).total_seconds() == pytest.approx(seconds, abs=1e-6)
        assert when(run["start_time"]) <= start <= end <= when(run["end_time"])
        assert child["outputs"] == {"duration_s": seconds, "n_rounds": info["safe"]["n_rounds"]}
        assert child["trace_id"] == run["trace_id"]
    for one, other in itertools.pairwise(children):
        assert abs((when(other["start_time"]) - when(one["end_time"])).total_seconds()) <= 2e-6


def check_private(server):
    """The prompt is where LangChain puts it, in the inputs of the LLM run, and nowhere else."""
    for run in server.runs().values():
        if run["run_type"] == "llm":
            assert SECRET in json.dumps(run["inputs"])
            run = {key: value for key, value in run.items() if key != "inputs"}
        elif not run["name"].startswith("safe."):
            continue  # a chain's inputs and outputs are not ours
        assert SECRET not in json.dumps(run)


# ---------------------------------------------------------------------- answers


@each_path
async def test_run_tells_all_about_an_answer(langsmith_server, cls, path):
    ensemble = treasure()
    model = cls(ensemble=ensemble, trace_phases="summary", **PARAMS)
    answer = await ask(model, path)
    run = llm_run(langsmith_server)
    check_answer(run, answer)
    check_usage(run, ensemble.generate(prompt_of(cls)).usage)
    check_identity(run, model)
    check_events(run, streams=streams(path))
    if has_phases(cls, path):
        check_phases(langsmith_server, run)
    assert len(langsmith_server.runs()) == 1 + len(PHASES) * has_phases(cls, path)
    check_private(langsmith_server)


def check_answer(run, answer):
    """The record in the outputs is the one that the caller got."""
    made, info = generation(run)
    assert run["end_time"]
    assert "error" not in run
    assert text_of(made) == VERIFIED[QUESTION]
    for key in ("model_name", "model_provider", "finish_reason", "safe", "safe_points"):
        assert info[key] == info_of(answer)[key]
    record = info["safe"]
    assert 0 < record["n_points"] == len(info["safe_points"]) < record["n_tokens"]
    assert 0 < record["ensemble_rate"] < 1
    assert set(record["latency_s"]) == {*PHASES, "total", "ttft", "tpot"}
    assert all(record["latency_s"][phase] > 0 for phase in PHASES)
    assert info["safe_points"][0]["token"] == "3"


def check_usage(run, usage):
    """The token counts are where LangSmith looks for them, and in the answer."""
    made, info = generation(run)
    expected = {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    assert metadata(run)["usage_metadata"] == expected
    assert (made["usage_metadata"] if "usage_metadata" in made else info["usage"]) == expected


def check_identity(run, model):
    """The run says which model answered with which parameters."""
    assert (run["name"], run["run_type"]) == (type(model).__name__, "llm")
    said = {key: value for key, value in metadata(run).items() if key.startswith("ls_") and key != "ls_integration"}
    assert said == {
        "ls_provider": "safe_llm",
        "ls_model_type": "chat" if isinstance(model, ChatSafeLLM) else "llm",
        "ls_model_name": "drafter+verifier",
        "ls_max_tokens": 40,
        "ls_temperature": 0.0,
        "ls_stop": ["###"],
    }
    identity = model._identifying_params
    params = run["extra"]["invocation_params"]
    assert {key: params[key] for key in identity} == identity
    assert params["ensemble"] == metadata(run)["ensemble"]
    assert generation(run)[1]["safe"]["fingerprint"] == model.ensemble.fingerprint


def check_events(run, *, streams):
    """A streamed answer has one event of its first token, from which LangSmith has the time to it."""
    assert event_names(run) == (["start", "new_token", "end"] if streams else ["start", "end"])
    times = [event["time"] for event in run["events"]]
    assert times == sorted(times)
    assert all(set(event) == {"name", "time"} for event in run["events"])


@each_model
@pytest.mark.parametrize("path", ["invoke", "astream"])
async def test_run_says_the_parameters_of_its_call(langsmith_server, cls, path):
    model = cls(ensemble=treasure(), **PARAMS)
    await ask(model, path, max_tokens=4, temperature=0.5, stop=["zzz"], seed=1)
    run = llm_run(langsmith_server)
    said = [metadata(run)[f"ls_{name}"] for name in ("max_tokens", "temperature", "stop")]
    assert said == [4, 0.5, ["zzz"]]
    params = run["extra"]["invocation_params"]
    assert [params[name] for name in ("max_tokens", "temperature", "stop", "seed")] == [4, 0.5, ["zzz"], 1]
    assert generation(run)[1]["finish_reason"] == "length"


@each_model
def test_runs_of_different_ensembles_differ_in_the_fingerprint(langsmith_server, cls):
    shared = treasure()
    for ensemble in (shared, shared, scripted_ensemble(DRAFTED, VERIFIED, lookahead=2)):
        cls(ensemble=ensemble).invoke(QUESTION)
    runs = llm_runs(langsmith_server)
    assert len(runs) == len(langsmith_server.runs())  # phases are opt-in
    for of in (
        [run["extra"]["invocation_params"]["ensemble"] for run in runs],
        [generation(run)[1]["safe"]["fingerprint"] for run in runs],
    ):
        assert of[0] == of[1] != of[2]


@pytest.mark.parametrize("path", ["invoke", "ainvoke"])
async def test_invoke_of_a_streaming_model_is_told_as_a_stream(langsmith_server, path):
    ensemble = treasure()
    answer = await ask(ChatSafeLLM(ensemble=ensemble, streaming=True), path)
    run = llm_run(langsmith_server)
    check_answer(run, answer)
    check_usage(run, ensemble.generate(prompt_of(ChatSafeLLM)).usage)
    check_events(run, streams=True)


# ---------------------------------------------------------------------- batches


@each_model
@pytest.mark.parametrize("path", ["batch", "abatch"])
async def test_every_item_of_a_batch_is_a_run_of_its_own(langsmith_server, cls, path):
    model = cls(ensemble=treasure(), **PARAMS)
    prompts = [OTHER, QUESTION, OTHER]
    answers = model.batch(prompts) if path == "batch" else await model.abatch(prompts)
    runs = llm_runs(langsmith_server)
    assert len(runs) == len(langsmith_server.runs()) == 3
    assert {run["trace_id"] for run in runs} == {run["id"] for run in runs}
    answered = {True: [], False: []}
    for run in runs:
        one, info = generation(run)
        answered[OTHER in json.dumps(run["inputs"])].append(text_of(one))
        assert info["safe"]["n_points"] == len(info["safe_points"])
        assert run["end_time"]
        assert metadata(run)["ls_max_tokens"] == 40
        if cls is ChatSafeLLM:
            assert metadata(run)["usage_metadata"] == one["usage_metadata"]
        else:
            assert info["usage"]["output_tokens"] > 0
    assert answered == {True: [VERIFIED[OTHER]] * 2, False: [VERIFIED[QUESTION]]}
    assert [getattr(answer, "content", answer) for answer in answers] == [VERIFIED[prompt] for prompt in prompts]
    check_private(langsmith_server)


async def test_every_chat_of_a_batch_has_its_own_phases(langsmith_server):
    model = ChatSafeLLM(ensemble=treasure(), trace_phases="summary")
    model.batch([QUESTION, OTHER])
    await model.abatch([QUESTION, OTHER])
    runs = llm_runs(langsmith_server)
    assert len(runs) == 4
    for run in runs:
        check_phases(langsmith_server, run)
    assert len(langsmith_server.runs()) == 4 + sum(len(langsmith_server.children(run)) for run in runs)


# ---------------------------------------------------------------------- an agent

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adding(conclusion):
    """A member that calls the tool once and then answers."""
    return lambda transcript: conclusion if CALL in transcript else CALL


def agent(**options):
    ensemble = scripted_ensemble(adding("The sum is 5."), adding("The sum is five."))
    return create_agent(ChatSafeLLM(ensemble=ensemble, **options), [add], system_prompt=f"{SECRET}: use tools.")


async def ask_agent(path, **options):
    question = {"messages": [{"role": "user", "content": f"{SECRET}: what is 2 + 3?"}]}
    if path == "invoke":
        return agent(**options).invoke(question)["messages"]
    if path == "ainvoke":
        return (await agent(**options).ainvoke(question))["messages"]
    return list(agent(**options).stream(question, stream_mode="values"))[-1]["messages"]


@pytest.mark.parametrize("path", ["invoke", "ainvoke", "stream"])
async def test_agent_is_one_trace_of_models_and_tools(langsmith_server, path):
    _, call, result, answer = await ask_agent(path, trace_phases="summary")
    assert (call.tool_calls[0]["args"], result.content) == ({"a": 2, "b": 3}, "5")
    assert answer.content.startswith("The sum is ")
    runs = langsmith_server.runs()
    (root,) = [run for run in runs.values() if not run.get("parent_run_id")]
    assert {run["trace_id"] for run in runs.values()} == {root["id"]}
    models = llm_runs(langsmith_server)
    for run, message in zip(models, (call, answer), strict=True):
        made, info = generation(run)
        node = runs[run["parent_run_id"]]
        assert (node["name"], node["parent_run_id"]) == ("model", root["id"])
        assert [info[key] for key in ("safe", "safe_points")] == [
            message.response_metadata[key] for key in ("safe", "safe_points")
        ]
        assert made["usage_metadata"] == metadata(run)["usage_metadata"] == message.usage_metadata
        assert [tool["function"]["name"] for tool in run["extra"]["invocation_params"]["tools"]] == ["add"]
        check_phases(langsmith_server, run)
    made, info = generation(models[0])
    assert info["finish_reason"] == "tool_calls"
    assert made["tool_calls"][0] == call.tool_calls[0]
    assert call.tool_calls[0]["id"]
    assert generation(models[1])[1]["safe"]["n_points"] > 0
    (tool_run,) = [run for run in runs.values() if run["run_type"] == "tool"]
    assert tool_run["name"] == "add"
    assert tool_run["inputs"] == {"a": 2, "b": 3}
    assert tool_run["outputs"]["output"]["content"] == "5"
    assert tool_run["outputs"]["output"]["tool_call_id"] == call.tool_calls[0]["id"]
    assert runs[runs[tool_run["parent_run_id"]]["parent_run_id"]] == root
    assert models[0]["end_time"] <= tool_run["start_time"] <= tool_run["end_time"] <= models[1]["start_time"]
    assert all(run["end_time"] and not run.get("error") for run in runs.values())
    check_private(langsmith_server)


# ---------------------------------------------------------------------- errors


def failing(next_logits):
    """A model that fails in the middle of its answer."""
    calls = itertools.count()

    def logits(ids):
        if next(calls) >= 12:
            raise ZeroDivisionError("in the model")
        return next_logits(ids)

    return logits


def lone(change=lambda next_logits: next_logits, **options):
    """An ensemble of one member whose script is changed."""
    member = scripted_member(
        "drafter", byte_level(), lambda vocabulary: change(answering(vocabulary, DRAFTED)), **options
    )
    return Ensemble([member], EnsembleConfig())


def check_failed(run, error):
    assert run["end_time"]
    assert run["error"].startswith(error)
    assert event_names(run)[-1] == "error"
    assert metadata(run)["ls_model_name"] == "drafter"
    assert not metadata(run).get("usage_metadata")


@each_path
async def test_prompt_that_is_too_long_is_an_error_of_the_run(langsmith_server, cls, path):
    model = cls(ensemble=lone(max_context=8), trace_phases="summary")
    with pytest.raises(ContextOverflowError):
        await ask(model, path)
    run = llm_run(langsmith_server)
    check_failed(run, "EnsembleContextOverflowError")
    assert event_names(run) == ["start", "error"]
    assert not any((run.get("outputs") or {}).get("generations", []))
    assert len(langsmith_server.runs()) == 1
    check_private(langsmith_server)


@each_path
async def test_member_that_fails_is_an_error_of_the_run(langsmith_server, cls, path):
    model = cls(ensemble=lone(failing), trace_phases="summary")
    with pytest.raises(GenerationError):
        await ask(model, path)
    run = llm_run(langsmith_server)
    check_failed(run, "MemberError")
    assert "ZeroDivisionError" in run["error"]
    assert event_names(run) == (["start", "new_token", "error"] if streams(path) else ["start", "error"])
    assert len(langsmith_server.runs()) == 1
    check_private(langsmith_server)


# ---------------------------------------------------------------------- early ends


class Waiting:
    """A model that waits in the middle of its answer."""

    def __init__(self):
        self.waits = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, next_logits):
        calls = itertools.count()

        def logits(ids):
            if next(calls) == 12:
                self.waits.set()
                self.goes_on.wait(30)
            return next_logits(ids)

        return logits


async def cancel(task, waiting):
    """Cancel what has begun, and wait until it has ended."""
    while not waiting.waits.is_set() and not task.done():
        await asyncio.sleep(0.001)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, waiting.goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task


@each_model
@pytest.mark.parametrize("level", [None, "summary"])
async def test_cancelled_call_ends_its_run(langsmith_server, cls, level):
    waiting = Waiting()
    model = cls(ensemble=lone(waiting), trace_phases=level)
    task = asyncio.create_task(model.ainvoke(QUESTION))
    await cancel(task, waiting)
    run = llm_run(langsmith_server)
    check_failed(run, "CancelledError")
    assert event_names(run) == ["start", "error"]
    assert len(langsmith_server.runs()) == 1
    assert [kind for kind, _ in langsmith_server.operations] in (["post", "patch"], ["post"])  # ended once
    check_private(langsmith_server)


@each_model
def test_stream_that_is_left_ends_its_run(langsmith_server, cls):
    stream = cls(ensemble=lone(), trace_phases="summary").stream(QUESTION)
    next(stream)
    stream.close()
    run = llm_run(langsmith_server)
    check_failed(run, "GeneratorExit")
    assert event_names(run) == ["start", "new_token", "error"]
    assert len(langsmith_server.runs()) == 1
    check_private(langsmith_server)


@each_model
async def test_async_stream_that_is_left_ends_its_run(langsmith_server, cls):
    stream = cls(ensemble=lone(), trace_phases="summary").astream(QUESTION)
    await anext(stream)
    await stream.aclose()
    run = llm_run(langsmith_server)
    check_failed(run, "GeneratorExit")
    assert event_names(run) == ["start", "new_token", "error"]
    assert len(langsmith_server.runs()) == 1
    check_private(langsmith_server)


@each_model
async def test_cancelled_async_stream_ends_its_run(langsmith_server, cls):
    waiting = Waiting()
    model = cls(ensemble=lone(waiting))

    async def consume():
        return [chunk async for chunk in model.astream(QUESTION)]

    task = asyncio.create_task(consume())
    await cancel(task, waiting)
    check_failed(llm_run(langsmith_server), "CancelledError")


async def test_version_3_stream_that_is_closed_ends_its_run(langsmith_server):
    waiting = Waiting()
    stream = await ChatSafeLLM(ensemble=lone(waiting)).astream_events(QUESTION, version="v3")
    async for _ in stream.text:
        break
    asyncio.get_running_loop().call_later(0.01, waiting.goes_on.set)
    await stream.aclose()
    run = llm_run(langsmith_server)
    check_failed(run, "CancelledError")
    assert event_names(run) == ["start", "new_token", "error"]


# ---------------------------------------------------------------------- what is not told


@pytest.mark.parametrize("path", CHAT_PATHS)
async def test_conversation_is_in_the_inputs_only(langsmith_server, path):
    conversation = [
        SystemMessage(f"{SECRET}: be brief."),
        HumanMessage(f"{SECRET}: think of a number.", name=SECRET),
        AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "1"}]),
        ToolMessage(SECRET, tool_call_id="1"),
    ]
    model = ChatSafeLLM(ensemble=scripted_ensemble(lambda _: "2 m.", lambda _: "3 m."), trace_phases="blocks")
    answer = await ask(model, path, conversation)
    assert answer.response_metadata["safe"]["n_points"] > 0
    check_private(langsmith_server)

"""Every way to ask a LangChain model of ours, and a look into the engine behind it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import Generation, LLMResult

from langchain_safe_llm import ChatSafeLLM, SafeLLM
from safe_llm import Ensemble
from safe_llm.testing import scripted_ensemble

Model = ChatSafeLLM | SafeLLM
MODELS = (ChatSafeLLM, SafeLLM)

QUESTION = "Where is the treasure?"
COUNT = "Count!"
EASY = "Is it far?"
NUMBERS = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
DRAFTED = {QUESTION: "Under the old oak, two steps to the left.", COUNT: NUMBERS, EASY: "No, not far."}
VERIFIED = DRAFTED | {QUESTION: "Under the new oak, two steps to the left."}

TEXT_PATHS = ("invoke", "stream", "batch", "ainvoke", "astream", "abatch", "events_v2")
CHAT_PATHS = (*TEXT_PATHS, "stream_v3", "astream_v3")
ALL_PATHS = [(SafeLLM, path) for path in TEXT_PATHS] + [(ChatSafeLLM, path) for path in CHAT_PATHS]


def treasure(**options: Any) -> Ensemble:
    """A new ensemble of two members that agree but for one word."""
    return scripted_ensemble(DRAFTED, VERIFIED, **{"lookahead": 5, **options})


# ---------------------------------------------------------------------- asking


class Recorder(BaseCallbackHandler):
    """Notes what is reported about model runs, in order.

    Attributes:
        events: Names of the events.
        tokens: What `on_llm_new_token` was told.
        chunks: The chunks that came with them.
        results: What the runs ended with.
        errors: What the runs failed with.
        points: Data of the custom events.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[Any] = []
        self.chunks: list[Any] = []
        self.results: list[LLMResult] = []
        self.errors: list[BaseException] = []
        self.points: list[Any] = []

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("start")

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        self.tokens.append(token)
        self.chunks.append(chunk)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.events.append("end")
        self.results.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append("error")
        self.errors.append(error)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.points.append(data)


@dataclass(frozen=True)
class Answered:
    """What one call gave, in the same form for both models.

    Attributes:
        text: The answer's text, as the caller got it.
        generation: What the run ended with.
        recorder: What was reported about it.
    """

    text: str
    generation: Generation
    recorder: Recorder

    @property
    def message(self) -> Any:
        return self.generation.message  # type: ignore[attr-defined]

    @property
    def info(self) -> dict[str, Any]:
        if hasattr(self.generation, "message"):
            return self.generation.message.response_metadata
        return self.generation.generation_info or {}

    @property
    def usage(self) -> dict[str, int]:
        if hasattr(self.generation, "message"):
            return self.generation.message.usage_metadata
        return self.info["usage"]

    @property
    def points(self) -> list[dict[str, Any]]:
        return self.info["safe_points"]

    @property
    def finish(self) -> tuple[str, str]:
        return self.info["finish_reason"], self.info["safe"]["finish_detail"]

    @property
    def num_forwards(self) -> int:
        return self.info["safe"]["n_forwards"]["drafter"]


async def ask(model: Any, path: str, prompt: Any = QUESTION, *, recorder: Any = None, **kwargs: Any) -> Answered:
    """Ask on one of the paths and return what came back."""
    recorder = recorder or Recorder()
    output = await PATHS[path](model, prompt, {"config": {"callbacks": [recorder]}, **kwargs})
    await ended(recorder)
    assert recorder.events == ["start", "end"]  # once per call, whatever the path
    return Answered(text_of(output), recorder.results[0].generations[0][0], recorder)


async def ended(recorder: Recorder) -> None:
    """Wait until a run's end was reported; on core's asynchronous v3 path the caller is told first."""
    for _ in range(1000):
        if len(recorder.events) > 1:
            break
        await asyncio.sleep(0.001)


def text_of(output: Any) -> str:
    """The text of a str or a message."""
    return output if isinstance(output, str) else str(output.text)


async def _invoke(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return model.invoke(prompt, **kwargs)


async def _ainvoke(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return await model.ainvoke(prompt, **kwargs)


async def _stream(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return "".join(map(text_of, model.stream(prompt, **kwargs)))


async def _astream(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return "".join([text_of(chunk) async for chunk in model.astream(prompt, **kwargs)])


async def _batch(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return model.batch([prompt], **kwargs)[0]


async def _abatch(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    return (await model.abatch([prompt], **kwargs))[0]


async def _events_v2(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    events = [event async for event in model.astream_events(prompt, version="v2", **kwargs)]
    streamed = "".join(text_of(e["data"]["chunk"]) for e in events if e["event"].endswith("_stream"))
    (end,) = (event for event in events if event["event"].endswith("model_end") or event["event"] == "on_llm_end")
    output = end["data"]["output"]
    output = output["generations"][0][0]["text"] if isinstance(output, dict) else output
    assert streamed == text_of(output)
    return output


async def _stream_v3(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    stream = model.stream_events(prompt, version="v3", **kwargs)
    list(stream)
    return stream.output


async def _astream_v3(model: Any, prompt: Any, kwargs: dict[str, Any]) -> Any:
    stream = await model.astream_events(prompt, version="v3", **kwargs)
    async for _ in stream:
        pass
    return await stream.output


PATHS = {
    "invoke": _invoke,
    "ainvoke": _ainvoke,
    "stream": _stream,
    "astream": _astream,
    "batch": _batch,
    "abatch": _abatch,
    "events_v2": _events_v2,
    "stream_v3": _stream_v3,
    "astream_v3": _astream_v3,
}


# ---------------------------------------------------------------------- the engine behind


def forwards(ensemble: Ensemble) -> int:
    """Forward passes of the drafter so far."""
    return ensemble.members[0].backend.num_forwards


def open_requests(ensemble: Ensemble) -> int:
    """Requests that the engine still has."""
    return ensemble._scheduler.num_requests


def wait_until(condition: Callable[[], bool]) -> None:
    """Let other threads work until something is so; for what happens soon but in another thread."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_freed(ensemble: Ensemble) -> bool:
    """Whether the engine gives back, soon, all that requests held."""
    wait_until(lambda: open_requests(ensemble) == 0)
    return all(not member.num_sessions for member in ensemble.members)


def before_forwards(ensemble: Ensemble, action: Callable[[], object]) -> None:
    """Do something before each forward pass of the drafter, in the thread that makes it."""
    backend = ensemble.members[0].backend
    forward = backend.forward

    def with_action(feeds: Any) -> Any:
        action()
        return forward(feeds)

    backend.forward = with_action


def hold_until_cancelled(ensemble: Ensemble, monkeypatch: Any, *, after: int = 3) -> threading.Event:
    """Let the drafter wait, from its forward pass number `after` on, until its request is told to stop.

    Returns:
        Set once it waits.
    """
    cancels: list[threading.Event] = []
    waits = threading.Event()

    def noting(call: Any, *args: Any, **kwargs: Any) -> Any:
        cancels.append(kwargs["cancel"])
        return call(*args, **kwargs)

    for name in ("generate", "stream"):
        monkeypatch.setattr(ensemble, name, functools.partial(noting, getattr(ensemble, name)))

    def wait() -> None:
        if forwards(ensemble) >= after:
            waits.set()
            wait_until(cancels[-1].is_set)

    before_forwards(ensemble, wait)
    return waits

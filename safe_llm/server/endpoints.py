"""One request to generate, from its first byte to its last, or to its client's leaving."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from safe_llm.ensemble import Ensemble
from safe_llm.errors import SafeLLMError
from safe_llm.events import Event, GenerationFinished
from safe_llm.server.answers import Choice, Make, together
from safe_llm.server.bodies import checked, decoded, read_body
from safe_llm.server.completions import ChatWriter, CompletionWriter, Writer
from safe_llm.server.jobs import Job, chat_job, completion_job
from safe_llm.server.problems import ApiError, problem_of
from safe_llm.server.replies import Reply
from safe_llm.server.schema import ChatRequest, CompletionRequest, GenerationBody
from safe_llm.server.service import Service
from safe_llm.server.settings import ServerSettings
from safe_llm.tool_calling import AnswerParser

__all__ = ["CHAT", "COMPLETION", "Endpoint", "Generation", "say_unexpected"]

B = TypeVar("B", bound=GenerationBody)
T = TypeVar("T")

_log = logging.getLogger("safe_llm.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    """One kind of request.

    Attributes:
        path: Where it is.
        request: What it may say.
        prompt_field: Where its prompt stands.
        job: Makes a job of it.
        writer: Makes what writes its replies.
        has_parts: Whether answers are taken apart into thoughts, calls and text.
    """

    path: str
    request: type[B]
    prompt_field: str
    job: Callable[[B, ServerSettings, Ensemble], Job]
    writer: Callable[[Job, Ensemble], Writer]
    has_parts: bool

    def read(self, body: bytes, service: Service) -> Job:
        """Return the job of a body.

        Raises:
            ApiError: It is not one of this endpoint, or not within the limits.
        """
        asked = checked(self.request, decoded(body))
        try:
            return self.job(asked, service.settings, service.ensemble)
        except SafeLLMError as error:
            raise problem_of(error, param=self.prompt_field) from None


CHAT = Endpoint(
    path="/v1/chat/completions",
    request=ChatRequest,
    prompt_field="messages",
    job=chat_job,
    writer=ChatWriter,
    has_parts=True,
)
COMPLETION = Endpoint(
    path="/v1/completions",
    request=CompletionRequest,
    prompt_field="prompt",
    job=completion_job,
    writer=CompletionWriter,
    has_parts=False,
)


class Generation(Response):
    """Reads a request, answers it, and stops decoding within a round when the client leaves."""

    def __init__(self, service: Service, endpoint: Endpoint[Any]) -> None:
        super().__init__()
        self._service = service
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        outcome = "failed"
        try:
            outcome = await self._respond(scope, receive, send)
        except ClientDisconnect:
            outcome = "disconnected"
        except ApiError as problem:
            outcome = problem.outcome
            await problem.response()(scope, receive, send)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._service.metrics.ended(self._endpoint.path, outcome)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> str:
        body = await read_body(Request(scope, receive), self._service.settings.max_body_bytes)
        job = self._endpoint.read(body, self._service)
        with self._service.place(job.size):
            answering = _Answering(self._service, self._endpoint, job)
            if job.streams:
                return await unless_gone(receive, answering.stream(send))
            reply = await unless_gone(receive, answering.reply())
        await JSONResponse(reply.model_dump(mode="json", exclude_unset=True))(scope, receive, send)
        return "ok"


class _Answering:
    """The answers of one job."""

    def __init__(self, service: Service, endpoint: Endpoint[Any], job: Job) -> None:
        self._service = service
        self._job = job
        self._writer = endpoint.writer(job, service.ensemble)
        self._choices = [
            Choice(index, AnswerParser(job.calls_tools) if endpoint.has_parts else None) for index in range(job.size)
        ]

    async def reply(self) -> Reply:
        """Return the whole body.

        Raises:
            ApiError: Anything that went wrong.
        """
        with self._problems():
            async with self._events() as events:
                async for number, event in events:
                    self._choices[number].feed(event)
        return self._writer.whole(self._choices)

    async def stream(self, send: Send) -> str:
        """Send the events, and return how it ended.

        Nothing is sent before the first event: what is wrong with the request shows before that, and has a status.

        Raises:
            ApiError: Anything that went wrong before the first event.
        """
        async with self._chunks() as chunks:
            first = await anext(chunks)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_event(send, _dumped(first))
            outcome = "ok"
            try:
                async for chunk in chunks:
                    await _send_event(send, _dumped(chunk))
                await _send_event(send, "[DONE]")
            except ApiError as problem:
                outcome = problem.outcome
                await _send_event(send, json.dumps(problem.as_dict()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    @contextlib.asynccontextmanager
    async def _chunks(self) -> AsyncIterator[AsyncGenerator[Reply, None]]:
        async with aclosing(self._written()) as chunks:
            yield chunks

    async def _written(self) -> AsyncGenerator[Reply, None]:
        has_begun: set[int] = set()
        with self._problems():
            async with self._events() as events:
                async for number, event in events:
                    if number not in has_begun:
                        has_begun.add(number)
                        for chunk in self._writer.begin(number):
                            yield chunk
                    for chunk in self._chunks_of(self._choices[number], event):
                        yield chunk
        if self._job.includes_usage:
            yield self._writer.usage(self._choices)

    def _chunks_of(self, choice: Choice, event: Event) -> Iterator[Reply]:
        for new in choice.feed(event):
            yield self._writer.chunk(choice, new)
        if choice.result is not None:
            yield self._writer.end(choice)

    @contextlib.asynccontextmanager
    async def _events(self) -> AsyncIterator[AsyncGenerator[tuple[int, Event], None]]:
        """The events of all answers; whoever leaves cancels what still runs."""
        async with aclosing(self._noted(together(self._makes()))) as events:
            yield events

    async def _noted(self, source: AsyncGenerator[tuple[int, Event], None]) -> AsyncGenerator[tuple[int, Event], None]:
        async with aclosing(source) as events:
            async for number, event in events:
                if isinstance(event, GenerationFinished):
                    self._service.succeeded(event.result)
                yield number, event

    def _makes(self) -> Sequence[Make]:
        return [self._make(index) for index in range(self._job.size)]

    def _make(self, index: int) -> Make:
        prompt, params = self._job.prompts[index // self._job.n], self._job.params_of(index)

        def start(cancel: threading.Event) -> Iterator[Event]:
            return self._service.ensemble.stream(prompt, events=True, detailed=False, cancel=cancel, **params)

        return start

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Turn what goes wrong into what the client is told, and take note of it."""
        try:
            yield
        except Exception as error:
            self._service.failed(error)
            problem = problem_of(error, param=self._job.prompt_field)
            if problem.status >= 500:
                say_unexpected(error, problem)
            raise problem from None


def say_unexpected(error: BaseException, problem: ApiError) -> None:
    """Log a failure: what the client is told, and where it was raised; no text of an unknown exception."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%d %s: %s\n%s", problem.status, problem.code, problem, frames)


# ---------------------------------------------------------------------- events on the wire


async def _send_event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _dumped(chunk: Reply) -> str:
    # ASCII: some clients take U+2028 and U+0085 for the end of a line
    return json.dumps(chunk.model_dump(mode="json", exclude_unset=True), separators=(",", ":"))


# ---------------------------------------------------------------------- clients that leave


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client leaves.

    Raises:
        ClientDisconnect: The client has left.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _cancelled((working, watching))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""A server that runs here: the real app on a real uvicorn, on the loopback interface, with scripted members.

A test that uses it needs `@pytest.mark.allow_hosts(["127.0.0.1"])`, which opens loopback and nothing else.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import httpx
import openai
import pytest

from safe_llm.ensemble import Ensemble
from safe_llm.server import ServerSettings, make_app
from safe_llm.server.running import Listener

GUARD_S = 60.0  # against a hang only
NAME = "scripted"
QUESTION = "What is the answer?"
RIGHT, WRONG = "The answer is 42, not 1850.", "The answer is 41, not 1850."
ANSWERS = {
    QUESTION: RIGHT,
    "long": "The position is Incorrect " * 40,
    "Say it in Japanese.": "日本語のテキスト 🙂 é",
    "think": "<think>\nhm, hm\n</think>\n\nIt is 42.",
    "json": '{"a": 1}',
}


class Server:
    """Serves an ensemble from a thread of its own until the block ends."""

    def __init__(self, ensemble: Ensemble, **settings: Any) -> None:
        self.ensemble = ensemble
        self.settings = ServerSettings(model_names=(NAME,), **settings)
        self.app = make_app(ensemble, self.settings)
        self.service = self.app.state.service

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        self.listener = Listener(self.app, self.settings)
        self._thread = threading.Thread(target=self.listener.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.listener.should_exit = True
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "the server does not end"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=GUARD_S, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=GUARD_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=GUARD_S, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Post a JSON value, or the bytes of a body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=GUARD_S, **options)

    def chat(self, content: Any = QUESTION, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"model": NAME, "messages": messages, **fields})

    def complete(self, prompt: Any = QUESTION, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": NAME, "prompt": prompt, **fields})

    def raw_chat(self, content: str, **fields: Any) -> socket.socket:
        """Send a chat request and return the connection, with the reply unread."""
        body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": content}], **fields})
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=GUARD_S)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection

    def metric(self, line: str) -> float:
        """Return the value of one line of `/metrics`, 0 where it is not there yet."""
        found = [row.split()[-1] for row in self.get("/metrics").text.splitlines() if row.startswith(f"{line} ")]
        return float(found[0]) if found else 0.0

    def is_idle(self) -> bool:
        return self.ensemble.occupancy == (0, 0)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def received(connection: socket.socket, mark: bytes) -> bytes:
    """Read until `mark` has come, or the end."""
    data = b""
    while mark not in data and (more := connection.recv(65536)):
        data += more
    return data


def chunks_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, JSON decoded; the last one as it is."""
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def hold_rounds(monkeypatch: pytest.MonkeyPatch, ensemble: Ensemble) -> threading.Semaphore:
    """Let the engine run one round for each release of the semaphore."""
    permits = threading.Semaphore(0)
    run = ensemble._engine.round

    def held(rows: Any) -> None:
        assert permits.acquire(timeout=GUARD_S)
        run(rows)

    monkeypatch.setattr(ensemble._engine, "round", held)
    return permits

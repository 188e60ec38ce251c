"""A LangSmith that runs here: what the real client posts, over real HTTP on the loopback interface.

A test that uses the fixture needs `@pytest.mark.allow_hosts(["127.0.0.1"])`, which opens loopback and nothing else.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import langsmith
import pytest
from langsmith.run_trees import get_cached_client
from langsmith.utils import get_env_var, get_tracer_project

_INGEST = {
    "scale_up_qsize_trigger": 1000,
    "scale_up_nthreads_limit": 16,
    "scale_down_nempty_trigger": 4,
    "size_limit": 100,
    "size_limit_bytes": 20_971_520,
}
_PATIENCE_S = 30.0


class LangSmithServer:
    """Records runs.

    Attributes:
        operations: What arrived, in order: ("post" or "patch", id of the run).
        paths: Where it arrived.
    """

    def __init__(self, *, use_multipart: bool = True) -> None:
        self.use_multipart = use_multipart
        self.operations: list[tuple[str, str]] = []
        self.paths: set[str] = set()
        self._runs: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return everything that the global client has to say, by id: posts merged with their patches."""
        client = get_cached_client()
        client.flush(timeout=_PATIENCE_S)
        if client.tracing_queue is not None and client.tracing_queue.unfinished_tasks:  # without end, in a plain flush
            pytest.fail(f"langsmith's client has not sent its runs in {_PATIENCE_S} s: its thread died, or waits")
        with self._lock:
            return {run_id: dict(run) for run_id, run in self._runs.items()}

    def run(self, name: str) -> dict[str, Any]:
        """Return the one run of this name."""
        (found,) = [run for run in self.runs().values() if run["name"] == name]
        return found

    def children(self, parent: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the children of a run in the order that LangSmith shows them."""
        found = [run for run in self.runs().values() if run.get("parent_run_id") == parent["id"]]
        return sorted(found, key=lambda run: run["dotted_order"])

    def record(self, path: str, operation: str, run: dict[str, Any]) -> None:
        with self._lock:
            self.paths.add(path)
            self.operations.append((operation, run["id"]))
            known = self._runs.setdefault(run["id"], {})
            known.update({key: value for key, value in run.items() if value is not None})


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, recorder: LangSmithServer, *args: Any) -> None:
        self.recorder = recorder
        super().__init__(*args)

    def do_GET(self) -> None:
        config = {**_INGEST, "use_multipart_endpoint": self.recorder.use_multipart}
        self._answer({"version": "1", "batch_ingest_config": config} if self.path == "/info" else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/runs/multipart":
            for (operation, run_id), run in _of_parts(self.headers["Content-Type"], body).items():
                self.recorder.record(self.path, operation, {"id": run_id, **run})
        elif self.path == "/runs/batch":
            for operation, runs in json.loads(body).items():
                for run in runs:
                    self.recorder.record(self.path, operation, run)
        else:
            self.recorder.record(self.path, "post", json.loads(body))
        self._answer({})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prefix, run_id = self.path.rsplit("/", 1)
        self.recorder.record(prefix, "patch", {**body, "id": run_id})
        self._answer({})

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _of_parts(content_type: str, body: bytes) -> dict[tuple[str, str], dict[str, Any]]:
    """Merge the parts `post.<id>`, `post.<id>.inputs`, ... of a form; keys are (operation, id)."""
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    form = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
    for part in form.get_payload():
        operation, run_id, *field = part.get_param("name", header="content-disposition").split(".")
        value = json.loads(part.get_payload(decode=True))
        runs.setdefault((operation, run_id), {}).update({field[0]: value} if field else value)
    return runs


@pytest.fixture
def langsmith_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangSmithServer]:
    """Everything that LangChain traces in this test goes to this server."""
    with LangSmithServer() as server:
        monkeypatch.setenv("LANGSMITH_ENDPOINT", server.url)
        monkeypatch.setenv("LANGSMITH_TRACING", "true")
        monkeypatch.setenv("LANGSMITH_API_KEY", "x")
        monkeypatch.setenv("LANGSMITH_PROJECT", "test")
        _forget()
        yield server
        get_cached_client().close(timeout=_PATIENCE_S)
        for thread in threading.enumerate():  # of clients: one that outlives the server would ask it again and again
            if "tracing" in thread.name:
                thread.join(timeout=5)
        _forget()


def _forget() -> None:
    """Make langsmith read the environment again and build a new client."""
    langsmith.configure(client=None)
    get_env_var.cache_clear()
    get_tracer_project.cache_clear()

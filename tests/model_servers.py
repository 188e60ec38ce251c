"""Model servers that run here: vLLM's and SGLang's HTTP on the loopback interface, computed by a function.

A test that uses one needs `@pytest.mark.allow_hosts(["127.0.0.1"])`, which opens loopback and nothing else.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from safe_llm.backends.remote import Answer, Question, position
from safe_llm.testing import NextLogits

Fault = Callable[["_Handler", dict[str, Any]], "dict[str, Any] | None"]
"""Instead of an answer: changes what would be answered, or answers itself and returns None."""

GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


def log_softmax(logits: Sequence[float]) -> np.ndarray:
    row = np.asarray(logits, dtype=np.float64)
    return row - np.logaddexp.reduce(row)


class DirectServer:
    """A `Server` without HTTP.

    Attributes:
        questions: What was asked.
        fails: Raised by the next calls instead of an answer.
    """

    def __init__(self, next_logits: NextLogits, *, name: str = "there", top_k: int = 64, context: int = 64) -> None:
        self.name, self.top_k, self.context = name, top_k, context
        self.questions: list[Question] = []
        self.fails: list[BaseException] = []
        self._next_logits = next_logits

    def ask(self, question: Question) -> Answer:
        self.questions.append(question)
        if self.fails:
            raise self.fails.pop(0)
        text = list(question.ids)
        for _ in range(question.num_new):
            text.append(int(np.argmax(self._next_logits(tuple(text)))))
        positions = []
        for length in range(question.first, len(text)):
            row = log_softmax(self._next_logits(tuple(text[:length])))
            best = np.argsort(-row, kind="stable")[: self.top_k].tolist()
            named = {*best, *text[length : length + 1]}
            positions.append(position(self.name, {i: float(row[i]) for i in named}, self.top_k))
        return Answer(positions=positions, generated=text[len(question.ids) :], num_computed=len(question.ids))


class ModelServer:
    """A server of one model.

    Attributes:
        calls: Bodies of the calls to generate, in order.
        headers: Their headers.
        faults: What to do to the next calls to generate, the first one's first.
        block: Ids per block of the prefix cache (vLLM).
        meet: Where a call to generate waits until as many others have come.
    """

    def __init__(
        self, next_logits: NextLogits, kind: str = "vllm", *, tokenizer: Tokenizer | None = None, context: int = 65
    ) -> None:
        self.kind, self.context, self.tokenizer = kind, context, tokenizer
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        self.block = 4
        self.meet: threading.Barrier | None = None
        self._next_logits = next_logits
        self._seen: list[tuple[int, ...]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._http.daemon_threads = True
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

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the documented answer, None where there is no such path."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": self.context}]}
        if path == "/tokenize" and self.tokenizer is not None:
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"]).ids
            return {"tokens": ids, "count": len(ids), "max_model_len": self.context}
        if path == GENERATE[self.kind]:
            return self._vllm(body) if self.kind == "vllm" else self._sglang(body)
        return None

    def _row(self, ids: Sequence[int], k: int) -> tuple[np.ndarray, list[int]]:
        row = log_softmax(self._next_logits(tuple(ids)))
        return row, np.argsort(-row, kind="stable")[:k].tolist()

    def _grown(self, ids: Sequence[int], num_new: int) -> list[int]:
        text = list(ids)
        for _ in range(num_new):
            text.append(self._row(text, 1)[1][0])
        return text

    def _cached(self, ids: Sequence[int], limit: int, block: int) -> int:
        with self._lock:
            longest = 0
            for seen in self._seen:
                same = next((i for i, (a, b) in enumerate(zip(seen, ids, strict=False)) if a != b), len(seen))
                longest = max(longest, min(same, limit) // block * block)
            self._seen.append(tuple(ids))
        return longest

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, sampling = body["token_ids"], body["sampling_params"]
        reads_cache = not sampling.get("skip_reading_prefix_cache", "prompt_logprobs" in sampling)
        cached = self._cached(ids, len(ids) - 1, self.block) if reads_cache else 0
        rows = None
        if (k := sampling.get("prompt_logprobs")) is not None:
            garbage = {"-1201724448": {"logprob": 10.0, "rank": 2, "decoded_token": None}}
            rows = [None, *[garbage] * cached]  # as the runner without Triton leaves them
            for at in range(1 + cached, len(ids)):
                row, best = self._row(ids[:at], k)
                rows.append({str(i): {"logprob": row[i], "rank": 1, "decoded_token": None} for i in (ids[at], *best)})
        text, content = self._grown(ids, sampling["max_tokens"]), []
        for at in range(len(ids), len(text)):
            row, best = self._row(text[:at], sampling["logprobs"])
            tops = [{"token_id": i, "logprob": row[i], "rank": rank} for rank, i in enumerate(best, 1)]
            content.append({**tops[0], "top_logprobs": tops})
        choice = {
            "index": 0,
            "token_ids": text[len(ids) :],
            "logprobs": {"content": content},
            "finish_reason": "length",
        }
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
        return {"model": "tiny", "usage": usage, "prompt_logprobs": rows, "choices": [choice]}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
        cached = self._cached(ids, min(len(ids) - 1, start), 1)
        text = self._grown(ids, body["sampling_params"]["max_new_tokens"])
        tokens: list[Any] = [[None, ids[start], None]]
        tops: list[Any] = [None]
        for at in range(start + 1, len(text)):
            row, best = self._row(text[:at], k)
            tokens.append([row[text[at]], text[at], None])
            tops.append([[row[i], i, None] for i in best])
        split = len(ids) - start
        meta = {
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "input_token_logprobs": tokens[:split],
            "input_top_logprobs": tops[:split],
            "output_token_logprobs": tokens[split:],
            "output_top_logprobs": tops[split:],
        }
        return {"text": "", "output_ids": text[len(ids) :], "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: ModelServer, *args: Any) -> None:
        self.model_server = server
        super().__init__(*args)

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _serve(self, body: dict[str, Any]) -> None:
        server, fault = self.model_server, None
        if self.path == GENERATE[server.kind]:
            server.calls.append(body)
            server.headers.append(dict(self.headers))
            if server.meet is not None:
                server.meet.wait(timeout=30)
            fault = server.faults.pop(0) if server.faults else None
        value = server.answer(self.path, body)
        if value is not None and fault is not None:
            value = fault(self, value)
            if value is None:
                return
        self.reply(404 if value is None else 200, json.dumps(value or {"detail": "Not Found"}).encode())

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def status(code: int, body: dict[str, Any] | None = None, **headers: str) -> Fault:
    """Answer with another status."""

    def fault(handler: _Handler, value: dict[str, Any]) -> None:
        handler.reply(code, json.dumps(body or {"error": {"message": "secret prompt text"}}).encode(), **headers)

    return fault


def raw(body: bytes) -> Fault:
    """Answer this instead of JSON."""
    return lambda handler, value: handler.reply(200, body)


def dies(after: int) -> Fault:
    """Close the connection after so many bytes of an answer; 0 closes it before there is any."""

    def fault(handler: _Handler, value: dict[str, Any]) -> None:
        if after:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b" " * after)
            handler.wfile.flush()
        handler.close_connection = True
        handler.connection.shutdown(2)

    return fault


def waits(event: threading.Event) -> Fault:
    """Answer only when `event` is set."""

    def fault(handler: _Handler, value: dict[str, Any]) -> None:
        event.wait(timeout=30)
        handler.close_connection = True

    return fault


def changed(change: Callable[[dict[str, Any]], object]) -> Fault:
    """Answer something that is wrong in one place."""

    def fault(handler: _Handler, value: dict[str, Any]) -> dict[str, Any]:
        change(value)
        return value

    return fault

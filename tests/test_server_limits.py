"""Limits, keys, counts and failures: no request takes the server from the others, and `/health` tells the truth."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading

import httpx
import pytest
import torch

from safe_llm.errors import ConfigError
from safe_llm.server import ServerSettings
from safe_llm.testing import scripted_ensemble
from server_support import ANSWERS, NAME, QUESTION, RIGHT, Server, chunks_of, hold_rounds, until

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

BODY = {"model": NAME, "prompt": QUESTION}


@pytest.fixture
def server():
    with Server(scripted_ensemble(ANSWERS)) as running:
        yield running


def serving(**settings):
    return Server(scripted_ensemble(ANSWERS, **settings.pop("config", {})), **settings)


def error_of(response, status):
    assert response.status_code == status
    return response.json()["error"]


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "values",
    [{"port": 70000}, {"max_queue": -1}, {"max_n": 0}, {"api_key": ""}, {"model_names": ()}, {"drain_s": math.nan}],
)
def test_setting_out_of_range_is_refused(values):
    with pytest.raises(ConfigError):
        ServerSettings(**values)
    with pytest.raises(ConfigError, match="max_queue"):
        ServerSettings(max_que=1)


def test_key_is_shown_nowhere():  # G08
    settings = ServerSettings(api_key="s3cret")
    assert "s3cret" not in repr(settings) + str(settings) + settings.model_dump_json()


def test_missing_extra_is_one_error_with_the_command():
    code = "import sys; sys.modules['uvicorn'] = None; import safe_llm.server"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("safe_llm.errors.ConfigError: the server needs uvicorn")
    assert 'pip install "safe-llm-ensemble[server]"' in last


# ---------------------------------------------------------------------- the key


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer s3cre", "Bearer s3cretx", "Basic s3cret", "Bearer é"])
def test_wrong_key_is_refused_everywhere_but_at_health(header):
    headers = {} if header is None else {"Authorization": header.encode()}
    with serving(api_key="s3cret") as server:
        for response in (
            server.post("/v1/completions", BODY, headers=headers),
            server.get("/v1/models", headers=headers),
            server.get("/metrics", headers=headers),
            server.get("/nothing", headers=headers),
        ):
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "s3cret" not in response.text
        assert server.get("/health", headers=headers).status_code == 200
        assert not any(member.backend.calls for member in server.ensemble.members)


def test_right_key_lets_in():
    with serving(api_key="s3cret") as server:
        for scheme in ("Bearer", "bearer"):
            response = server.post("/v1/completions", BODY, headers={"Authorization": f"{scheme} s3cret"})
            assert response.json()["choices"][0]["text"] == RIGHT


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("how", ["declared", "in pieces"])
def test_body_over_the_limit_is_refused(how):  # G10
    body = b'{"model": "' + b"x" * 5000 + b'"}'
    with serving(max_body_bytes=1000) as server:
        content = body if how == "declared" else iter([body[:400], body[400:]])
        headers = {"Content-Type": "application/json"}
        response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert error_of(response, 413)["code"] == "body_too_large"
        assert server.complete().json()["choices"][0]["text"] == RIGHT


def test_endless_body_is_not_read_to_its_end():
    taken = []

    def pieces():
        for _ in range(100_000):
            taken.append(1)
            yield b"x" * 1000

    with serving(max_body_bytes=1000) as server:
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(httpx.TransportError):  # it was still writing
            response = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers)
            assert response.status_code == 413
        assert len(taken) < 100_000
        assert server.complete().status_code == 200


@pytest.mark.parametrize(
    ("settings", "fields", "says"),
    [
        ({"max_prompt_chars": 10}, {"prompt": "x" * 11}, "11 characters, at most 10"),
        ({"max_prompt_chars": 10}, {"prompt": ["x" * 6, "x" * 6]}, "12 characters, at most 10"),
        ({"max_n": 3}, {"prompt": ["x", "x"], "n": 2}, "4 answers in one request, at most 3"),
        ({"max_tokens_limit": 8}, {"max_tokens": 9}, "max_tokens is 9, at most 8"),
    ],
)
def test_request_over_a_limit_is_refused_with_numbers(settings, fields, says):  # G10
    with serving(**settings) as server:
        assert says in error_of(server.post("/v1/completions", BODY | fields), 400)["message"]


def test_default_length_keeps_to_the_limit_too():
    with serving(max_tokens_limit=3) as server:
        assert server.complete("long").json()["usage"]["completion_tokens"] == 3


# ---------------------------------------------------------------------- the queue


def test_full_queue_refuses_and_says_when_to_come_again(monkeypatch):
    with serving(config={"max_batch_size": 1}, max_queue=2) as server:
        permits = hold_rounds(monkeypatch, server.ensemble)
        replies = []
        waiting = [threading.Thread(target=lambda: replies.append(server.complete())) for _ in range(3)]
        for thread in waiting:
            thread.start()
        until(lambda: server.ensemble.occupancy == (1, 2))
        assert server.get("/health").json() == {"status": "ok", "running": 1, "waiting": 2, "consecutive_failures": 0}
        assert (server.metric("safe_llm_answers_running"), server.metric("safe_llm_answers_waiting")) == (1, 2)
        refused = server.complete()
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        permits.release(1000)
        for thread in waiting:
            thread.join()
        assert [reply.json()["choices"][0]["text"] for reply in replies] == [RIGHT] * 3
        assert server.complete().status_code == 200
        assert server.metric('safe_llm_requests_total{endpoint="/v1/completions",outcome="refused"}') == 1


def test_request_that_is_larger_than_the_queue_comes_in_alone():
    with serving(config={"max_batch_size": 1}, max_queue=0) as server:
        assert [choice["text"] for choice in server.complete(n=3).json()["choices"]] == [RIGHT] * 3


# ---------------------------------------------------------------------- failures


def poison(member, error=None, *, when="poison", times=10**9):
    """Make a member fail, or give NaN, in rows whose prompt has a word; as often as `times`."""
    inner, vocabulary = member.backend._next_logits, member.vocabulary

    def next_logits(ids):
        nonlocal times
        if when in b"".join(map(vocabulary.surface, ids)).decode() and times > 0:
            times -= 1
            if error is not None:
                raise error
            return [math.nan] * vocabulary.width
        return inner(ids)

    member.backend._next_logits = next_logits


def test_row_with_nan_fails_alone_in_its_batch(server, monkeypatch):  # F09
    poison(server.ensemble.members[0])
    permits = hold_rounds(monkeypatch, server.ensemble)
    replies = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: replies.update({prompt: server.complete(prompt)}))
        for prompt in (QUESTION, "poison", "json")
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(server.ensemble.occupancy) == 3)
    permits.release(1000)
    for thread in threads:
        thread.join()
    error = error_of(replies["poison"], 500)
    assert error["code"] == "member_failed"
    assert "'drafter'" in error["message"]
    assert [replies[p].json()["choices"][0]["text"] for p in (QUESTION, "json")] == [RIGHT, ANSWERS["json"]]


def test_out_of_memory_is_said_to_be_temporary_and_the_next_request_works(server):  # F20
    for error in (torch.OutOfMemoryError("no"), MemoryError()):
        poison(server.ensemble.members[1], error, when=QUESTION, times=1)
        response = server.complete()
        assert error_of(response, 503)["code"] == "out_of_memory"
        assert response.headers["retry-after"]
        assert server.complete().json()["choices"][0]["text"] == RIGHT


def test_health_says_when_answers_fail_and_when_they_do_no_more(server):  # F21
    poison(server.ensemble.members[1], AssertionError(f"secret {QUESTION}"), when=QUESTION, times=3)
    for number in (1, 2, 3):
        response = server.complete()
        assert error_of(response, 500)["message"] == "member 'verifier': its script raised AssertionError"
        assert server.get("/health").json()["consecutive_failures"] == number
    failing = server.get("/health")
    assert (failing.status_code, failing.json()["status"]) == (503, "failing")
    assert server.complete(temperature=-1).status_code == 400  # nobody's failure
    assert server.complete().status_code == 200
    assert server.get("/health").json()["status"] == "ok"


def test_failure_that_nobody_thought_of_is_a_500_without_its_text(server, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError(QUESTION)

    monkeypatch.setattr(server.ensemble, "record", fail)
    for response in (server.complete(), server.complete(stream=True)):
        error = chunks_of(response)[-1]["error"] if response.status_code == 200 else error_of(response, 500)
        assert error == {
            "message": "the request failed: ZeroDivisionError",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    assert QUESTION not in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_engine_error_of_another_kind_hides_its_text(server, monkeypatch):
    def fail(rows):
        raise RuntimeError(QUESTION)

    monkeypatch.setattr(server.ensemble._engine, "round", fail)
    error = error_of(server.complete(), 500)
    assert (error["message"], error["code"]) == ("decoding failed: RuntimeError", "generation_failed")


# ---------------------------------------------------------------------- counts


def test_metrics_count_what_answers_did(server):
    usage = server.complete().json()["usage"]
    record = server.chat(n=2).json()["safe_llm"][0]
    server.complete(temperature=-1)
    ok = 'safe_llm_requests_total{{endpoint="/v1/{}",outcome="{}"}}'
    assert server.metric(ok.format("completions", "ok")) == 1
    assert server.metric(ok.format("completions", "rejected")) == 1
    assert server.metric(ok.format("chat/completions", "ok")) == 1
    assert server.metric("safe_llm_completion_tokens_total") == 3 * usage["completion_tokens"]
    assert server.metric("safe_llm_ensemble_points_total") == 3 * record["n_points"]
    assert server.metric("safe_llm_accepted_tokens_total") == 3 * record["n_accepted_tokens"]
    for phase in ("tokenize", "prefill", "draft", "verify", "ensemble"):
        assert server.metric(f'safe_llm_phase_seconds_count{{phase="{phase}"}}') == 3
    for name in ("time_to_first_token", "time_per_output_token", "answer"):
        assert server.metric(f"safe_llm_{name}_seconds_count") == 3
    assert (server.metric("safe_llm_answers_running"), server.metric("safe_llm_answers_waiting")) == (0, 0)


def test_apps_count_apart(server):
    server.complete()
    with serving() as other:
        assert other.metric("safe_llm_completion_tokens_total") == 0


def test_websocket_is_refused_and_hurts_nobody(server):
    async def connect():
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b"", "subprotocols": []}
        await server.app(scope, receive, send)
        return sent

    assert asyncio.run(connect())[0]["type"] == "websocket.close"

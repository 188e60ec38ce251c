"""Streams over HTTP: every concatenation is the whole answer, and a client that leaves frees its row."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import httpx
import pytest

from safe_llm.testing import scripted_ensemble
from server_support import ANSWERS, GUARD_S, NAME, QUESTION, RIGHT, Server, chunks_of, hold_rounds, received, until

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NUM_CLIENTS = 64
LEFT = 'safe_llm_requests_total{endpoint="/v1/chat/completions",outcome="disconnected"}'


@pytest.fixture
def server():
    with Server(scripted_ensemble(ANSWERS)) as running:
        yield running


def said(chunks, index=0):
    """What a stream says, joined: the content of one choice of a chat."""
    deltas = [c["delta"] for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


# ---------------------------------------------------------------------- the form


def test_stream_of_a_chat_is_openais_events(server):  # F23
    response = server.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = chunks_of(response)
    assert done == "[DONE]"
    assert said([*chunks, done]) == RIGHT
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(set(c) == {"index", "delta", "logprobs", "finish_reason"} for x in chunks for c in x["choices"])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert ["safe_llm" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_usage_comes_last_where_it_is_wanted(server, kind):
    ask = getattr(server, kind)
    *chunks, last, _ = chunks_of(ask(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == ask().json()["usage"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


def test_stream_of_a_completion_has_the_whole_text_and_the_logprobs_at_the_end(server):
    *chunks, _ = chunks_of(server.complete(stream=True, logprobs=1))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == RIGHT
    assert [choice["logprobs"] is None for choice in choices] == [True] * (len(chunks) - 1) + [False]
    assert choices[-1]["logprobs"] == server.complete(logprobs=1).json()["choices"][0]["logprobs"]


def test_tool_call_is_streamed_whole_with_its_index():
    with Server(scripted_ensemble(lambda _: f"I add.\n{CALL}\n{CALL}")) as server:
        *chunks, _ = chunks_of(server.chat(tools=[TOOL], stream=True))
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert said([*chunks, None]) == "I add."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_thoughts_are_streamed_apart(server):
    *chunks, _ = chunks_of(server.chat("think", stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, hm"
    assert said([*chunks, None]) == "It is 42."


def test_several_answers_share_one_stream_and_are_not_mixed(server):
    *chunks, _ = chunks_of(server.complete([QUESTION, "Say it in Japanese."], n=2, stream=True))
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [RIGHT, RIGHT, ANSWERS["Say it in Japanese."], ANSWERS["Say it in Japanese."]]
    assert sum("safe_llm" in chunk for chunk in chunks) == 4


def test_events_are_ascii_since_some_clients_split_lines_at_more_than_newlines():
    with Server(scripted_ensemble({"?": "a\u2028b\u0085c"})) as server:
        response = server.chat("?", stream=True)
        assert response.content.isascii()
        assert said(chunks_of(response)) == "a\u2028b\u0085c"


def test_what_is_wrong_with_a_request_has_a_status_in_a_stream_too(server):  # F04
    for response in (server.chat(stream=True, temperature=-1), server.chat("secret " * 5000, stream=True)):
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_failure_in_the_middle_is_an_event_of_the_stream(server, monkeypatch):
    permits = hold_rounds(monkeypatch, server.ensemble)
    with server.raw_chat("long", stream=True) as connection:
        permits.release()
        received(connection, b"Incorrect")
        monkeypatch.setattr(server.ensemble.members[1].backend, "_next_logits", lambda ids: 1 / 0)
        permits.release(100)
        rest = received(connection, b"0\r\n\r\n").decode()
    assert '"code": "member_failed"' in rest
    assert "[DONE]" not in rest
    assert server.metric('safe_llm_requests_total{endpoint="/v1/chat/completions",outcome="failed"}') == 1


# ---------------------------------------------------------------------- many at once


def test_concurrent_streams_are_each_their_own_single_run(server):  # F14
    prompts = [f"Client {number}, mark {number * 7919}:" for number in range(NUM_CLIENTS)]
    known = {prompt: f"{prompt} says {number} " * (1 + number % 5) for number, prompt in enumerate(prompts)}
    stops = [["says 1"] if number % 3 == 0 else None for number in range(NUM_CLIENTS)]

    async def ask(client, prompt, stop):
        body = {"model": NAME, "prompt": prompt, "stream": True, "max_tokens": 400, "stop": stop}
        response = await client.post("/v1/completions", json=body)
        return "".join(c["text"] for chunk in chunks_of(response)[:-1] for c in chunk["choices"])

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=GUARD_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client, p, s) for p, s in zip(prompts, stops, strict=True)))

    with Server(scripted_ensemble(known)) as crowded:
        streamed = asyncio.run(all_of_them(crowded.url))
        widest = max(len(feeds) for feeds in crowded.ensemble.members[0].backend.calls)
        until(crowded.is_idle)
        alone = [
            crowded.complete(prompt, max_tokens=400, stop=stop).json()["choices"][0]["text"]
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
    assert streamed == alone
    assert len(set(streamed)) == NUM_CLIENTS
    assert widest > 8, "they shared batches"


# ---------------------------------------------------------------------- clients that leave


def killed(connection: socket.socket) -> None:
    """Close as the kernel does for a process that is killed with data unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("rounds", [0, 2], ids=["before the first round", "in the middle"])
def test_client_that_is_gone_frees_its_row_within_a_round(server, monkeypatch, stream, rounds):  # F15
    permits = hold_rounds(monkeypatch, server.ensemble)
    backend = server.ensemble.members[0].backend
    connection = server.raw_chat("long", stream=stream)
    until(lambda: sum(server.ensemble.occupancy) == 1)
    for _ in range(rounds):
        permits.release()
    until(lambda: permits._value == 0 and server.ensemble.occupancy[0] == 1)
    killed(connection)
    until(lambda: server.metric(LEFT) == 1)
    permits.release()  # the round that was under way
    until(server.is_idle)
    assert len(backend._rows) <= 1, "at most what is kept for a prompt that begins alike"
    permits.release(1000)
    assert server.chat(max_tokens=64).json()["choices"][0]["message"]["content"] == RIGHT


def test_others_go_on_when_a_client_is_gone(server, monkeypatch):
    permits = hold_rounds(monkeypatch, server.ensemble)
    gone = server.raw_chat("long", stream=True)
    texts = []
    staying = threading.Thread(target=lambda: texts.append(said(chunks_of(server.chat("long", stream=True)))))
    staying.start()
    until(lambda: sum(server.ensemble.occupancy) == 2)
    permits.release(2)
    until(lambda: permits._value == 0)
    killed(gone)
    until(lambda: server.metric(LEFT) == 1)
    permits.release(1000)
    staying.join(GUARD_S)
    assert texts == [ANSWERS["long"][: len(texts[0])]]
    assert texts[0].count("Incorrect") > 20
    assert server.is_idle()


def test_several_answers_all_end_with_their_client(server, monkeypatch):
    permits = hold_rounds(monkeypatch, server.ensemble)
    connection = server.raw_chat("long", stream=True, n=5)
    until(lambda: sum(server.ensemble.occupancy) == 5)
    killed(connection)
    until(lambda: server.metric(LEFT) == 1)
    permits.release(10)
    until(server.is_idle)


def test_client_that_leaves_while_it_still_writes_is_no_error(server):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b'{"model"')
    killed(connection)
    line = 'safe_llm_requests_total{endpoint="/v1/completions",outcome="disconnected"}'
    until(lambda: server.metric(line) == 1)

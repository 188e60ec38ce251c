"""Clients that people have: OpenAI's own, LangChain's and LlamaIndex's, unchanged, against a server that runs here."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from safe_llm.testing import scripted_ensemble
from server_support import ANSWERS, GUARD_S, NAME, QUESTION, RIGHT, Server

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

ASKED = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class Sum(BaseModel):
    a: int


def reply(transcript):
    if "Result of add" in transcript:
        return "It is 2."
    if "call" in transcript:
        return '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    return '{"a": 1}' if "json" in transcript else RIGHT


@pytest.fixture(scope="module")
def server():
    with Server(scripted_ensemble(reply)) as running:
        yield running


# ---------------------------------------------------------------------- OpenAI


def test_openai_client_chats_and_completes(server):
    with server.client() as client:
        answer = client.chat.completions.create(model=NAME, messages=ASKED, logprobs=True, top_logprobs=2, n=2)
        assert [choice.message.content for choice in answer.choices] == [RIGHT] * 2
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0
        assert len(answer.safe_llm) == 2
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "The"
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME


def test_openai_client_completes_a_text():
    with Server(scripted_ensemble(ANSWERS)) as server, server.client() as client:
        assert client.completions.create(model=NAME, prompt=QUESTION).choices[0].text == RIGHT
        events = client.completions.create(model=NAME, prompt=QUESTION, stream=True)
        assert "".join(event.choices[0].text for event in events) == RIGHT


def test_openai_client_streams(server):
    options = {"include_usage": True}
    with server.client() as client:
        *chunks, last = client.chat.completions.create(model=NAME, messages=ASKED, stream=True, stream_options=options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == RIGHT
        assert last.usage.completion_tokens > 0
        with client.chat.completions.stream(model=NAME, messages=ASKED) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.content == RIGHT


def test_openai_client_calls_tools_and_brings_results(server):
    messages = [{"role": "user", "content": "call it"}]
    with server.client() as client:
        message = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        messages += [message.model_dump(), result]  # with all its nulls, as people send it
        answer = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL])
        assert answer.choices[0].message.content == "It is 2."


def test_openai_client_parses_structured_output(server):
    messages = [{"role": "user", "content": "json"}]
    with server.client() as client:
        answer = client.chat.completions.parse(model=NAME, messages=messages, response_format=Sum)
        assert answer.choices[0].message.parsed == Sum(a=1)


def test_openai_client_raises_its_own_errors(server):
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=NAME, messages=ASKED, temperature=9)
        assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4o", messages=ASKED)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x " * 9000}])
        assert refused.value.code == "context_length_exceeded"


def test_async_openai_clients_share_the_batch(server):
    async def ask(client):
        stream = await client.chat.completions.create(model=NAME, messages=ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def together():
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client) for _ in range(8)))

    assert asyncio.run(together()) == [RIGHT] * 8


# ---------------------------------------------------------------------- LangChain


def langchain(server, **options):
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=NAME, timeout=GUARD_S, max_retries=0, **options
    )


def test_langchains_client_invokes_and_streams(server):
    model = langchain(server, stream_usage=True)
    message = model.invoke(QUESTION)
    assert (message.content, message.response_metadata["finish_reason"]) == (RIGHT, "stop")
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == RIGHT
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == message.usage_metadata["output_tokens"]


def test_langchains_client_binds_tools_and_schemas(server):
    model = langchain(server)
    (call,) = model.bind_tools([TOOL], tool_choice="add").invoke("call it").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1})
    assert model.with_structured_output(Sum).invoke("json") == Sum(a=1)


def test_langchains_client_is_awaited(server):
    async def ask():
        async with httpx.AsyncClient() as connections:
            return await langchain(server, http_async_client=connections).ainvoke(QUESTION)

    assert asyncio.run(ask()).content == RIGHT


# ---------------------------------------------------------------------- LlamaIndex


def llama_index(server, **options):
    url = f"{server.url}/v1"
    options |= {"is_chat_model": True, "timeout": GUARD_S, "max_retries": 0}
    return OpenAILike(api_base=url, api_key="none", model=NAME, **options)


def test_llama_indexs_client_chats_and_streams(server):
    asked = [ChatMessage(role="user", content=QUESTION)]
    with httpx.Client() as connections:
        llm = llama_index(server, http_client=connections)
        assert llm.complete(QUESTION).text == RIGHT
        assert list(llm.stream_chat(asked))[-1].message.content == RIGHT

    async def ask():
        async with httpx.AsyncClient() as connections:
            return await llama_index(server, async_http_client=connections).achat(asked)

    assert asyncio.run(ask()).message.content == RIGHT


# ---------------------------------------------------------------------- real models


@pytest.mark.demo
def test_demo_models_answer_openais_client():
    from safe_llm import Ensemble

    with (
        Ensemble.from_preset("demo", progress=False) as ensemble,
        Server(ensemble) as server,
        server.client() as client,
    ):
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=NAME, messages=asked, max_tokens=24)
        stream = client.chat.completions.create(model=NAME, messages=asked, max_tokens=24, stream=True)
        assert "Paris" in whole.choices[0].message.content
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert streamed == whole.choices[0].message.content
        assert whole.safe_llm[0]["members"] == ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"]

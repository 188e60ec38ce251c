"""Scripted ensembles for the tests of the LlamaIndex package, and the four methods in all their ways."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from pydantic import Field

from llama_index.llms.safe_llm import SafeLLM
from safe_llm import Ensemble
from safe_llm.testing import scripted_ensemble, scripted_member
from safe_llm.testing.members import conversing
from safe_llm.testing.tokenizers import byte_level, metaspace

QUESTION = "Where is the treasure?"
DRAFTED = "Under the old oak, two steps to the left."
VERIFIED = "Under the new oak, two steps to the left."
LONG = "Count."
NUMBERS = " ".join(map(str, range(400)))


def treasure(answer: str) -> Any:
    """A reply that knows the treasure as `answer` and counts if it is asked to."""

    def reply(conversation: str) -> str:
        if LONG in conversation:
            return NUMBERS
        return answer if QUESTION in conversation else "I do not know."

    return reply


@functools.cache
def safe() -> Ensemble:
    """Two members of different tokenizers and opinions, without templates."""
    return scripted_ensemble(treasure(DRAFTED), treasure(VERIFIED))


def llm(**options: Any) -> SafeLLM:
    """A chat model around `safe()`."""
    return SafeLLM(**{"ensemble": safe(), "is_chat_model": True, **options})


def replying(reply: Any, **options: Any) -> SafeLLM:
    """A chat model whose members answer alike, by a function of the conversation."""
    return SafeLLM(**{"ensemble": scripted_ensemble(reply), "is_chat_model": True, "max_tokens": 1000, **options})


class Template:
    """A chat template that marks every turn, so that a test sees it was used."""

    chat_template = "marking"

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        turns = "".join(f"[{self.mark} {m['role']}] {m['content']}\n" for m in conversation)
        return f"{turns}Assistant:\n"


def templated(reply: Any) -> Ensemble:
    """Two members with a template of their own each."""
    members = [
        scripted_member(
            name, tokenizer, functools.partial(conversing, reply=reply), template=Template(mark), max_context=window
        )
        for name, tokenizer, mark, window in (
            ("drafter", byte_level(), "D", 2000),
            ("verifier", metaspace(), "V", 1000),
        )
    ]
    return Ensemble(members)


def call_text(name: str, /, **arguments: Any) -> str:
    """A tool call as members write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def last_turn(conversation: str) -> str:
    """The text of a transcript's last turn before the assistant's."""
    return re.split(r"^(?:System|User):\n", conversation.removesuffix("\n\nAssistant:\n"), flags=re.MULTILINE)[-1]


@contextmanager
def loop_of_sync_calls() -> Iterator[None]:
    """LlamaIndex's sync methods run async ones on the thread's loop, make it if there is none, and never close it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


async def everyway(model: SafeLLM, question: str, **kwargs: Any) -> dict[str, Any]:
    """The last response of each of the eight ways to ask."""
    messages = user(question)
    return {
        "complete": model.complete(question, **kwargs),
        "stream_complete": list(model.stream_complete(question, **kwargs))[-1],
        "acomplete": await model.acomplete(question, **kwargs),
        "astream_complete": [r async for r in await model.astream_complete(question, **kwargs)][-1],
        "chat": model.chat(messages, **kwargs),
        "stream_chat": list(model.stream_chat(messages, **kwargs))[-1],
        "achat": await model.achat(messages, **kwargs),
        "astream_chat": [r async for r in await model.astream_chat(messages, **kwargs)][-1],
    }


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


class Recorder(BaseEventHandler):
    """Keeps every event."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event)

    def named(self, *names: str) -> list[Any]:
        return [event for event in self.events if event.class_name() in names]


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    handlers = get_dispatcher().event_handlers
    handlers.append(recorder)
    try:
        yield recorder
    finally:
        handlers.remove(recorder)

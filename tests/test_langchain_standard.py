"""LangChain's own standard tests, on the real engine with scripted members."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_safe_llm import ChatSafeLLM
from safe_llm import Ensemble
from safe_llm.testing import scripted_ensemble

JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "To keep an eye on the mouse."}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "magic_function(3)": ("magic_function", {"input": 3}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "Hello!": ("magic_function", {"input": 3}),
    "Pirate greeting": ("greeting_generator", {"answer_style": "pirate"}),
    "What is 3 + 4": ("my_adder_tool", {"a": 3, "b": 4}),
    "weather in San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "你好啊集团": ("unicode_customer", {"customer_name": "你好啊集团", "description": "technology"}),
    "こんにちは株式会社": ("unicode_customer", {"customer_name": "こんにちは株式会社", "description": "a company"}),
}
"""What the last message asks for -> the tool and its arguments."""


def reply(conversation: str) -> str:
    """Answer what the standard tests ask."""
    *_, last = re.split(r"^(?:System|User):\n", conversation.removesuffix("\n\nAssistant:\n"), flags=re.MULTILINE)
    tools = re.findall(r'^\{"name": "(\w+)"', conversation, flags=re.MULTILINE)
    call = next((call for words, call in CALLS.items() if words in last), None)
    if call is not None and call[0] in tools:
        return _call(*call)
    if "joke" in last:
        return _call(tools[0], JOKE) if tools else json.dumps(JOKE)
    return "Hello, nice to meet you."


def _call(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@functools.cache
def ensemble() -> Ensemble:
    return scripted_ensemble(reply)


class Setup:
    """What both classes are told about the model. Images, audio and files are not among it: members read text."""

    chat_model_class = ChatSafeLLM
    chat_model_params = property(lambda self: {"ensemble": ensemble()})
    supports_json_mode = True
    supports_anthropic_inputs = True
    supports_model_override = False  # the ensemble is the object's; a call cannot have another one


class TestUnit(Setup, ChatModelUnitTests):
    # without `api_key` and `max_retries`: a local model has no account, and a second try would change nothing, so
    # both are unknown parameters, which are errors
    standard_chat_model_params = property(lambda self: {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": []})


class TestIntegration(Setup, ChatModelIntegrationTests):
    pass


class TestIntegrationJsonSchema(Setup, ChatModelIntegrationTests):
    structured_output_kwargs = property(lambda self: {"method": "json_schema"})

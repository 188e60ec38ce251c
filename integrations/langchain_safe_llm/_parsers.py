"""Output parsers of answers whose form is enforced: what is not complete was cut off, and nothing may complete it.

LangChain's own parsers complete a truncated JSON value, and return None for a call that is missing.
"""

from __future__ import annotations

import json
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["call_parser", "text_parser"]

_CUT_OFF = "the answer ended before its value was complete; raise max_tokens, or look for a stop string in the value"


def text_parser(schema: dict[str, Any] | type | None) -> BaseOutputParser[Any]:
    """Return what reads an answer that is a JSON value: into the schema if it is a pydantic class, else as it is."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _PydanticText(pydantic_object=schema)
    return _JsonText()


def call_parser(schema: dict[str, Any] | type, name: str) -> BaseOutputParser[Any]:
    """Return what reads the arguments of the one tool call of an answer.

    Args:
        schema: What the tool was made of; a pydantic class gets an instance.
        name: The tool.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return _PydanticCall(tools=[schema], first_tool_only=True)
    return _JsonCall(key_name=name, first_tool_only=True)


class _JsonText(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial:
            return super().parse_result(result, partial=True)
        try:
            return json.loads(result[0].text)
        except ValueError as error:
            raise OutputParserException(_CUT_OFF) from error


class _PydanticText(PydanticOutputParser[Any], _JsonText):
    """`PydanticOutputParser` on top of `_JsonText`."""


class _PydanticCall(PydanticToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _found(super().parse_result(result, partial=partial), partial)


class _JsonCall(JsonOutputKeyToolsParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return _found(super().parse_result(result, partial=partial), partial)


def _found(value: Any, partial: bool) -> Any:
    if value is None and not partial:
        raise OutputParserException(_CUT_OFF)
    return value

"""The one text form of tool calls, which all members of an ensemble write because they write one text together.

    <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call>

Several blocks are parallel calls. `tools_prompt` explains the form to a member, `tool_grammar` enforces it while the
answer is written, `AnswerParser` reads it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_llm.errors import PromptError, UnknownNameError
from safe_llm.json_schema import JSON_LAYOUT, closed
from safe_llm.types import Tool, ToolCall

__all__ = [
    "CALL_BEGIN",
    "CALL_END",
    "Answer",
    "AnswerParser",
    "ContentPart",
    "InvalidToolCall",
    "Part",
    "ReasoningPart",
    "parse_answer",
    "tool_grammar",
    "tools_prompt",
]

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"

_THINK_BEGIN = "<think>"
_THINK_END = "</think>"

# keywords that the grammar library cannot enforce are left to the tool's own validation
_LENIENT = {**JSON_LAYOUT, "lenient": True}

_NAME_FIRST = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_DECODER = json.JSONDecoder()


# ---------------------------------------------------------------------- asking for calls


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Return what the system message says to a member whose template cannot render `tools`."""
    described = "\n".join(json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools)
    example = json.dumps({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}})
    return (
        "These tools are available, one per line; `parameters` is the JSON Schema of a tool's arguments:\n"
        f"{described}\n\n"
        "To use a tool, write its name and its arguments in this form:\n"
        f"{CALL_BEGIN}\n{example}\n{CALL_END}\n"
        "Each use is a block of its own, and nothing but that JSON object stands in it. "
        "The next message will hold the results. If no tool helps, answer without one."
    )


def tool_grammar(
    tools: Sequence[Tool], choice: str, *, parallel: bool, json_schema: Mapping[str, Any] | None = None
) -> str:
    """Return the Lark grammar, in llguidance's dialect, of answers that call `tools`.

    Args:
        tools: At least one.
        choice: `auto`: free text with calls in it; `required`: calls alone; or the name of the one tool to call.
        parallel: Allow several calls; otherwise the answer ends with the first one.
        json_schema: With `auto`, an answer that is no call must be a JSON value of this schema instead of free text.

    Raises:
        UnknownNameError: `choice` is neither a tool nor one of the words above.
    """
    names = [tool.name for tool in tools]
    if choice not in ("auto", "required", *names):
        raise UnknownNameError("tool", choice, names)
    offered = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    if choice == "auto" and json_schema is None:
        rules = _rules_of_text(parallel=parallel)
    else:
        rules = _rules_of_calls(json_schema if choice == "auto" else None, parallel=parallel)
    bodies = [f"call_{number}: {_body(tool)}" for number, tool in enumerate(offered)]
    call = f"call: {' | '.join(f'call_{number}' for number in range(len(offered)))}"
    return "\n".join(["%llguidance {}", *rules, call, *bodies, ""])


def _rules_of_text(*, parallel: bool) -> list[str]:
    # a lazy lexeme ends as soon as it can: no text goes on over CALL_BEGIN
    return [
        "start: (opening call)* TEXT" if parallel else "start: TEXT | opening call",
        f"opening[lazy]: TEXT {json.dumps(CALL_BEGIN)}",
        r"TEXT: /(.|\n)*/",
    ]


def _rules_of_calls(json_schema: Mapping[str, Any] | None, *, parallel: bool) -> list[str]:
    block = f"block: {json.dumps(CALL_BEGIN)} call"
    calls = r'block ("\n" block)*' if parallel else "block"
    if json_schema is None:
        return [f"start: {calls}", block]
    return [f"start: {calls} | value", f"value: {_json_value(json_schema, JSON_LAYOUT)}", block]


def _body(tool: Tool) -> str:
    """What follows CALL_BEGIN in a call of `tool`."""
    begin = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    end = json.dumps("}\n" + CALL_END)
    return f"{begin} {_json_value(tool.parameters, _LENIENT)} {end}"


def _json_value(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**closed(schema), 'x-guidance': {**options, **schema.get('x-guidance', {})}})}"


# ---------------------------------------------------------------------- reading answers


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Some text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Some text of the `<think>` block at the start of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidToolCall:
    """A block that is no call.

    Attributes:
        name: The tool's name, or None where it cannot be read.
        arguments: The arguments as they were written, or all of the block where they cannot be told apart.
        error: What is wrong, without any text of the block.
        id: What a result would refer to.
    """

    name: str | None
    arguments: str
    error: str
    id: str


Part = ContentPart | ReasoningPart | ToolCall | InvalidToolCall
"""What an answer is made of, in the order of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer, taken apart.

    Attributes:
        content: The text around the calls.
        reasoning: The text of the `<think>` block.
        tool_calls: Calls, in order.
        invalid_tool_calls: Blocks that are no calls, in order.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    invalid_tool_calls: tuple[InvalidToolCall, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Answer:
        """Put the parts together that an `AnswerParser` returned."""
        parts = tuple(parts)
        return cls(
            content="".join(part.text for part in parts if isinstance(part, ContentPart)),
            reasoning="".join(part.text for part in parts if isinstance(part, ReasoningPart)),
            tool_calls=tuple(part for part in parts if isinstance(part, ToolCall)),
            invalid_tool_calls=tuple(part for part in parts if isinstance(part, InvalidToolCall)),
        )


def parse_answer(text: str, *, tools: bool) -> Answer:
    """Take a whole answer apart; see `AnswerParser`."""
    parser = AnswerParser(tools)
    return Answer.of([*parser.feed(text), *parser.finish()])


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class AnswerParser:
    """Takes an answer apart while it is written; no text makes it raise.

    A `<think>` block at the start is reasoning, without the white space at its edges and after it. White space next to
    a call is dropped. All other text is passed on unchanged, and held back only while it may be the beginning of a tag
    or white space before one. What a call's arguments quote is no tag. JSON outside the tags is no call.
    """

    def __init__(self, tools: bool, *, make_id: Callable[[], str] = _new_id) -> None:
        """Start an answer.

        Args:
            tools: Whether calls are looked for; otherwise they are content like any text.
            make_id: Makes the id of the next call.
        """
        self._tools = tools
        self._make_id = make_id
        self._held = ""
        self._trims = False  # the white space that comes next is dropped
        self._read: Callable[[bool], list[Part]] = self._read_start

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are certain once `text` follows what was fed before."""
        self._held += text
        return self._parts(final=False)

    def finish(self) -> list[Part]:
        """Return the parts that were held back; the answer ends here."""
        return self._parts(final=True)

    def _parts(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        read = None
        while read != self._read:  # each reader hands over to the next one
            read = self._read
            parts += read(final)
        return parts

    def _read_start(self, final: bool) -> list[Part]:
        text = self._held.lstrip()
        if text.startswith(_THINK_BEGIN):
            self._held = text.removeprefix(_THINK_BEGIN)
            self._trims = True
            self._read = self._read_reasoning
        elif final or not _THINK_BEGIN.startswith(text):
            self._read = self._read_content
        return []

    def _read_reasoning(self, final: bool) -> list[Part]:
        text, ended = self._text_before(_THINK_END, final)
        if ended:
            self._read = self._read_content
        text = text.rstrip() if final else text
        return [ReasoningPart(text)] if text else []

    def _read_content(self, final: bool) -> list[Part]:
        text, ended = self._text_before(CALL_BEGIN if self._tools else None, final)
        if ended:
            self._read = self._read_call
        return [ContentPart(text)] if text else []

    def _read_call(self, final: bool) -> list[Part]:
        end = _end_of_block(self._held, final=final)
        closed = end >= 0
        if not (closed or final):
            return []
        block, self._held = self._held[: end if closed else None], self._held[end + len(CALL_END) :] if closed else ""
        self._read = self._read_content
        return [_parsed_call(block, self._make_id(), closed=closed)]

    def _text_before(self, tag: str | None, final: bool) -> tuple[str, bool]:
        """Take the text that is certain not to belong to `tag`; and whether the tag came after it and was taken."""
        if self._trims:
            self._held = self._held.lstrip()
        text, found, rest = self._held.partition(tag) if tag else (self._held, "", "")
        if found:
            text = text.rstrip()
        elif tag and not final:
            certain = _certain(text, tag)
            text, rest = text[:certain], text[certain:]
        self._held = rest
        self._trims = bool(found) or (self._trims and not text)
        return text, bool(found)


def _certain(text: str, tag: str) -> int:
    """Length of `text` without what may be a beginning of `tag` at its end, and without white space before that."""
    begun = next(size for size in range(len(tag) - 1, -1, -1) if text.endswith(tag[:size]))
    return len(text[: len(text) - begun].rstrip())


def _end_of_block(text: str, *, final: bool) -> int:
    """Where the CALL_END is that closes the block, or -1; one that a string of the block's JSON quotes is none."""
    first = text.find(CALL_END)
    if first < 0:
        return -1
    try:
        return text.find(CALL_END, _decoded(text)[1])
    except json.JSONDecodeError as error:
        in_string = error.msg.startswith("Unterminated string")
        broken = not in_string and text.find(CALL_END, error.pos) >= 0
        return first if broken or final else -1
    except (ValueError, RecursionError):
        return first


def _decoded(text: str) -> tuple[Any, int]:
    """Return the first JSON value of `text`, and where it ends."""
    return _DECODER.raw_decode(text, len(text) - len(text.lstrip()))


def _parsed_call(block: str, call_id: str, *, closed: bool) -> ToolCall | InvalidToolCall:
    value: Any = None
    try:
        value, _ = _decoded(block)
        return _tool_call(value, call_id)
    except PromptError as refusal:
        error = str(refusal.args[0])
    except ValueError:
        error = "a tool call is not valid JSON" if closed else "the answer ended inside a tool call"
    except RecursionError:
        error = "a tool call is nested too deeply"
    return InvalidToolCall(name=_name(value, block), arguments=_raw_arguments(block), error=error, id=call_id)


def _tool_call(value: Any, call_id: str) -> ToolCall:
    if not isinstance(value, dict):
        raise PromptError(f"a tool call must be a JSON object, got {type(value).__name__}")
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall.of({"name": value.get("name") or None, "arguments": arguments, "id": call_id})


def _name(value: Any, block: str) -> str | None:
    name = value.get("name") if isinstance(value, dict) else None
    if match := _NAME_FIRST.match(block):
        name = match[1]
    # not printable: control characters and lone surrogates, with which nobody downstream could do anything
    return name if isinstance(name, str) and name.isprintable() and name else None


def _raw_arguments(block: str) -> str:
    match = _ARGUMENTS.search(block)
    if match is None:
        return block.strip()
    rest = block[match.end() :]
    try:
        return rest[: _decoded(rest)[1]]
    except (ValueError, RecursionError):
        return rest.strip()

"""Tool calls: the grammar against texts it must take and refuse, and the parser against any text in any pieces."""

from __future__ import annotations

import functools
import itertools
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from safe_llm.errors import UnknownNameError
from safe_llm.tool_calling import (
    CALL_BEGIN,
    CALL_END,
    Answer,
    AnswerParser,
    ContentPart,
    InvalidToolCall,
    ReasoningPart,
    parse_answer,
    tool_grammar,
    tools_prompt,
)
from safe_llm.types import Tool, ToolCall

ADD = Tool(
    name="add",
    description='Adds "a" and "b".\nBoth are whole: \\ <tool_call> {}',
    parameters={
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
ADD_ALL = Tool(
    name="add_all",
    parameters={
        "properties": {"of": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
        "required": ["of"],
        "additionalProperties": False,
    },
)
NOW = Tool(name="now", parameters={"properties": {}, "additionalProperties": False})
SAY = Tool(name="say", parameters={"properties": {"text": {"type": "string"}}, "required": ["text"]})
MOVE = Tool(
    name="ns.move:to-2",
    parameters={
        "properties": {"to": {"$ref": "#/$defs/Point"}},
        "required": ["to"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "tag": {"enum": ["a\nb", None]}},
                "required": ["x", "tag"],
            }
        },
    },
)
TOOLS = [ADD, ADD_ALL, NOW, SAY, MOVE]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = block("add", '{"a": 1, "b": -2}')
ALL = block("add_all", '{"of": [1, 1]}')
EMPTY = block("now", "{}")
SAID = block("say", '{"text": "é 🙂 \\"</tool_call>\\" \\n"}')
MOVED = block("ns.move:to-2", '{"to": {"x": 1.5, "tag": "a\\nb"}}')
CALLS = [ONE, ALL, EMPTY, SAID, MOVED]


# ---------------------------------------------------------------------- grammar


class Bytes:
    """A tokenizer of the 256 bytes and an END."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def verdict(grammar: str, text: str) -> str:
    """`whole`: END may follow; `open`: more must follow; or `refused`."""
    assert LLMatcher.validate_grammar(grammar, tokenizer()) == ""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    if not all(matcher.consume_token(byte) for byte in text.encode()):
        return "refused"
    accepting = matcher.is_accepting()
    assert matcher.consume_token(Bytes.eos_token_id) == accepting
    return "whole" if accepting else "open"


TEXTS = [
    "",
    "hi",
    " \n",
    "a < b",
    "<",
    "<tool",
    "<tool_call",
    "<tool>",
    "</tool_call>",
    '{"name": "add"}',
    "é 🙂",
    "<<",
]


@pytest.mark.parametrize("parallel", [True, False])
def test_auto_takes_any_text_and_calls_in_it(parallel):
    grammar = tool_grammar(TOOLS, "auto", parallel=parallel)
    for text in TEXTS:
        assert verdict(grammar, text) == "whole", text
        assert verdict(grammar, f"{text}<tool_call>") == "open", text
        assert verdict(grammar, f"{text}<tool_call>x") == "refused", text
        assert verdict(grammar, text + ONE) == "whole", text
    for call in CALLS:
        assert verdict(grammar, call) == "whole", call


@pytest.mark.parametrize("after", ["\n", " done", "<tool_call>", "\n" + ONE, EMPTY])
def test_auto_goes_on_after_a_call_only_if_calls_may_be_parallel(after):
    whole = "open" if after == CALL_BEGIN else "whole"
    assert verdict(tool_grammar(TOOLS, "auto", parallel=True), SAID + after) == whole
    assert verdict(tool_grammar(TOOLS, "auto", parallel=False), SAID + after) == "refused"


@pytest.mark.parametrize(("choice", "first"), [("auto", len(CALL_BEGIN)), ("required", 0), ("add", 0)])
@pytest.mark.parametrize("parallel", [True, False])
def test_end_is_offered_at_no_place_inside_a_call(choice, first, parallel):
    grammar = tool_grammar(TOOLS, choice, parallel=parallel)
    for size in range(first, len(ONE)):
        assert verdict(grammar, ONE[:size]) == "open", size


@pytest.mark.parametrize("choice", ["required", "add"])
def test_required_takes_calls_alone(choice):
    for parallel in (True, False):
        grammar = tool_grammar(TOOLS, choice, parallel=parallel)
        assert verdict(grammar, "") == "open"
        assert verdict(grammar, ONE) == "whole"
        for text in ["hi", "\n", "{", "<think>", "\n" + ONE, ONE + " ", ONE + "\n\n", ONE + ONE, "<tool_call> "]:
            assert verdict(grammar, text) == "refused", text
    assert verdict(tool_grammar(TOOLS, choice, parallel=True), f"{ONE}\n{ONE}") == "whole"
    assert verdict(tool_grammar(TOOLS, choice, parallel=True), f"{ONE}\n") == "open"
    assert verdict(tool_grammar(TOOLS, choice, parallel=False), f"{ONE}\n") == "refused"


def test_name_allows_that_tool_alone():
    for tool, call in zip(TOOLS, CALLS, strict=True):
        grammar = tool_grammar(TOOLS, tool.name, parallel=True)
        for other in CALLS:
            assert verdict(grammar, other) == ("whole" if other == call else "refused")
    every = tool_grammar(TOOLS, "required", parallel=True)
    assert verdict(every, "\n".join(CALLS)) == "whole"


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown tool 'ad_all' \(did you mean 'add_all'\?\)"):
        tool_grammar(TOOLS, "ad_all", parallel=True)
    with pytest.raises(UnknownNameError, match="unknown tool 'none'"):
        tool_grammar(TOOLS, "none", parallel=True)


@pytest.mark.parametrize(
    "call",
    [
        block("ad", '{"a": 1, "b": 2}'),
        block("add_all", '{"a": 1, "b": 2}'),
        block("add", '{"of": [1]}'),
        block("subtract", "{}"),
        block("add", '{"a": 1}'),
        block("add", '{"a": 1.5, "b": 2}'),
        block("add", '{"a": "1", "b": 2}'),
        block("add", '{"a": 1, "b": 2, "c": 3}'),
        block("add", '{"a":1, "b": 2}'),
        block("add", '{ "a": 1, "b": 2}'),
        block("now", '{"a": 1}'),
        block("now", "null"),
        block("ns.move:to-2", '{"to": {"x": 1, "tag": "b"}}'),
        block("say", '{"text": "\\u00e9"}'),
        block("say", '{"text": "\\ud83d"}'),
        block("say", '{"text": "\n"}'),
        ONE.replace("\n", ""),
        ONE.replace("add", "add "),
        ONE.replace('"arguments"', '"parameters"'),
        ONE.replace("}}", "}, }"),
    ],
)
def test_call_that_does_not_fit_is_refused(call):
    for choice in ("auto", "required"):
        assert verdict(tool_grammar(TOOLS, choice, parallel=True), call) == "refused"


def test_set_is_left_to_the_tool_because_the_grammar_cannot_count():
    assert verdict(tool_grammar([ADD_ALL], "required", parallel=False), ALL) == "whole"
    answer = tool_grammar([NOW], "auto", parallel=False, json_schema=ADD_ALL.parameters)
    assert "uniqueItems" in LLMatcher.validate_grammar(answer, tokenizer())


def test_tool_may_overrule_the_layout_of_its_arguments():
    tool = Tool(name="f", parameters={"properties": {"a": {"const": 1}}, "x-guidance": {"key_separator": ":"}})
    grammar = tool_grammar([tool], "required", parallel=False)
    assert verdict(grammar, block("f", '{"a":1}')) == "whole"
    assert verdict(grammar, block("f", '{"a": 1}')) == "refused"
    assert "x-guidance" in tool.parameters


@pytest.mark.parametrize("parallel", [True, False])
def test_schema_replaces_free_text(parallel):
    grammar = tool_grammar(TOOLS, "auto", parallel=parallel, json_schema=SCHEMA)
    assert verdict(grammar, '{"n": 5}') == "whole"
    assert verdict(grammar, SAID) == "whole"
    assert verdict(grammar, "") == "open"
    for text in ["hi", "{}", '{"n": "5"}', '{"n": 5} ', '{"n": 5}' + ONE, ONE + '{"n": 5}', ' {"n": 5}', '{"n":5}']:
        assert verdict(grammar, text) == "refused", text
    assert verdict(grammar, f"{ONE}\n{EMPTY}") == ("whole" if parallel else "refused")


@pytest.mark.parametrize("choice", ["required", "add"])
def test_schema_says_nothing_where_a_call_is_required(choice):
    for parallel in (True, False):
        plain = tool_grammar(TOOLS, choice, parallel=parallel)
        assert tool_grammar(TOOLS, choice, parallel=parallel, json_schema=SCHEMA) == plain


def test_tokens_may_run_over_the_edges_of_the_grammar():
    class Wide(Bytes):
        tokens = (
            *Bytes.tokens,
            b"hi <tool",
            b'_call>\n{"name',
            b'": "add',
            b'_all", "',
            b'arguments": {"of": [',
            b"]}}\n<",
        )
        tokens = (*tokens, b"/tool_call> <tool_call>", b"<tool_call> ", b"_call>x")

    tokens = LLTokenizer(TokenizerWrapper(Wide()))
    wide = Wide.tokens.index(b"hi <tool")
    matcher = LLMatcher(tokens, tool_grammar(TOOLS, "auto", parallel=True), log_level=0)
    assert all(map(matcher.consume_token, range(wide, wide + 7)))
    assert matcher.consume_token(ord("\n"))
    assert not matcher.consume_token(wide + 7)
    matcher = LLMatcher(tokens, tool_grammar(TOOLS, "auto", parallel=True), log_level=0)
    assert matcher.consume_token(wide)
    assert not matcher.consume_token(wide + 8)


def test_prompt_explains_every_tool_on_a_line_and_the_form():
    tools = [ADD, SAY]
    lines = tools_prompt(tools).split("\n")
    described = [json.loads(line) for line in lines if line.startswith('{"name"') and "parameters" in line]
    assert described == [tool.as_dict()["function"] for tool in tools]
    assert CALL_BEGIN in lines
    assert CALL_END in lines
    assert "é" in tools_prompt([Tool(name="f", description="é")])


def test_form_that_the_prompt_shows_is_the_form_that_the_grammar_takes_and_the_parser_reads():
    text = tools_prompt([SAY])
    shown = text[text.rindex(CALL_BEGIN) : text.rindex(CALL_END)] + CALL_END
    meant = Tool(name="NAME", parameters={"properties": {"ARGUMENT": {"const": "VALUE"}}})
    assert verdict(tool_grammar([meant], "required", parallel=False), shown) == "whole"
    assert calls(shown) == [("NAME", {"ARGUMENT": "VALUE"})]


# ---------------------------------------------------------------------- parser


def calls(text: str) -> list[tuple[str, dict]]:
    return [(call.name, dict(call.arguments)) for call in parse_answer(text, tools=True).tool_calls]


def cut(text: str, sizes: list[int], *, tools: bool) -> list:
    """Parts of `text` fed in pieces of these sizes, over and over."""
    numbers = itertools.count()
    parser = AnswerParser(tools, make_id=lambda: f"id{next(numbers)}")
    parts, done = [], 0
    for size in itertools.cycle(sizes):
        if done >= len(text):
            return parts + parser.finish()
        parts += parser.feed(text[done : done + size])
        done += size
    raise AssertionError


def test_every_call_that_the_grammar_allows_is_read():
    assert calls("\n".join(CALLS)) == [
        ("add", {"a": 1, "b": -2}),
        ("add_all", {"of": [1, 1]}),
        ("now", {}),
        ("say", {"text": 'é 🙂 "</tool_call>" \n'}),
        ("ns.move:to-2", {"to": {"x": 1.5, "tag": "a\nb"}}),
    ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", ""),
        (" \n hi \n ", " \n hi \n "),
        ("a < b <tool_cal", "a < b <tool_cal"),
        ('{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}'),
        ("</tool_call> hi", "</tool_call> hi"),
        (f"  hi  \n{ONE}", "  hi"),
        (f"  \n{ONE}", ""),
        (f"{ONE}\n", ""),
        (f"{ONE}\n bye \n", "bye \n"),
        (f"a\n\n{ONE}\n\n{ONE}\n", "a"),
        (f"a\n{ONE} b \n{ONE}\nc", "abc"),
        (f"<<tool_call{ONE}", "<<tool_call"),
        (f"hi <think>x</think> {ONE}", "hi <think>x</think>"),
    ],
)
def test_content_is_what_stands_around_the_calls(text, content):
    answer = parse_answer(text, tools=True)
    assert (answer.content, answer.reasoning, answer.invalid_tool_calls) == (content, "", ())
    assert len(answer.tool_calls) == text.count(ONE)


@pytest.mark.parametrize("text", ["hi", ONE, f" a {ONE} \n", "<tool_call>", "a <tool"])
def test_without_tools_calls_are_content(text):
    assert parse_answer(text, tools=False) == Answer(content=text, reasoning="", tool_calls=(), invalid_tool_calls=())
    assert cut(f"x{text}", [1], tools=False) == [ContentPart(letter) for letter in f"x{text}"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\n a\n b \n</think>\n\nhi ", "a\n b", "hi "),
        (" \n<think>a</think>hi", "a", "hi"),
        ("<think>\n\n</think>\n\nhi", "", "hi"),
        ("<think></think> \n", "", ""),
        ("<think> a \n", "a", ""),
        ("<think> a </thin", "a </thin", ""),
        ("<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
        (" <thin", "", " <thin"),
        (" <thinking>", "", " <thinking>"),
        ("a<think>b</think>", "", "a<think>b</think>"),
        ("a</think>b", "", "a</think>b"),
    ],
)
@pytest.mark.parametrize("tools", [True, False])
def test_thoughts_at_the_start_are_reasoning(text, reasoning, content, tools):
    answer = parse_answer(text, tools=tools)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_call_inside_thoughts_is_a_thought():
    answer = parse_answer(f"<think>maybe {ONE}</think>\n{EMPTY}", tools=True)
    assert answer.reasoning == f"maybe {ONE}"
    assert [call.name for call in answer.tool_calls] == ["now"]


@pytest.mark.parametrize(
    ("inside", "name", "arguments"),
    [
        ('{"name": "f"}', "f", {}),
        ('{"name": "f", "arguments": null}', "f", {}),
        ('{"arguments": {"a": 1}, "name": "f"}', "f", {"a": 1}),
        ('{"name": "f", "parameters": {"a": 1}}', "f", {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 1}}', "f", {"a": 1}),
        (r'{"name": "f", "arguments": "{\"a\": [\"é\"]}"}', "f", {"a": ["é"]}),
        ('\n\n {"name":"f","arguments":{"a":1}} \n', "f", {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1}}}', "f", {"a": 1}),
        ('{"name": "f", "arguments": {"a": 1}} it is 5" long', "f", {"a": 1}),
        ('{"name": "f", "id": 7, "type": "function"}', "f", {}),
        (r'{"name": "f", "arguments": {"a": "\ud83d\ude42"}}', "f", {"a": "🙂"}),
        (
            '{"name": "f", "arguments": {"a": "</tool_call>", "b": "<tool_call>"}}',
            "f",
            {"a": CALL_END, "b": CALL_BEGIN},
        ),
    ],
)
def test_call_may_be_written_in_other_ways(inside, name, arguments):
    assert calls(f"<tool_call>{inside}</tool_call>") == [(name, arguments)]
    assert calls(f"<tool_call>{inside}") == [(name, arguments)]  # cut off after the JSON


@pytest.mark.parametrize(
    ("inside", "name", "arguments", "error"),
    [
        ("", None, "", "not valid JSON"),
        (" hi ", None, "hi", "not valid JSON"),
        ("[1]", None, "[1]", "must be a JSON object, got list"),
        ('"f"', None, '"f"', "must be a JSON object, got str"),
        ('{"arguments": {"name": "x"}}', None, '{"name": "x"}', "needs a 'name'"),
        ('{"name": "", "arguments": {}}', None, "{}", "needs a 'name'"),
        ('{"name": 5, "arguments": {}}', None, "{}", "name of a tool call must be str, got int"),
        (r'{"name": "\ud83d", "arguments": {}}', None, "{}", "name of a tool call has a lone surrogate"),
        ('{"name": "f", "arguments": [1]}', "f", "[1]", "must be a mapping, got list"),
        ('{"name": "f", "arguments": 5}', "f", "5", "must be a mapping, got int"),
        (r'{"name": "f", "arguments": "{\"a\""}', "f", r'"{\"a\""', "arguments of a tool call are not valid JSON"),
        (r'{"name": "f", "arguments": {"a": "\ud83d"}}', "f", r'{"a": "\ud83d"}', "lone surrogate"),
        ('{"name": "f", "arguments": {"a": NaN}}', "f", '{"a": NaN}', "is not a JSON value: nan"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", '{"a": 1e999}', "is not a JSON value: inf"),
        ('{"name": "f", "arguments": {"a": 1,}}', "f", '{"a": 1,}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": "b}}', "f", '{"a": "b}}', "not valid JSON"),
        ('{"name": "f", "parameters": {"a": \n', "f", '{"a":', "not valid JSON"),
        ("{'name': 'f'}", None, "{'name': 'f'}", "not valid JSON"),
    ],
)
def test_block_that_is_no_call_is_reported_as_one(inside, name, arguments, error):
    answer = parse_answer(f"a <tool_call>{inside}</tool_call> b", tools=True)
    assert (answer.content, answer.tool_calls) == ("ab", ())
    (invalid,) = answer.invalid_tool_calls
    assert (invalid.name, invalid.arguments) == (name, arguments)
    assert error in invalid.error
    assert invalid.id.startswith("call_")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("<tool_call>", None, ""),
        ('<tool_call>\n{"name": "f', None, '{"name": "f'),
        ('<tool_call>\n{"name": "f", "argu', "f", '{"name": "f", "argu'),
        ('<tool_call>\n{"name": "f", "arguments": {"a": [1, 2', "f", '{"a": [1, 2'),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "f", '{"a": 1}'),
    ],
)
def test_block_that_is_cut_off_is_no_call(text, name, arguments):
    (invalid,) = parse_answer(text, tools=True).invalid_tool_calls
    assert (invalid.name, invalid.arguments) == (name, arguments)
    assert invalid.error == "the answer ended inside a tool call"


def test_quote_that_never_ends_does_not_swallow_the_next_call():
    broken = '<tool_call>{"name": "f", "arguments": {"a": "b}}'
    for text in (f"{broken}\n{CALL_END}\n{EMPTY} bye", f"{broken}{CALL_END} {EMPTY} bye"):
        answer = parse_answer(text, tools=True)
        assert [invalid.name for invalid in answer.invalid_tool_calls] == ["f"]
        assert [call.name for call in answer.tool_calls] == ["now"]
        assert answer.content == "bye"


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, "[" * 400 + "]" * 400])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_no_error(deep, closed):
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}' + CALL_END * closed
    answer = parse_answer(text, tools=True)
    assert len(answer.tool_calls) + len(answer.invalid_tool_calls) == 1
    if len(deep) > 1000:
        (invalid,) = answer.invalid_tool_calls
        assert (invalid.name, invalid.error) == ("f", "a tool call is nested too deeply")
    parse_answer(f"<tool_call>{deep}" + CALL_END * closed, tools=True)
    parse_answer(json.dumps({"name": "f", "arguments": deep}).join([CALL_BEGIN, CALL_END]), tools=True)


def test_endless_digits_are_no_error():
    (invalid,) = parse_answer(
        f'<tool_call>{{"name": "f", "arguments": {"9" * 5000}}}</tool_call>', tools=True
    ).invalid_tool_calls
    assert invalid.error == "a tool call is not valid JSON"


def test_ids_are_unique_and_of_the_usual_form():
    answer = parse_answer("\n".join([EMPTY, "<tool_call></tool_call>"] * 50), tools=True)
    ids = {call.id for call in (*answer.tool_calls, *answer.invalid_tool_calls)}
    assert len(ids) == 100
    assert all(len(name) == 29 and name.startswith("call_") and int(name[5:], 16) >= 0 for name in ids)


def test_text_is_passed_on_as_soon_as_it_is_certain():
    parser = AnswerParser(True, make_id=lambda: "id")
    steps = [
        (" ", []),
        ("<thi", []),
        ("nk>\n", []),
        ("I", [ReasoningPart("I")]),
        (" see", [ReasoningPart(" see")]),
        (". \n</", [ReasoningPart(".")]),
        ("b></think", [ReasoningPart(" \n</b>")]),
        (">", []),
        ("\n", []),
        ("a", [ContentPart("a")]),
        (" ", []),
        ("<", []),
        ("b", [ContentPart(" <b")]),
        (" \n<tool", []),
        ('_call>{"name": "f"', []),
        ("}</tool_call", []),
        (">", [ToolCall(name="f", arguments={}, id="id")]),
        ("<tool_call>{'x", []),
        ("'}</tool_call>", [
            InvalidToolCall(name=None, arguments="{'x'}", error="a tool call is not valid JSON", id="id"),
        ]),
        ("\n", []),
        ("<tool_call>5</tool_call>c \n", [
            InvalidToolCall(name=None, arguments="5", error="a tool call must be a JSON object, got int", id="id"),
            ContentPart("c"),
        ]),
    ]  # fmt: skip
    for text, parts in steps:
        assert parser.feed(text) == parts, text
    assert parser.finish() == [ContentPart(" \n")]


PIECES = st.sampled_from(
    [
        *[
            "<think>",
            "</think>",
            CALL_BEGIN,
            CALL_END,
            "<",
            "<to",
            " ",
            "\n",
            "a",
            "é🙂",
            '"',
            "\\",
            "{",
            "}",
            "[",
            ",",
        ],
        *[ONE, EMPTY, SAID, '{"name": "f", "arguments": ', '"a": ', '"b', "\\u12", r"\ud83d", "nul", "1e", "-"],
    ]
)
ANSWERS = st.lists(PIECES | st.text(max_size=5), max_size=14).map("".join)


@settings(max_examples=1000, deadline=None)
@given(ANSWERS, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
@example(f'<tool_call>{{"name": "f", "a": "{CALL_END}', [1], True)
@example(f'<tool_call>{{"name": "{CALL_END}", "a": nul{CALL_END}null{CALL_END}', [1], True)
@example(f"<think> \n</think> \n{ONE} \n", [1], True)
def test_answer_is_the_same_in_any_pieces(text, sizes, tools):
    parts = cut(text, sizes, tools=tools)
    whole = cut(text, [len(text) + 1], tools=tools)
    assert Answer.of(parts) == Answer.of(whole)
    assert [part for part in parts if isinstance(part, (ToolCall, InvalidToolCall))] == [
        part for part in whole if isinstance(part, (ToolCall, InvalidToolCall))
    ]
    assert all(part.text for part in parts if isinstance(part, (ContentPart, ReasoningPart)))


@settings(max_examples=500, deadline=None)
@given(ANSWERS)
def test_text_without_tags_is_never_changed(text):
    plain = text.replace("<", "<|")
    assert parse_answer(plain, tools=True) == parse_answer(plain, tools=False)
    assert parse_answer(plain, tools=True).content == plain


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3), st.booleans()
)
def test_what_is_written_is_read_back(written, ascii_only):
    text = "\n".join(
        f"{CALL_BEGIN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=ascii_only)}\n{CALL_END}"
        for name, arguments in written
    )
    assert calls(text) == written


def test_string_full_of_tags_takes_no_time_that_grows_with_its_cube():
    text = f'{CALL_BEGIN}"' + f'\\"{CALL_END}{CALL_BEGIN}' * 1000
    started = time.perf_counter()
    parts = cut(text, [4], tools=True)
    assert time.perf_counter() - started < 20
    assert len(parts) == 1001  # the last one is cut off

"""Constrained decoding: masks against brute force, the engine against the slow reference, and what users get."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from helpers import QUESTION, ensemble, tiny_member
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import result_as_dict
from safe_llm.errors import ConfigError, GenerationError, GenerationTimeoutError, PromptError, UnknownNameError
from safe_llm.events import RoundFinished
from safe_llm.grammar import Grammar, GrammarTokenizer, checked_grammar, json_grammar, regex_grammar
from safe_llm.testing import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace, unigram, wordpiece
from safe_llm.tool_calling import parse_answer
from safe_llm.vocabulary import Vocabulary

TOKENIZERS = {
    "byte-level": (byte_level, "<|im_end|>"),
    "sentencepiece": (metaspace, "</s>"),
    "unigram": (unigram, "</s>"),
    "characters": (lambda: characters([]), "<|im_end|>"),
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def vocabulary_of(kind):
    make, end = TOKENIZERS[kind]
    tokenizer = make()
    return Vocabulary(tokenizer, end_ids=[i for i in [tokenizer.token_to_id(end)] if i is not None])


def finite(choices):
    """The grammar of a finite language."""
    return regex_grammar("|".join(re.escape(choice) for choice in choices))


# ---------------------------------------------------------------------- masks


LANGUAGES = st.lists(st.text('ab é日\n{"', min_size=1, max_size=6), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(choices=LANGUAGES, kind=st.sampled_from(sorted(TOKENIZERS)), data=st.data())
def test_mask_is_what_the_language_allows(choices, kind, data):
    vocabulary = vocabulary_of(kind)
    words = [choice.encode() for choice in choices]
    text = data.draw(st.sampled_from(words))
    text = text[: data.draw(st.integers(0, len(text)))]
    state = Grammar(GrammarTokenizer(vocabulary), finite(choices))
    state.advance(text)
    rests = [word[len(text) :] for word in words if word.startswith(text)]
    right = [bool(token) and any(rest.startswith(token) for rest in rests) for token in vocabulary.tokens]
    if vocabulary.symbols.end_id is not None:
        right[vocabulary.symbols.end_id] = b"" in rests
    allowed, forced = state.allowed(), state.forced()
    assert not (allowed & ~np.array(right)).any(), "it allows what breaks the language"
    common = next(
        rests[0][:n] for n in range(len(rests[0]), -1, -1) if all(rest.startswith(rests[0][:n]) for rest in rests)
    )
    assert forced == (b"" if b"" in rests else common)
    if not forced:
        assert (allowed == np.array(right)).all()


@settings(max_examples=60, deadline=None)
@given(choices=LANGUAGES, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_state_depends_on_the_bytes_and_not_on_the_way(choices, cuts):
    tokenizer = GrammarTokenizer(vocabulary_of("byte-level"))
    text = choices[0].encode()
    straight, winding = (Grammar(tokenizer, finite(choices)) for _ in range(2))
    straight.advance(text)
    at = 0
    for cut in [*(c for c in cuts if c <= len(text)), len(text)]:  # to and fro
        winding.advance(text[at:cut]) if cut >= at else winding.rollback(at - cut)
        at = cut
    assert (straight.allowed() == winding.allowed()).all()
    assert straight.forced() == winding.forced()


def test_bytes_that_break_the_grammar_are_an_error_without_their_text():
    state = Grammar(GrammarTokenizer(vocabulary_of("byte-level")), finite(["yes", "no"]))
    with pytest.raises(GenerationError) as caught:
        state.advance(b"secret")
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------- the engine


GRAMMARS = {
    "choice": finite(["In 12 days", "In 1850 Leo", "apples", "Leo has 7"]),
    "json": json_grammar(PERSON),
    "words": regex_grammar("([a-z]{1,5} ){3}[0-9]+"),
}


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize(
    "pair", [(byte_level, metaspace), (metaspace, byte_level), (byte_level, unigram), (byte_level, wordpiece)]
)
def test_engine_agrees_with_the_slow_reference(pair, grammar):
    members = [tiny_member(str(i), make(), seed=i + 7) for i, make in enumerate(pair)]
    expected = reference.generate(members, QUESTION, EnsembleConfig(lookahead=5), 40, GRAMMARS[grammar])
    events = list(ensemble(*members).stream(QUESTION, events=True, max_tokens=40, **keywords(grammar)))
    decisions = [
        (d.position, d.token, str(d.outcome)) for e in events if isinstance(e, RoundFinished) for d in e.decisions
    ]
    assert events[-1].result.text == expected.text.decode("utf-8", errors="replace")
    assert decisions == expected.decisions


def keywords(grammar):
    return {
        "choice": {"regex": "|".join(map(re.escape, ["In 12 days", "In 1850 Leo", "apples", "Leo has 7"]))},
        "json": {"json_schema": PERSON},
        "words": {"regex": "([a-z]{1,5} ){3}[0-9]+"},
    }[grammar]


@pytest.mark.parametrize("mode", ["safe", "every-token", "drafter"])
@pytest.mark.parametrize("method", ["unite", "gac", "prefix-mass"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_whatever_random_members_want_the_answer_has_the_form(mode, method, temperature):
    members = [tiny_member(str(i), make(), seed=i) for i, make in enumerate((byte_level, metaspace))]
    safe = ensemble(*members, mode=mode, method=method)
    for seed in range(3):
        result = safe.generate(
            QUESTION, regex="(yes|no|perhaps), [0-9]{2}[a-f]{3}!", temperature=temperature, seed=seed, max_tokens=64
        )
        assert re.fullmatch("(yes|no|perhaps), [0-9]{2}[a-f]{3}!", result.text)
        assert result.finish_detail == "end"


def test_rows_of_a_batch_follow_their_own_grammars():
    members = [tiny_member(str(i), make(), seed=i) for i, make in enumerate((byte_level, metaspace))]
    safe = ensemble(*members)
    alone = [safe.generate(QUESTION, max_tokens=24, **form).text for form in (keywords("json"), {}, keywords("words"))]
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        futures = [
            pool.submit(safe.generate, QUESTION, max_tokens=24, **form)
            for form in (keywords("json"), {}, keywords("words"))
        ]
        assert [future.result().text for future in futures] == alone


def test_log_probabilities_name_what_the_grammar_leaves():
    result = scripted_ensemble({"q": "fine"}).generate("q", regex="ab?", logprobs=5)
    assert [token for token, _ in result.logprobs[0].top] == [b"a"]
    assert all(np.isfinite(value) for t in result.logprobs for _, value in t.top)
    json.loads(json.dumps(result_as_dict(result), allow_nan=False))


def test_forced_text_costs_no_verifier_pass():
    safe = scripted_ensemble({"q": "anything"})
    result = safe.generate("q", regex="only this is possible")
    assert result.text == "only this is possible"
    assert result.counters.outcomes == {"forced": result.counters.num_tokens}
    assert result.counters.num_forwards["verifier"] <= 1  # the prompt


def test_members_still_decide_where_the_grammar_leaves_a_choice():
    safe = scripted_ensemble({"q": "yes"}, {"q": "no"}, weights=(1, 3))
    assert safe.generate("q", regex="yes|no").text == "no"
    assert safe.generate("q", regex="yes|na").text != "no"


# ---------------------------------------------------------------------- what users get


def test_json_schema_is_enforced_on_a_model_that_wants_to_chat():
    safe = scripted_ensemble({"q": 'Sure! Here is your JSON: {"name": "Leo", "age": 7}'})
    result = safe.generate("q", json_schema=PERSON | {"properties": {"age": {"enum": [7, 8]}}, "required": ["age"]})
    assert json.loads(result.text)["age"] in (7, 8)


def test_properties_that_a_schema_does_not_name_are_not_written():
    members = [tiny_member(str(i), make(), seed=i) for i, make in enumerate((byte_level, metaspace))]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text = ensemble(*members).generate(QUESTION, json_schema=schema, max_tokens=64).text
    assert set(json.loads(text)) == {"a"}


def test_forced_tool_call_is_a_call():
    safe = scripted_ensemble({"q": "I would rather talk."})
    tools = [
        {"name": "add", "parameters": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
        {"name": "add_all", "parameters": {}},
    ]
    result = safe.generate(
        [{"role": "user", "content": "q"}], tools=tools, tool_choice="add", parallel_tool_calls=False
    )
    (call,) = parse_answer(result.text, tools=True).tool_calls
    assert call.name == "add"
    assert call.arguments["a"] in (1, 2)


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        (
            {"json_schema": {"type": "array", "uniqueItems": True}},
            ConfigError,
            "JSON schema cannot be enforced.*uniqueItems",
        ),
        ({"json_schema": "{}"}, ConfigError, "json_schema must be a mapping, got str"),
        ({"regex": "("}, ConfigError, "regular expression cannot be enforced"),
        ({"regex": 3}, ConfigError, "regex must be str, got int"),
        ({"grammar": "start: nothing"}, ConfigError, "grammar cannot be enforced"),
        ({"json_schema": {}, "regex": "a"}, ConfigError, "json_schema and regex"),
        ({"regex": "a", "tools": [{"name": "f"}]}, ConfigError, "tools and regex"),
        ({"regex": "a", "min_tokens": 2}, ConfigError, "min_tokens"),
        ({"json_scheme": {}}, UnknownNameError, "json_schema"),
        ({"tools": {"name": "f"}}, ConfigError, "tools must be a list, got dict"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, ConfigError, "two tools"),
        ({"tools": [{"name": "find"}], "tool_choice": "fond"}, UnknownNameError, "did you mean 'find'"),
        ({"tool_choice": "required"}, ConfigError, "without tools"),
        (
            {"tools": [{"name": "f"}], "tool_choice": 3},
            ConfigError,
            "tool_choice must be a str, a bool or a mapping, got int",
        ),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "function"}}, ConfigError, "names no tool"),
        ({"response_format": {"type": "json"}}, ConfigError, "response_format is not of a known form"),
        ({"timeout": 0}, ConfigError, "timeout must be a number of seconds above 0, got 0"),
    ],
    ids=str,
)
def test_bad_forms_are_one_clear_error_and_the_next_request_works(form, error, message):
    safe = scripted_ensemble({"q": "fine"})
    with pytest.raises(error, match=message):
        safe.generate([{"role": "user", "content": "q"}], **form)
    assert safe.generate("q").text == "fine"


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("any", True),
        (True, True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ({"name": "f"}, True),
        (None, False),
        (False, False),
        ("auto", False),
        ("none", False),
    ],
    ids=str,
)
def test_tool_choice_in_any_form_that_users_write(choice, called):
    safe = scripted_ensemble({"q": "I would rather talk."}, max_batch_size=1)
    text = safe.generate([{"role": "user", "content": "q"}], tools=[{"name": "f"}], tool_choice=choice).text
    assert bool(parse_answer(text, tools=True).tool_calls) == called


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "text"}, "fine"),
        ({"type": "json_object"}, r"\{.*"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}, "7"),
    ],
)
def test_openais_response_format(form, pattern):
    safe = scripted_ensemble({"q": "fine"})
    assert re.fullmatch(pattern, safe.generate("q", response_format=form, max_tokens=8).text, re.DOTALL)


def test_other_libraries_names_of_parameters_are_known():
    result = scripted_ensemble({"q": "one two three four"}).generate("q", max_new_tokens=6, stop_sequences=["two"])
    assert result.text == "one "
    assert scripted_ensemble({"q": "one two three four"}).generate("q", max_new_tokens=2).finish_reason == "length"


def test_answer_is_given_up_after_its_timeout():
    safe = scripted_ensemble({"q": "one two three " * 100})
    forward = safe.members[0].backend.forward

    def slow(feeds):
        time.sleep(0.01)
        return forward(feeds)

    safe.members[0].backend.forward = slow
    with pytest.raises(GenerationTimeoutError, match=r"no answer within 0\.05 s"):
        safe.generate("q", max_tokens=2000, timeout=0.05)
    with pytest.raises(TimeoutError):
        list(safe.stream("q", max_tokens=2000, timeout=0.05))
    assert safe._scheduler.num_requests == 0
    assert safe.generate("q", max_tokens=3, timeout=60).usage.completion_tokens == 3


def test_tools_with_a_plain_text_are_refused():
    with pytest.raises(PromptError, match="plain text"):
        scripted_ensemble({"q": "fine"}).generate("q", tools=[{"name": "f"}])


def test_drafter_that_cannot_write_what_is_demanded_fails_its_row_only():
    member = scripted_member("drafter", wordpiece(), {"q": "fine"}, end_tokens=("[SEP]", "<|im_end|>", "</s>"))
    safe = ensemble(member)
    with pytest.raises(GenerationError, match="no token for what the grammar demands"):
        safe.generate("q", regex="日本")
    assert safe.generate("q", regex="a|b").text in ("a", "b")


def test_drafter_without_an_end_is_refused():
    safe = ensemble(scripted_member("drafter", wordpiece(), {"q": "fine"}, end_tokens=()))
    with pytest.raises(ConfigError, match="no end token"):
        safe.generate("q", regex="a")


def test_checked_grammar_returns_what_it_was_given():
    grammar = json_grammar({"type": "null"})
    assert checked_grammar(grammar, "it") == grammar

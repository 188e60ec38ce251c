"""Traces: everything that happened is in the file, nothing else is, and what is wrong with a file is said exactly."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_support import QUESTION, STORY, storyteller, storytellers, synthetic, traced
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.errors import Cancelled, ConfigError, MemberError, PromptError, TraceError
from safe_llm.events import EnsemblePoint, GenerationFinished, Outcome, RoundFinished
from safe_llm.testing.members import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, wordpiece
from safe_llm.trace import SCHEMA_VERSION, TraceWriter, merge_traces, read_trace, write_trace
from safe_llm.types import Message

SECRET = "Leo has apples and a secret"


@pytest.fixture(scope="module")
def ensemble() -> Ensemble:
    return storytellers()


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


# ---------------------------------------------------------------------- writing and reading back


def test_what_is_read_is_what_happened(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        events = list(writer.stream(QUESTION, max_tokens=120, logprobs=2))
    [request] = read_trace(path).requests
    assert list(request.events) == [e for e in events if isinstance(e, (RoundFinished, EnsemblePoint))]
    assert [request.result] == [e.result for e in events if isinstance(e, GenerationFinished)]
    assert request.generated.decode() == request.result.text
    assert request.points == request.result.points
    assert {d.outcome for r in request.rounds for d in r.decisions} >= {
        Outcome.C1,
        Outcome.C2,
        Outcome.REPLACED,
        Outcome.OOV_LIKE,
        Outcome.UNREPRESENTABLE,
    }


def test_a_trace_changes_nothing_about_the_answer(ensemble, tmp_path):
    with TraceWriter(tmp_path / "t.jsonl", ensemble) as writer:
        recorded = writer.generate(QUESTION, max_tokens=60)
    plain = ensemble.generate(QUESTION, max_tokens=60)
    assert (recorded.text, recorded.points, recorded.counters) == (plain.text, plain.points, plain.counters)


def test_header_says_who_answered_and_how(ensemble, tmp_path):
    header = traced(tmp_path / "t.jsonl", ensemble, max_tokens=4).header
    assert [(m.name, m.fingerprint, m.vocabulary) for m in header.members] == [
        (m.name, m.fingerprint, m.vocabulary.kind) for m in ensemble.members
    ]
    assert sum(m.weight for m in header.members) == pytest.approx(1.0)
    assert header.config == ensemble.config.model_dump(mode="json")
    assert header.fingerprint == ensemble.fingerprint
    assert set(header.versions) == {"safe_llm", "python", "torch", "transformers", "tokenizers"}
    assert header.method.startswith("UniTE(")
    assert header.created.endswith("+00:00")


def test_every_line_has_a_type_and_the_first_is_the_header(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    traced(path, ensemble, max_tokens=40)
    first, *rest = lines_of(path)
    assert (first["type"], first["format"], first["schema_version"]) == ("header", "safe-llm trace", SCHEMA_VERSION)
    kinds = [line["type"] for line in rest]
    assert (kinds[0], kinds[-1]) == ("request", "result")
    assert set(kinds) == {"request", "round", "point", "result"}
    assert {line["request"] for line in rest} == {0}


def test_lines_are_there_as_soon_as_their_event_is(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        seen = 0
        for event in writer.stream(QUESTION, max_tokens=30):
            seen += isinstance(event, (RoundFinished, EnsemblePoint))
            trace = read_trace(path)
            assert len(trace.requests[0].events) == seen
            assert trace.is_complete == isinstance(event, GenerationFinished)


def test_sampling_parameters_and_the_seed_are_those_that_held(tmp_path):
    path = tmp_path / "t.jsonl"
    ensemble = storytellers()
    ensemble.sampling["top_p"] = 0.9
    [request] = traced(path, ensemble, max_tokens=9, temperature=0.5, seed=7, stop="Mia").requests
    assert request.sampling == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["Mia"],
        "min_tokens": 0,
        "logprobs": None,
    }
    assert request.result.seed == 7


def test_tokenizations_are_those_of_each_member(ensemble, tmp_path):
    [request] = traced(tmp_path / "t.jsonl", ensemble).requests
    assert set(request.tokenizations) == {m.name for m in ensemble.members}
    for member in ensemble.members:
        ends = member.vocabulary.encode(request.generated).ends
        assert [-1 if end is None else end for end in request.tokenizations[member.name]] == ends


def test_a_member_that_cannot_spell_the_text_has_tokens_without_an_end(tmp_path):
    drafter = scripted_member("drafter", byte_level(), storyteller(STORY, "drafter"))
    verifier = scripted_member("verifier", wordpiece(), storyteller(STORY, "verifier"))
    [request] = traced(tmp_path / "t.jsonl", Ensemble([drafter, verifier]), max_tokens=40).requests
    assert None in request.tokenizations["verifier"]


def test_bytes_that_are_no_text_survive(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = synthetic("\udcff\udcfe")
    write_trace(trace, path)
    assert '"hex":"fffe"' in path.read_text()
    assert read_trace(path).requests[0].rounds[0].decisions[0].token == b"\xff\xfe"


def test_a_stop_string_leaves_the_points_behind_it_in_the_trace_only(ensemble, tmp_path):
    first = ensemble.generate(QUESTION).points[0]
    stop = ensemble.generate(QUESTION).text[first.byte_offset - 1 : first.byte_offset + len(first.chosen)]
    [request] = traced(tmp_path / "t.jsonl", ensemble, stop=stop).requests
    assert (request.result.finish_detail, request.result.points) == ("stop_string", ())
    assert request.points == (first,)


def test_a_grammar_that_leaves_alternatives_no_probability_is_recorded(tmp_path):
    ensemble = scripted_ensemble({QUESTION: "yes"})
    [request] = traced(tmp_path / "t.jsonl", ensemble, regex="yes", logprobs=5).requests
    assert request.constrained
    assert request.result.text == "yes"
    assert Outcome.FORCED in {d.outcome for r in request.rounds for d in r.decisions}


def test_several_requests_of_several_threads_share_a_file(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        results = [None] * 4

        def ask(i: int) -> None:
            results[i] = writer.generate(QUESTION, max_tokens=20 + i)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read_trace(path)
    assert trace.is_complete
    assert sorted(r.result.text for r in trace.requests) == sorted(r.text for r in results)
    assert [{event.index for event in r.events} for r in trace.requests] == [{0}, {1}, {2}, {3}]


def test_writing_to_an_open_file_leaves_it_open(ensemble, tmp_path):
    with open(tmp_path / "t.jsonl", "w") as file:
        with TraceWriter(file, ensemble) as writer:
            writer.generate(QUESTION, max_tokens=3)
        assert not file.closed


@pytest.mark.parametrize("path", ["", "missing/t.jsonl", "/dev/full"])
def test_a_file_that_cannot_be_written_is_named(ensemble, tmp_path, path):
    with pytest.raises(TraceError, match="cannot write the trace") as caught:
        TraceWriter(tmp_path / path, ensemble)
    assert str(tmp_path / path) in str(caught.value)


# ---------------------------------------------------------------------- the prompt


def test_the_prompt_is_measured_but_not_written(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        result = writer.generate(SECRET, max_tokens=3)
    [request] = read_trace(path).requests
    assert "secret" not in path.read_text()
    assert request.prompt.content is None
    assert request.prompt.num_tokens == result.usage.prompt_tokens
    assert request.prompt.sha256 == hashlib.sha256(SECRET.encode()).hexdigest()


def test_the_prompt_is_written_where_asked_for(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, Message(role="user", content=SECRET, name="Leo")]
    with TraceWriter(path, ensemble, include_prompt=True) as writer:
        writer.generate(SECRET, max_tokens=3)
        writer.generate(messages, max_tokens=3)
    text, conversation = read_trace(path).requests
    assert (text.prompt.kind, text.prompt.content) == ("text", SECRET)
    assert conversation.prompt.kind == "conversation"
    assert conversation.prompt.content == (Message(role="system", content="Be brief."), messages[1])
    plain = [messages[0], {"role": "user", "content": SECRET, "name": "Leo"}]
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert conversation.prompt.sha256 == hashlib.sha256(canonical.encode()).hexdigest()


# ---------------------------------------------------------------------- requests that do not end well


def broken(error: Exception) -> Ensemble:
    def script(vocabulary):
        healthy = storyteller(STORY, "broken")(vocabulary)
        calls = itertools.count()

        def next_logits(ids):
            if next(calls) > 8:
                raise error
            return healthy(ids)

        return next_logits

    return Ensemble([scripted_member("broken", byte_level(), script)])


def test_a_request_that_fails_says_why(tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, broken(RuntimeError(SECRET))) as writer, pytest.raises(MemberError):
        writer.generate(QUESTION)
    trace = read_trace(path)
    [request] = trace.requests
    assert trace.is_complete
    assert request.result is None
    assert request.error.startswith("MemberError: member 'broken'")
    assert request.rounds
    assert "secret" not in path.read_text()


def test_a_foreign_exception_is_named_without_its_text(ensemble, tmp_path, monkeypatch):
    def stream(prompt, **params):
        raise RuntimeError(SECRET)
        yield

    monkeypatch.setattr(ensemble, "stream", stream)
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer, pytest.raises(RuntimeError):
        writer.generate(QUESTION)
    assert read_trace(path).requests[0].error == "RuntimeError"
    assert "secret" not in path.read_text()


def test_whoever_stops_reading_or_cancels_is_recorded(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    cancel = threading.Event()
    with TraceWriter(path, ensemble) as writer:
        abandoned = writer.stream(QUESTION)
        next(abandoned)
        abandoned.close()
        cancel.set()
        with pytest.raises(Cancelled):
            writer.generate(QUESTION, cancel=cancel)
    stopped, cancelled = read_trace(path).requests
    assert stopped.error.startswith("Stopped")
    assert cancelled.error.startswith("Cancelled")


def test_leaving_after_the_result_is_no_failure(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        for event in (events := writer.stream(QUESTION, max_tokens=3)):
            if isinstance(event, GenerationFinished):
                events.close()
    [request] = read_trace(path).requests
    assert request.error is None
    assert lines_of(path)[-1]["type"] == "result"


def test_bad_arguments_leave_no_request(ensemble, tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, ensemble) as writer:
        with pytest.raises(ConfigError):
            writer.stream(QUESTION, max_token=3)
        with pytest.raises(PromptError):
            writer.stream("")
    trace = read_trace(path)
    assert trace.requests == ()
    assert trace.is_complete


# ---------------------------------------------------------------------- damaged and foreign files


@pytest.fixture(scope="module")
def whole(ensemble, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "whole.jsonl"
    traced(path, ensemble, max_tokens=12)
    return path.read_bytes()


def read(tmp_path, data: bytes):
    path = tmp_path / "given.jsonl"
    path.write_bytes(data)
    return read_trace(path)


def test_a_cut_last_line_is_left_out_and_said(whole, tmp_path):
    lines = whole.splitlines(keepends=True)
    for keep in (1, len(lines[-1]) // 2, len(lines[-1]) - 2):
        trace = read(tmp_path, b"".join(lines[:-1]) + lines[-1][:keep])
        assert not trace.is_complete
        assert trace.problem == f"line {len(lines)}, the last one, is cut off"
        assert trace.requests[0].result is None
        assert len(trace.requests[0].events) == len(lines) - 3


def test_a_missing_last_newline_is_nothing_missing(whole, tmp_path):
    assert read(tmp_path, whole[:-1]).is_complete
    assert read(tmp_path, whole.replace(b"\n", b"\r\n")).is_complete


def test_a_request_without_an_end_is_said(whole, tmp_path):
    trace = read(tmp_path, b"".join(whole.splitlines(keepends=True)[:-1]))
    assert trace.problem == "request 0 has no end"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_beginning_of_a_trace_is_read_or_refused(whole, tmp_path_factory, data):
    end = data.draw(st.integers(0, len(whole) - 2))
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    path.write_bytes(whole[:end])
    if end < whole.index(b"\n"):
        with pytest.raises(TraceError, match=r"it is empty|is no trace"):
            read_trace(path)
    else:
        assert not read_trace(path).is_complete or whole[:end].count(b"\n") <= 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x1f\x8b\x08\x00\x00binary\n\xff",
        b"<!doctype html>\n<p>no</p>\n",
        b"[1, 2]\n",
        b'{"type":"round","request":0}\n',
        b'{"type":"header","format":"something else","schema_version":1}\n',
        b'{"question":"1 + 1","answer":"2"}\n',
        b'"' + b"[" * 100_000 + b"\n",
        b"[" * 100_000 + b"\n",
        b"\n\n",
        "{}\n".encode("utf-16"),
    ],
)
def test_foreign_files_are_refused(tmp_path, data):
    with pytest.raises(TraceError, match="it is no trace") as caught:
        read(tmp_path, data)
    assert "--trace" in caught.value.hint
    assert "given.jsonl" in str(caught.value)


def test_an_empty_a_missing_and_an_unreadable_file(tmp_path):
    with pytest.raises(TraceError, match="it is empty"):
        read(tmp_path, b"")
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_a_newer_schema_version_is_refused(whole, tmp_path):
    with pytest.raises(TraceError, match="schema version 2 is newer") as caught:
        read(tmp_path, whole.replace(b'"schema_version":1', b'"schema_version":2', 1))
    assert "newer safe-llm" in caught.value.hint
    for value in (b"0", b"true", b'"1"', b"null"):
        with pytest.raises(TraceError, match="field schema_version"):
            read(tmp_path, whole.replace(b'"schema_version":1', b'"schema_version":' + value, 1))


def test_what_a_later_minor_version_adds_is_ignored(whole, tmp_path):
    more = whole.replace(b'"type":', b'"new":[1],"type":')
    assert read(tmp_path, more) == read(tmp_path, whole)


DAMAGE = [
    ("header", "members", "x", "field members"),
    ("header", "members", [{"name": 3}], "field members.0.name"),
    ("header", "fingerprint", None, "field fingerprint"),
    ("header", "members", [], "field members: there is none"),
    ("request", "prompt", {}, "field prompt.kind: is missing"),
    ("request", "request", 1, "field request: there is no such request"),
    ("request", "request", True, "field request: there is no such request"),
    ("round", "request", 7, "field request: there is no such request"),
    ("round", "request", "0", "field request: there is no such request"),
    ("round", "type", "rond", "field type: expected request, round, point, result or error"),
    ("round", "type", ["round"], "field type"),
    ("round", "committed", 5, "field committed"),
    ("round", "committed", {"hex": "0"}, "field hex"),
    ("round", "committed", "", "field committed: it has 0 bytes"),
    ("round", "committed", "\udc00", "field committed"),
    ("round", "decisions", [{}], "field decisions.0.position: is missing"),
    ("round", "timings", {"draft_s": "soon"}, "field timings.draft_s"),
    ("point", "candidates", [{"token": "a"}], "field candidates.0.probability: is missing"),
    ("point", "probabilities", {"drafter": "much"}, "field probabilities.drafter"),
    ("result", "finish_reason", "bored", "field finish_reason"),
    ("result", "counters", None, "field counters"),
    ("result", "num_points", "many", "field num_points"),
    ("result", "tokenizations", {"m": [5, 3]}, "field tokenizations.m: offsets must ascend"),
    ("result", "tokenizations", {"m": [10**6]}, "field tokenizations.m: offsets must ascend"),
    ("result", "tokenizations", {"m": [0]}, "field tokenizations.m: offsets must ascend"),
    ("result", "tokenizations", None, "field tokenizations"),
]


@pytest.mark.parametrize(("kind", "field", "value", "message"), DAMAGE)
def test_wrong_values_are_named_by_line_and_field(whole, tmp_path, kind, field, value, message):
    lines = [json.loads(line) for line in whole.splitlines()]
    number = next(i for i, line in enumerate(lines) if line["type"] == kind)
    lines[number][field] = value
    with pytest.raises(TraceError) as caught:
        read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert f"line {number + 1}: {message}" in str(caught.value)


def test_an_error_holds_nothing_of_the_text(whole, tmp_path):
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[1]["prompt"]["num_tokens"] = SECRET
    with pytest.raises(TraceError, match=r"line 2: field prompt.num_tokens: .*, got str") as caught:
        read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{\n", "line 2 is no JSON object: Expecting property name"),
        (b"\xff\n", "line 2 is no JSON object: it is not UTF-8"),
        (b"[]\n", "line 2 is no JSON object: it is no object but list"),
        (b'{"a":NaN}\n', "line 2 is no JSON object: NaN is no JSON"),
        (b'{"a":1e999}\n', "line 2 is no JSON object: 1e999 is no JSON"),
        (b'{"a":' + b"[" * 100_000 + b"\n", "line 2 is no JSON object: it is nested too deeply"),
        (b"{}\n", "line 2: field type"),
        (b'{"type":"error","request":0}\n', "line 2: field request"),
    ],
)
def test_a_broken_line_in_the_middle_is_an_error(whole, tmp_path, line, message):
    first, *rest = whole.splitlines(keepends=True)
    with pytest.raises(TraceError) as caught:
        read(tmp_path, b"".join([first, line, *rest]))
    assert message in str(caught.value)


def test_nothing_follows_the_end_of_a_request(whole, tmp_path):
    last = whole.splitlines(keepends=True)[-1]
    with pytest.raises(TraceError, match="request 0 has ended before"):
        read(tmp_path, whole + last)


def test_an_error_line_needs_a_text(whole, tmp_path):
    head = b"".join(whole.splitlines(keepends=True)[:2])
    with pytest.raises(TraceError, match="line 3: field error"):
        read(tmp_path, head + b'{"type":"error","request":0,"error":3}\n')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"byte_offset": 3}, "field decisions.0.byte_offset: expected 0, got 3"),
        ({"outcome": "replaced"}, "field decisions.0.outcome: a replacement ends a round"),
        ({"outcome": "guessed"}, "field decisions.0.outcome"),
        ({"tops": {"m": [["a"]]}}, "field decisions.0.tops.m.0"),
    ],
)
def test_a_round_that_contradicts_itself_is_refused(whole, tmp_path, change, message):
    lines = [json.loads(line) for line in whole.splitlines()]
    number = next(i for i, line in enumerate(lines) if line["type"] == "round" and len(line["decisions"]) > 1)
    lines[number]["decisions"][0] |= change
    with pytest.raises(TraceError) as caught:
        read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert message in str(caught.value)


def test_a_round_whose_tokens_are_not_its_bytes_is_refused(whole, tmp_path):
    lines = [json.loads(line) for line in whole.splitlines()]
    number = next(i for i, line in enumerate(lines) if line["type"] == "round")
    accepted = [d for d in lines[number]["decisions"] if d["outcome"] not in ("replaced", "confirmed")]
    lines[number]["decisions"] = accepted[:-1]
    with pytest.raises(TraceError, match=f"line {number + 1}: field committed: it has .* bytes, its decisions have"):
        read(tmp_path, "".join(json.dumps(line) + "\n" for line in lines).encode())


# ---------------------------------------------------------------------- merging


def test_merged_traces_are_one_trace(ensemble, tmp_path):
    first = traced(tmp_path / "a.jsonl", ensemble, max_tokens=8)
    second = traced(tmp_path / "b.jsonl", ensemble, max_tokens=12)
    merged = merge_traces([first, second])
    write_trace(merged, tmp_path / "merged.jsonl")
    again = read_trace(tmp_path / "merged.jsonl")
    assert [r.result.text for r in again.requests] == [t.requests[0].result.text for t in (first, second)]
    assert [{event.index for event in r.events} for r in merged.requests] == [{0}, {1}]
    assert merge_traces([first]) == first
    for name in (item.name for item in fields(again.header)):
        assert getattr(again.header, name) == getattr(first.header, name)


def test_a_written_trace_reads_back_as_it_was(ensemble, tmp_path):
    for number, trace in enumerate([traced(tmp_path / "a.jsonl", ensemble), synthetic("x", error=True)]):
        write_trace(trace, tmp_path / f"{number}.jsonl")
        assert read_trace(tmp_path / f"{number}.jsonl").requests == trace.requests


def test_a_merge_keeps_what_is_missing_in_mind(ensemble, tmp_path):
    trace = traced(tmp_path / "a.jsonl", ensemble, max_tokens=8)
    assert not merge_traces([trace, replace(trace, problem="cut")]).is_complete


def test_traces_of_different_ensembles_do_not_merge(ensemble, tmp_path):
    first = traced(tmp_path / "a.jsonl", ensemble, max_tokens=8)
    other = traced(tmp_path / "b.jsonl", Ensemble(ensemble.members, EnsembleConfig(lookahead=2)), max_tokens=8)
    with pytest.raises(TraceError, match="trace 2 has other config"):
        merge_traces([first, other])
    with pytest.raises(TraceError, match="no trace"):
        merge_traces([])

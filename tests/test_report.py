"""Reports: the right words for each token, on the terminal and in HTML, and nothing that a model wrote is obeyed."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from report_support import HOSTILE, NAMES, QUESTION, storytellers, synthetic, traced
from safe_llm.errors import TraceError
from safe_llm.events import Outcome
from safe_llm.report import print_report, render_html
from safe_llm.report.charts import Bar, bars
from safe_llm.report.view import answers
from safe_llm.report.words import LOOKS, look_of, meaning
from safe_llm.testing.members import scripted_ensemble
from safe_llm.trace import Trace, read_trace, write_trace
from safe_llm.visible import harmless, label
from test_cli_support import run


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return traced(tmp_path_factory.mktemp("report") / "t.jsonl", include_prompt=True)


def view(trace: Trace):
    [answer] = answers([("t.jsonl", trace)])
    return answer


# ---------------------------------------------------------------------- tokens


def test_tokens_spell_the_answer(trace):
    answer = view(trace)
    text = trace.requests[0].result.text
    assert "".join(token.text for token in answer.tokens) == text
    assert b"".join(answer.generated[t.start : t.end] for t in answer.tokens).decode() == text
    assert sum(count for _, count in answer.looks) == len(answer.tokens)


def test_each_point_stands_at_its_token(trace):
    answer = view(trace)
    points = [token.point for token in answer.tokens if token.point is not None]
    assert tuple(points) == trace.requests[0].points
    for token in answer.tokens:
        assert (token.point is not None) == token.decision.outcome.is_ensembled
        if token.point is not None:
            assert answer.generated[token.start : token.end] == token.point.chosen


def test_a_character_belongs_to_the_token_that_completes_it():
    [answer] = answers([("t", synthetic("\udcf0\udc9f", outcomes=(Outcome.C1,)))])
    assert [token.text for token in answer.tokens] == ["\ufffd"]
    split = synthetic("🙂")
    parts = [b"\xf0\x9f", b"\x99\x82"]
    events, at = [], 0
    for event, part in zip([e for e in split.requests[0].events if hasattr(e, "decisions")], parts, strict=False):
        decision = replace(event.decisions[0], token=part, outcome=Outcome.C1, byte_offset=at)
        events.append(replace(event, decisions=(decision,), committed=part))
        at += len(part)
    request = replace(split.requests[0], events=tuple(events), result=None, tokenizations={})
    assert [token.text for token in view(replace(split, requests=(request,))).tokens] == ["", "🙂"]


def test_what_a_stop_string_cut_is_not_part_of_the_answer(tmp_path):
    trace = traced(tmp_path / "t.jsonl", stop="5 apples")
    answer = view(trace)
    kept = "".join(token.text[: token.num_kept] for token in answer.tokens)
    assert kept == trace.requests[0].result.text
    assert len(answer.generated) > len(kept.encode())
    cut = "".join(token.text[token.num_kept :] for token in answer.tokens)
    assert cut.startswith("5 apples"[: len(cut)])
    assert "".join(text for _, text in page_of(trace).all("del")) == cut.replace("\n", "⏎\n")


def test_an_answer_without_verifiers_is_drafted_throughout(tmp_path):
    trace = traced(tmp_path / "t.jsonl", storytellers(mode="drafter"), max_tokens=10)
    answer = view(trace)
    assert [look.key for look, _ in answer.looks] == ["drafted"]
    assert {token.why for token in answer.tokens} == {"There is no verifier in this mode; the drafter's token stands."}


# ---------------------------------------------------------------------- cuts


def test_cuts_show_each_members_tokens_around_a_token(trace):
    answer = view(trace)
    token = next(t for t in answer.tokens if t.text == "700")
    cuts = {cut.member: [answer.generated[p.start : p.end] for p in cut.pieces] for cut in answer.cuts(token)}
    assert cuts[NAMES[0]] == [b" 63", b",", b"700", b" people", b" there"]
    assert b"".join(cuts[NAMES[1]]) in answer.generated
    assert any(b"700" in piece for piece in cuts[NAMES[1]])


def test_cuts_say_whose_token_begins_here(trace):
    answer = view(trace)
    for token in answer.tokens:
        inside = [cut.member for cut in answer.cuts(token) if not cut.begins]
        assert NAMES[0] not in inside or token.decision.outcome.is_ensembled
        if token.decision.outcome is Outcome.OOV_LIKE:
            assert inside
            assert all(name in token.why for name in inside)


def test_tokens_without_an_exact_end_are_one_vague_piece(trace):
    answer = view(trace)
    vague = [piece for pieces in answer.pieces.values() for piece in pieces if not piece.is_exact]
    assert vague
    for pieces in answer.pieces.values():
        assert [p.start for p in pieces[1:]] == [p.end for p in pieces[:-1]]
        assert (pieces[0].start, pieces[-1].end) == (0, len(answer.generated))


# ---------------------------------------------------------------------- words


def test_every_outcome_has_a_look_and_a_meaning():
    assert Counter(outcome for look in LOOKS for outcome in look.outcomes) == Counter(Outcome)
    assert len({meaning(outcome) for outcome in Outcome}) == len(Outcome)
    looks = [(look.style, look.marks) for look in LOOKS if look.key not in ("accepted", "drafted")]
    assert len({style for style, _ in looks}) == len({marks for _, marks in looks}) == len(looks)


def test_reasons_name_the_numbers_that_decided(trace):
    answer = view(trace)
    for token in answer.tokens:
        given = token.decision.probabilities
        if token.decision.outcome is Outcome.C2:
            assert f"mean {sum(given.values()) / 3:.2f} is over the threshold 0.5" in token.why
        if token.point is not None:
            assert f"mean {sum(given.values()) / 3:.2f} is not over the threshold 0.5" in token.why
            instead = f"{label(token.point.chosen)} instead of {label(token.point.drafted)}"
            assert (instead if token.point.replaced else "the drafted token all the same") in token.why


@pytest.mark.parametrize(
    ("options", "params", "outcome", "words"),
    [
        ({"mode": "every-token"}, {}, Outcome.REPLACED, "merged at every token"),
        ({"mode": "every-token"}, {}, Outcome.CONFIRMED, "the drafted token all the same"),
        ({"method": "gac", "mode": "every-token"}, {}, Outcome.GATE, "GaC then keeps it"),
        ({"method": "prefix-mass"}, {}, Outcome.C1, "however it cuts it"),
        ({"method": "prefix-mass"}, {}, Outcome.OOV_LIKE, "judged as a part of the text before it"),
        ({}, {}, Outcome.OOV_LIKE, "which therefore has no say here"),
        ({}, {"temperature": 0.7, "seed": 3}, Outcome.SAMPLED, "at temperature 0.7"),
        ({}, {"temperature": 0.7, "seed": 3}, Outcome.REPLACED, "rejected the drafted token"),
        ({}, {}, Outcome.C1, "is its favourite"),
        ({}, {}, Outcome.UNREPRESENTABLE, "cannot spell the text"),
    ],
)
def test_reasons_follow_the_mode_and_the_method(tmp_path, options, params, outcome, words):
    answer = view(traced(tmp_path / "t.jsonl", storytellers(**options), max_tokens=60, **params))
    assert words in next(token.why for token in answer.tokens if token.decision.outcome is outcome)


def test_forced_tokens_have_their_reason(tmp_path):
    trace = traced(tmp_path / "t.jsonl", scripted_ensemble({QUESTION: "yes"}), regex="yes")
    assert "leaves no other continuation" in view(trace).tokens[0].why


# ---------------------------------------------------------------------- HTML


class Page(HTMLParser):
    """Elements with their attributes, and the text of each script, style and token."""

    VOID = frozenset({"meta", "br", "img", "input", "link"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()
        assert not self._open, "unclosed elements"

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in self.VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data):
        for i in self._open:
            self.texts[i] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attrs)) for tag, attrs in self.elements]

    def all(self, tag: str, **wanted: str) -> list[tuple[dict[str, str], str]]:
        found = zip(self.elements, self.texts, strict=True)
        return [(a, text) for (t, a), text in found if t == tag and all(a.get(k) == v for k, v in wanted.items())]


def page_of(trace: Trace, name: str = "t.jsonl") -> Page:
    return Page(render_html([(name, trace)]))


def test_page_has_the_text_token_by_token(trace):
    page = page_of(trace)
    tokens = [(attrs, text) for attrs, text in page.all("span") if "data-token" in attrs]
    shown = "".join(text for _, text in tokens).replace("⏎", "")
    assert shown == trace.requests[0].result.text + "END"
    assert [attrs["data-token"] for attrs, _ in tokens] == [str(i) for i in range(len(tokens))]
    assert [attrs["tabindex"] for attrs, _ in tokens] == ["0"] + ["-1"] * (len(tokens) - 1)
    assert all(attrs["role"] == "button" and attrs["aria-label"] for attrs, _ in tokens)


def test_page_has_the_data_of_every_token(trace):
    [(_, text)] = page_of(trace).all("script", type="application/json")
    data = json.loads(text)
    answer = view(trace)
    assert [member["name"] for member in data["members"]] == list(NAMES)
    assert len(data["tokens"]) == len(answer.tokens)
    for shown, token in zip(data["tokens"], answer.tokens, strict=True):
        decision = token.decision
        assert shown["drafted"] == label(decision.token)
        assert shown["why"] == token.why
        assert shown["asked"] == [decision.probabilities.get(name) for name in NAMES]
        assert shown["tops"][0] == [[label(key), p] for key, p in decision.tops[NAMES[0]]]
        assert len(shown["cuts"]) == 3
        assert bool(shown["candidates"]) == (token.point is not None)
        assert any(here for _, _, pieces in shown["cuts"] for _, here, _ in pieces) == bool(token.end > token.start)


def test_page_needs_nothing_from_elsewhere(trace):
    html = render_html([("t.jsonl", trace)])
    page = Page(html)
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not [a for _, a in page.elements for name in ("src", "srcset", "style", "action") if name in a]
    assert not re.search(r"https?:|@import|url\(", html)


def test_policy_allows_exactly_this_style_and_this_script(trace):
    page = page_of(trace)
    [policy] = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    [(_, style)] = page.all("style")
    scripts = [text for attrs, text in page.all("script") if not attrs]
    assert len(scripts) == 1
    for name, text in (("style", style), ("script", scripts[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    before = [tag for tag, _ in page.elements]
    assert before.index("meta") < before.index("style")


def test_page_has_charts_tables_and_settings(trace):
    page = page_of(trace)
    labels = [attrs["aria-label"] for attrs, _ in page.all("svg")]
    rate = len(trace.requests[0].points) / len(view(trace).tokens)
    assert f"{rate:.0%} of" in labels[0]
    assert labels[1].startswith("Outcomes: skipped, inside a verifier's token")
    assert labels[2].startswith("Time per phase: tokenize")
    captions = [text for _, text in page.all("caption")]
    assert captions == ["Counters", "Latency"]
    text = " ".join(text for _, text in page.all("article"))
    result = trace.requests[0].result
    assert f"{result.counters.num_ensembled} ({result.counters.ensemble_rate:.0%} of tokens)" in text
    assert trace.header.fingerprint in text
    assert QUESTION in text


def test_several_traces_share_a_page_with_navigation(trace, tmp_path):
    other = traced(tmp_path / "u.jsonl", max_tokens=5)
    both = replace(other, requests=other.requests * 2)
    page = Page(render_html([("t.jsonl", trace), ("u.jsonl", both)]))
    links = [attrs["href"] for attrs, _ in page.all("a")]
    ids = [attrs["id"] for attrs, _ in page.all("article")]
    assert links == [f"#{name}" for name in ids] == ["#answer-1", "#answer-2", "#answer-3"]
    titles = [text for _, text in page.all("h2")]
    assert [title.split(maxsplit=1)[1] for title in titles] == ["t.jsonl", "u.jsonl, request 1", "u.jsonl, request 2"]
    every = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(set(every)) == len(every)


def test_what_is_missing_is_said(trace):
    cut = replace(trace, requests=(replace(trace.requests[0], result=None, tokenizations={}),), problem="line 9 is cut")
    html = render_html([("t.jsonl", cut)])
    assert "line 9 is cut" in html
    assert "ends before the answer does" in html
    assert "Counters" not in html
    assert "failed-because" in render_html([("t", synthetic("failed-because", error=True))])
    empty = render_html([("t", replace(trace, requests=()))])
    assert "There is no request" in empty


def test_an_answer_of_one_end_token_has_a_page(tmp_path):
    trace = traced(tmp_path / "t.jsonl", scripted_ensemble({"other": "x"}))
    tokens = [text for attrs, text in page_of(trace).all("span") if "data-token" in attrs]
    assert tokens == ["END"]


def test_bars_scale_to_the_longest():
    svg = bars(
        "t", [Bar(label="a", value=1, text="1"), Bar(label="b", value=4, text="4"), Bar(label="c", value=0, text="")]
    )
    widths = re.findall(r'class="bar plain"[^>]*width="([\d.]+)"', svg)
    assert widths == ["90.0", "360.0", "0.0"]


# ---------------------------------------------------------------------- hostile text


@pytest.fixture(scope="module")
def harmless_page() -> Page:
    return page_of(synthetic("x"))


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_adds_no_markup(harmless_page, tmp_path, text):
    if "\udcff" in text:
        trace = synthetic("x")  # strings of a file are text; only tokens can be other bytes
        trace = replace(trace, requests=synthetic(text).requests)
    else:
        write_trace(synthetic(text), tmp_path / "t.jsonl")
        trace = read_trace(tmp_path / "t.jsonl")
    page = page_of(trace, name=text)
    assert page.skeleton == harmless_page.skeleton
    data = [json.loads(text) for _, text in page.all("script", type="application/json")]
    assert [member["name"] for member in data[0]["members"]] == [harmless(m.name) for m in trace.header.members]
    assert {attrs["href"] for attrs, _ in page.all("a")} <= {"#answer-1"}
    assert "__xss" not in next(text for attrs, text in page.all("script") if not attrs)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_readable(text):
    trace = replace(synthetic("x"), requests=synthetic(text).requests)
    page = page_of(trace)
    shown = [text for attrs, text in page.all("span") if "data-token" in attrs]
    expected = harmless(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").replace("\n", "⏎\n"))
    assert set(shown) == {expected}


def control_characters(text: str) -> set[str]:
    return {c for c in text if harmless(c) != c}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_control_character_reaches_a_page_or_a_terminal(text):
    trace = replace(synthetic("x"), requests=synthetic(text).requests)
    assert control_characters(render_html([(text, trace)])) == set()
    for is_terminal in (True, False):
        printed = printed_report(trace, name=text, is_terminal=is_terminal)
        assert control_characters(re.sub("\x1b\\[[0-9;]*m", "", printed)) == set()


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_no_text_adds_markup(harmless_page, text):
    assert page_of(synthetic(text)).skeleton == harmless_page.skeleton


ANYTHING = (None, True, -1, 0, 10**30, 1e308, "", "x", "\u202e", [], ["x"], {}, {"hex": "ff"}, {"x": 1})


def places(value, path=()):
    """Every place in a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_can_be_read_can_be_shown(trace, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    write_trace(trace, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    *way, last = data.draw(st.sampled_from(list(places(lines))))
    target = lines
    for key in way:
        target = target[key]
    target[last] = data.draw(st.sampled_from(ANYTHING))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        changed = read_trace(path)
    except TraceError:
        return
    page_of(changed)
    assert printed_report(changed)


# ---------------------------------------------------------------------- terminal


def printed_report(trace: Trace, *, name: str = "t.jsonl", is_terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=120,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
        highlight=False,
        markup=False,
        emoji=False,
        _environ={"TERM": "xterm"},
    )
    print_report(console, [(name, trace)])
    return file.getvalue()


def test_marks_show_without_styles_what_styles_show():
    trace = synthetic("x")
    plain = printed_report(trace)
    assert "x{x}{?x?}<x>xxxx[x][[x]]" in plain
    assert "\x1b" not in plain
    styled = printed_report(trace, is_terminal=True)
    for outcome in (Outcome.REPLACED, Outcome.CONFIRMED, Outcome.OOV_LIKE, Outcome.UNREPRESENTABLE, Outcome.FORCED):
        codes = {"bold": "1", "dim": "2", "italic": "3", "underline": "4", "reverse": "7", "strike": "9"}
        style = ";".join(codes[word] for word in look_of(outcome).style.split())
        assert f"\x1b[{style}mx\x1b[0m" in styled
    assert "[[" not in styled


def test_neighbours_of_one_look_share_their_marks():
    outcomes = (Outcome.OOV_LIKE, Outcome.OOV_LIKE, Outcome.REPLACED, Outcome.REPLACED, Outcome.C1)
    assert "{xx}[[x]][[x]]x" in printed_report(synthetic("x", outcomes=outcomes))


def test_terminal_report_has_text_legend_points_counters_and_times(trace):
    printed = printed_report(trace)
    result = trace.requests[0].result
    for part in (
        f"drafter {NAMES[0]}, verifier {NAMES[1]}, verifier {NAMES[2]}",
        f"prompt: {QUESTION}",
        "the ensemble acted and chose another token than the drafter",
        f"({result.counters.acceptance_rate:.0%} of drafted)",
        "tokens per second",
        "first token",
    ):
        assert part in printed, part
    for point in result.points:
        assert re.search(rf"^{point.position} +{re.escape(label(point.drafted))} +", printed, re.MULTILINE)


def test_terminal_report_of_a_failure_says_so():
    assert "failed: broken" in printed_report(synthetic("broken", error=True))
    trace = synthetic("x")
    cut = replace(trace, requests=(replace(trace.requests[0], result=None),), problem="line 3 is cut")
    assert "t.jsonl: incomplete, line 3 is cut" in printed_report(cut)
    assert "the trace ends before the answer does" in printed_report(cut)


# ---------------------------------------------------------------------- safe-llm report


def test_report_command_prints_to_a_pipe_and_to_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    traced(tmp_path / "t.jsonl", max_tokens=60)
    plain = run("report", str(tmp_path / "t.jsonl"))
    assert (plain.code, plain.stderr) == (0, "")
    assert b"\x1b" not in plain.stdout
    assert "legend" not in plain.stdout.decode()
    assert "[[" in plain.stdout.decode()
    assert b"\x1b[1;7m" in run("report", str(tmp_path / "t.jsonl"), tty=True).stdout


def test_report_command_writes_one_page_of_several_traces(tmp_path):
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        traced(path, max_tokens=8)
    result = run("report", *paths, "--html", str(tmp_path / "page.html"))
    assert (result.code, result.stdout) == (0, b"")
    assert result.stderr == f"wrote {tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(page.all("article")) == 2


def test_report_command_refuses_what_is_no_trace(tmp_path):
    (tmp_path / "foreign.jsonl").write_text("{}\n")
    result = run("report", str(tmp_path / "foreign.jsonl"))
    assert result.code == 2
    assert "it is no trace" in result.error_lines[0]
    assert result.error_lines[1].startswith("hint: ")
    assert run("report", str(tmp_path / "missing.jsonl")).code == 2
    assert run("report").code == 2


def test_report_command_does_not_overwrite_a_trace(tmp_path):
    traced(tmp_path / "t.jsonl", max_tokens=3)
    before = (tmp_path / "t.jsonl").read_bytes()
    result = run("report", str(tmp_path / "t.jsonl"), "--html", str(tmp_path / "." / "t.jsonl"))
    assert result.code == 2
    assert "overwrite" in result.error_lines[0]
    assert (tmp_path / "t.jsonl").read_bytes() == before
    result = run("report", str(tmp_path / "t.jsonl"), "--html", str(tmp_path / "missing" / "page.html"))
    assert result.code == 2
    assert "cannot write the report" in result.error_lines[0]

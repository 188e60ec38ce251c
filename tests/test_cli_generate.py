from __future__ import annotations

import json
import os
import threading
from dataclasses import fields

import pytest
from typer.main import get_command

from safe_llm.cli import answering, loading
from safe_llm.cli.app import app
from safe_llm.cli.options import EnsembleFlags, OutputFlags, SamplingFlags
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import result_as_dict
from safe_llm.errors import MemberError
from safe_llm.trace import read_trace
from safe_llm.types import Message, SamplingParams
from test_cli_support import QUESTION, RIGHT, WRONG, install, refuse_to_load, run

HOSTILE = "a\x1b[31mred\x07 \x9b2J \r\n[bold]b[/bold] :smile: \u202eend"


# ---------------------------------------------------------------------- stdout


def test_generate_into_a_pipe_is_exactly_the_answer(monkeypatch):
    install(monkeypatch, {QUESTION: RIGHT})
    result = run("generate", QUESTION)
    assert (result.code, result.stdout, result.stderr) == (0, RIGHT.encode(), "")


def test_generate_on_a_terminal_ends_with_one_newline(monkeypatch):
    install(monkeypatch, {QUESTION: RIGHT, "lines": "one\n"})
    assert run("generate", QUESTION, tty=True).stdout == RIGHT.encode() + b"\n"
    assert run("generate", "lines", tty=True).stdout == b"one\n"


def test_hostile_answer_goes_unchanged_into_a_pipe(monkeypatch):
    install(monkeypatch, {QUESTION: HOSTILE})
    assert run("generate", QUESTION).stdout == HOSTILE.encode()


def test_hostile_answer_cannot_drive_a_terminal(monkeypatch):
    install(monkeypatch, {QUESTION: HOSTILE})
    shown = run("generate", QUESTION, tty=True).stdout.decode()
    assert shown == "a\\x1b[31mred\\x07 \\x9b2J \n[bold]b[/bold] :smile: \\u202eend\n"


def test_an_answer_that_is_not_utf8_becomes_replacement_characters(monkeypatch):
    class Broken(dict):
        def items(self):
            return [(Prompt(QUESTION), Answer(b"a\xff\xe2\x82b"))]

    class Prompt(str):
        pass

    class Answer(str):
        def __new__(cls, data):
            made = super().__new__(cls, "")
            made.data = data
            return made

        def encode(self):
            return self.data

    install(monkeypatch, Broken())
    assert run("generate", QUESTION).stdout.decode() == "a\ufffd\ufffdb"


def test_json_is_one_object_with_what_generate_returns(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: WRONG}, {QUESTION: RIGHT})
    result = run("generate", "--json", "--weights", "1,3", "--logprobs", "2", QUESTION)
    assert result.stdout.endswith(b"}\n")
    assert result.stdout.count(b"\n") == 1
    printed = json.loads(result.stdout)
    [ensemble] = scripted.ensembles
    expected = result_as_dict(ensemble.generate([{"role": "user", "content": QUESTION}], logprobs=2))
    assert printed.keys() == expected.keys() | {"members", "config", "fingerprint"}
    for key in ("text", "finish_reason", "finish_detail", "usage", "points", "logprobs", "seed"):
        assert printed[key] == json.loads(json.dumps(expected[key])), key
    assert printed["text"] == RIGHT
    assert printed["points"]
    assert [member["name"] for member in printed["members"]] == ["drafter", "verifier"]
    assert printed["config"] == ensemble.config.model_dump(mode="json")
    assert printed["fingerprint"] == ensemble.fingerprint


def test_json_is_readable_and_drives_no_terminal(monkeypatch):
    install(monkeypatch, {QUESTION: "日本 \x9b2J\x1b[1m\u202e"})
    printed = run("generate", "--json", QUESTION, tty=True).stdout.decode()
    assert "\\u009b2J\\u001b[1m\\u202e" in printed
    assert "日本" in printed
    assert not {"\x9b", "\x1b", "\u202e"} & set(printed)
    assert json.loads(printed)["text"] == "日本 \x9b2J\x1b[1m\u202e"


def test_cut_answer_is_announced_on_a_terminal_only(monkeypatch):
    install(monkeypatch, {QUESTION: RIGHT})
    assert "--max-tokens" in run("generate", "--max-tokens", "2", QUESTION, tty=True).stderr
    assert run("generate", "--max-tokens", "2", "-q", QUESTION, tty=True).stderr == ""
    assert run("generate", "--max-tokens", "2", QUESTION).stderr == ""


# ---------------------------------------------------------------------- --show


def test_show_marks_replaced_tokens_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    install(monkeypatch, {QUESTION: WRONG}, {QUESTION: RIGHT})
    result = run("generate", "--show", "--weights", "1,3", QUESTION, tty=True)
    plain = result.stdout.decode().replace("\x1b[1;7m", "").replace("\x1b[4m", "").replace("\x1b[0m", "")
    assert plain == RIGHT + "\n"
    assert b"\x1b[1;7m" in result.stdout
    legend, counters = result.error_lines
    assert "replaced by the ensemble" in legend
    assert "confirmed by the ensemble" in legend
    assert "ensemble points" in counters
    assert "total" in counters


def test_show_uses_brackets_where_there_are_no_styles(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    install(monkeypatch, {QUESTION: WRONG}, {QUESTION: RIGHT})
    shown = run("generate", "--show", "--weights", "1,3", QUESTION, tty=True).stdout.decode()
    assert "[[" in shown
    assert "\x1b" not in shown
    assert shown.replace("[", "").replace("]", "") == RIGHT + "\n"


def test_show_into_a_pipe_marks_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    install(monkeypatch, {QUESTION: WRONG}, {QUESTION: RIGHT})
    result = run("generate", "--show", "--weights", "1,3", QUESTION)
    assert result.stdout == RIGHT.encode()
    assert len(result.error_lines) == 1
    assert "drafted tokens accepted" in result.stderr


# ---------------------------------------------------------------------- flags

ENSEMBLE_VALUES = {
    "mode": "every-token",
    "method": "gac",
    "lookahead": 3,
    "consensus_threshold": 0.25,
    "sharpening": "none",
    "sharpening_threshold": 0.75,
    "top_k": 4,
    "weights": (2.0, 1.0),
    "lookup": False,
    "run_ahead": True,
    "prefix_caching": False,
    "on_verifier_failure": "continue",
    "max_batch_size": 2,
}
SAMPLING_VALUES = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.75,
    "seed": 7,
    "stop": ("42",),
    "min_tokens": 1,
    "logprobs": 3,
}


def _flag(field: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{field.replace('_', '-')}"]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [f"--{field.replace('_', '-')}", text]


def test_every_parameter_has_a_flag():
    assert {field.name for field in fields(EnsembleFlags)} == set(EnsembleConfig.model_fields) == set(ENSEMBLE_VALUES)
    assert [f.name for f in fields(SamplingFlags)] == [f.name for f in fields(SamplingParams)] == [*SAMPLING_VALUES]
    for command in ("generate", "chat"):
        names = {name for param in get_command(app).commands[command].params for name in param.opts}
        wanted = [*ENSEMBLE_VALUES, *SAMPLING_VALUES, "device", "dtype", "preset", "drafter", "verifier", "config"]
        assert {f"--{name.replace('_', '-')}" for name in wanted} <= names
        assert {"--json", "--show", "--quiet", "--system"} <= names


@pytest.mark.parametrize(("field", "value"), ENSEMBLE_VALUES.items())
def test_every_ensemble_flag_reaches_the_configuration(monkeypatch, field, value):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", *_flag(field, value), QUESTION).code == 0
    [spec] = scripted.specs
    assert spec.ensemble == EnsembleConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), SAMPLING_VALUES.items())
def test_every_decoding_flag_reaches_the_request(monkeypatch, field, value):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", *_flag(field, value), QUESTION).code == 0
    [spec] = scripted.specs
    assert SamplingParams.of(spec.sampling) == SamplingParams(**{field: value})


def test_decoding_flags_are_obeyed(monkeypatch):
    install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", "--stop", " is", "--stop", "not", QUESTION).stdout == b"The answer"
    printed = json.loads(run("generate", "--json", "--max-tokens", "2", QUESTION).stdout)
    assert printed["usage"]["completion_tokens"] == 2
    assert printed["finish_reason"] == "length"


def test_help_states_the_real_defaults():
    defaults = {name: field.default for name, field in EnsembleConfig.model_fields.items()}
    defaults |= {field.name: field.default for field in fields(SamplingParams)}
    helps = {param.name: param.help for param in get_command(app).commands["generate"].params if param.name in defaults}
    stated = {name: text.partition("[default: ")[2].rstrip("]") for name, text in helps.items()}
    silent = {"seed", "stop", "logprobs"}
    assert stated.pop("weights") == "equal"
    assert stated.pop("lookup") == stated.pop("prefix_caching") == "on"
    assert stated.pop("run_ahead") == "if a verifier is on another device"
    assert {name for name, default in stated.items() if not default} == silent
    assert {n: d for n, d in stated.items() if d} == {
        n: str(d) for n, d in defaults.items() if n not in silent | {"weights", "lookup", "run_ahead", "prefix_caching"}
    }


@pytest.mark.parametrize("form", [["2,1"], ["2", "1"]])
def test_weights_come_as_a_list_or_one_by_one(monkeypatch, form):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    args = [arg for weight in form for arg in ("--weights", weight)]
    assert run("generate", *args, QUESTION).code == 0
    assert scripted.specs[0].ensemble.weights == (2.0, 1.0)


def test_device_and_dtype_hold_for_all_members(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", "--device", "cpu", "--dtype", "float32", QUESTION).code == 0
    assert {(m.device, m.dtype) for m in scripted.specs[0].members} == {("cpu", "float32")}


def test_quiet_turns_progress_off(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    run("generate", QUESTION)
    run("generate", "--quiet", QUESTION)
    assert scripted.progress == [True, False]


# ---------------------------------------------------------------------- members


def test_members_come_from_flags(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    run("generate", "--drafter", "a", "--verifier", "x/b", "--verifier", "c.gguf", QUESTION)
    run("generate", "--drafter", "a", QUESTION)
    run("generate", QUESTION)
    names = [[member.model for member in spec.members] for spec in scripted.specs]
    assert names == [["a", "x/b", "c.gguf"], ["a"], ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"]]


def test_flags_win_over_the_configuration_file(monkeypatch, tmp_path):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    file = tmp_path / "ensemble.toml"
    file.write_text(
        '[drafter]\nmodel = "a"\ndevice_map = "auto"\n[[verifiers]]\nmodel = "b"\n'
        "[ensemble]\nlookahead = 2\ntop_k = 3\n[sampling]\nmax_tokens = 5\nseed = 1\n"
    )
    assert run("generate", "--config", str(file), "--top-k", "7", "--seed", "2", "--device", "cpu", QUESTION).code == 0
    [spec] = scripted.specs
    assert (spec.ensemble.lookahead, spec.ensemble.top_k) == (2, 7)
    assert spec.sampling == {"max_tokens": 5, "seed": 2}
    assert (spec.drafter.device, spec.drafter.device_map) == ("cpu", None)


# ---------------------------------------------------------------------- the prompt


def _raw(monkeypatch, prompt: str) -> None:
    """Only exactly this plain text is answered."""
    install(monkeypatch, {prompt: "yes"})


def test_prompt_is_literal_by_default(monkeypatch):
    _raw(monkeypatch, r"a\nb\\")
    assert run("generate", "--raw", r"a\nb\\").stdout == b"yes"


def test_escape_interprets_the_prompt_the_system_message_and_stops(monkeypatch):
    _raw(monkeypatch, "a\nb\\\t\x41é🙂\"'\r")
    assert run("generate", "--raw", "--escape", r"a\nb\\\t\x41\u00e9\U0001F642\"\'\r").stdout == b"yes"
    install(monkeypatch, {QUESTION: "one\ntwo"})
    assert run("generate", "--escape", "--stop", r"\n", QUESTION).stdout == b"one"
    assert run("generate", "--stop", r"\n", QUESTION).stdout == b"one\ntwo"


@pytest.mark.parametrize("text", [r"a\q", "a\\", r"\x4", r"\U00110000", r"\ud83d"])
def test_escape_refuses_what_it_does_not_know(monkeypatch, text):
    refuse_to_load(monkeypatch)
    result = run("generate", "--escape", text)
    assert result.code == 2
    assert len(result.error_lines) == 2


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb\r\n", "\ufeffa\n", "a\n\n", r"a\nb", " a ", "日本\u2028🙂", "a\x00b"])
def test_stdin_is_the_prompt_byte_for_byte(monkeypatch, text):
    _raw(monkeypatch, text)
    assert run("generate", "--raw", "-", stdin=text.encode()).stdout == b"yes"
    assert run("generate", "--raw", "--escape", "-", stdin=text.encode()).stdout == b"yes"


def test_stdin_that_is_not_utf8_is_refused(monkeypatch):
    refuse_to_load(monkeypatch)
    result = run("generate", "-", stdin=b"abc\xff")
    assert result.code == 2
    assert result.error_lines[0] == "error: stdin is not valid UTF-8: byte 3 cannot be decoded"


def test_prompt_is_a_user_message_unless_raw(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: RIGHT})
    seen = []
    monkeypatch.setattr(answering, "answer", lambda ensemble, prompt, *rest, **more: seen.append(prompt))
    run("generate", QUESTION)
    run("generate", "--system", "Be brief.", QUESTION)
    run("generate", "--raw", QUESTION)
    run("generate", "--", "--raw")
    assert len(scripted.specs) == 4
    assert [[(m.role, m.content) for m in prompt] if isinstance(prompt, list) else prompt for prompt in seen] == [
        [("user", QUESTION)],
        [("system", "Be brief."), ("user", QUESTION)],
        QUESTION,
        [("user", "--raw")],
    ]


# ---------------------------------------------------------------------- errors

BAD_INPUT = {
    "unknown preset": (["--preset", "dmeo", "x"], "unknown preset 'dmeo'", "did you mean 'demo'?"),
    "unknown method": (["--method", "unit", "x"], "unknown method 'unit'", "did you mean 'unite'?"),
    "unknown mode": (["--mode", "save", "x"], "unknown mode 'save'", "did you mean 'safe'?"),
    "unknown sharpening": (["--sharpening", "prefx", "x"], "unknown sharpening", "did you mean 'prefix'?"),
    "unknown flag": (["--lokahead", "3", "x"], "no such option: --lokahead", "did you mean --lookahead"),
    "no number": (["--lookahead", "many", "x"], "lookahead", "safe-llm generate --help"),
    "lookahead": (["--lookahead", "0", "x"], "lookahead", "safe-llm generate --help"),
    "temperature": (["--temperature", "-1", "x"], "temperature", "safe-llm generate --help"),
    "temperature nan": (["--temperature", "nan", "x"], "temperature", "safe-llm generate --help"),
    "top_p low": (["--top-p", "0", "x"], "top_p", "safe-llm generate --help"),
    "top_p high": (["--top-p", "1.5", "x"], "top_p", "safe-llm generate --help"),
    "max_tokens": (["--max-tokens", "0", "x"], "max_tokens", "safe-llm generate --help"),
    "min over max": (["--max-tokens", "2", "--min-tokens", "3", "x"], "min_tokens 3", "safe-llm generate --help"),
    "top_k": (["--top-k", "0", "x"], "top_k", "safe-llm generate --help"),
    "threshold": (["--consensus-threshold", "inf", "x"], "consensus_threshold", "safe-llm generate --help"),
    "dtype": (["--dtype", "float31", "x"], "dtype", "float32"),
    "too many weights": (["--weights", "1,2,3", "x"], "3 weights for 2 members", "one weight per member"),
    "no weight": (["--weights", "1,a", "x"], "weights must be numbers", "2,1,1"),
    "empty stop": (["--stop", "", "x"], "stop string", "safe-llm generate --help"),
    "empty prompt": ([""], "the prompt is empty", "at least one character"),
    "no prompt": ([], "there is no prompt", "stdin"),
    "two prompts": (["x", "y"], "extra argument", "safe-llm generate --help"),
    "surrogate": (["x\ud83d"], "lone surrogate", "errors='replace'"),
    "system surrogate": (["--system", "\udcff", "x"], "lone surrogate", "errors='replace'"),
    "raw and system": (["--raw", "--system", "s", "x"], "--raw", "leave out"),
    "json and show": (["--json", "--show", "x"], "--json or --show", "JSON"),
    "preset and drafter": (["--preset", "demo", "--drafter", "a", "x"], "--preset or --drafter", "--help"),
    "preset and config": (["--preset", "demo", "--config", "a", "x"], "--preset or --config", "--help"),
    "lonely verifier": (["--verifier", "a", "x"], "--verifier needs --drafter", "drafter"),
    "no file": (["--config", "missing.toml", "x"], "missing.toml", "--help"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_error_line_with_a_hint(monkeypatch, name):
    refuse_to_load(monkeypatch)
    args, message, hint = BAD_INPUT[name]
    result = run("generate", *args)
    assert (result.code, result.stdout) == (2, b"")
    error, advice = result.error_lines
    assert error.startswith("error: ")
    assert message in error
    assert advice.startswith("hint: ")
    assert hint in advice


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[drafter]\nmodel = 'a'\n[ensemble]\nlookahed = 3\n", "unknown parameter 'lookahed'"),
        ("[drafter]\nmodel = 'a'\n[sampling]\ntemprature = 1\n", "unknown parameter 'temprature'"),
        ("[drafter\n", "not valid TOML"),
    ],
)
def test_bad_configuration_file_is_one_error(monkeypatch, tmp_path, content, message):
    refuse_to_load(monkeypatch)
    file = tmp_path / "ensemble.toml"
    file.write_text(content)
    result = run("generate", "--config", str(file), "x")
    assert result.code == 2
    assert message in result.error_lines[0]
    assert len(result.error_lines) == 2


@pytest.mark.parametrize(
    ("args", "hint"),
    [(["generat"], "did you mean 'generate'?"), (["models", "lst"], "did you mean 'list'?"), (["xyz"], "--help")],
)
def test_unknown_command_suggests_the_nearest(args, hint):
    result = run(*args)
    assert result.code == 2
    assert result.error_lines[0].startswith("error: no such command")
    assert hint in result.error_lines[1]


def test_a_member_that_fails_is_an_error_and_text_so_far_stays(monkeypatch):
    scripted = install(monkeypatch, {QUESTION: RIGHT})

    def broken(spec, *, progress):
        ensemble = scripted(spec, progress=progress)
        forward = ensemble.members[1].backend.forward

        def fail_later(feeds):
            if ensemble.members[1].backend.num_forwards >= 2:
                raise MemberError("verifier", "out of order")
            return forward(feeds)

        ensemble.members[1].backend.forward = fail_later
        return ensemble

    monkeypatch.setattr(loading, "load_ensemble", broken)
    result = run("generate", QUESTION)
    assert result.code == 2
    assert RIGHT.encode().startswith(result.stdout)
    assert result.stdout
    assert result.error_lines == ["error: member 'verifier': out of order"]


def _explode(monkeypatch, error: Exception) -> None:
    def load(spec, *, progress):
        raise error

    monkeypatch.setattr(loading, "load_ensemble", load)


def test_unexpected_error_is_one_line_and_how_to_see_more(monkeypatch):
    monkeypatch.delenv("SAFE_LLM_DEBUG", raising=False)
    _explode(monkeypatch, ZeroDivisionError("by\nzero\x1b[1m"))
    result = run("generate", "x")
    assert result.code == 1
    assert result.error_lines == [
        "error: unexpected ZeroDivisionError: by zero\\x1b[1m",
        "hint: run with SAFE_LLM_DEBUG=1 for the traceback",
    ]


def test_debug_variable_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("SAFE_LLM_DEBUG", "1")
    _explode(monkeypatch, ZeroDivisionError("by zero"))
    assert "Traceback (most recent call last)" in run("generate", "x").stderr


# ---------------------------------------------------------------------- the rest of the surface


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["inspect"], ["models"], ["models", "rm"]])
def test_help_everywhere(command, flag):
    result = run(*command, flag)
    assert result.code == 0
    assert result.stdout.startswith(b"Usage: safe-llm")
    assert result.stderr == ""


def test_no_command_shows_the_help():
    assert run().stdout == run("--help").stdout
    assert run("models").stdout == run("models", "--help").stdout


def test_version():
    from safe_llm import __version__

    assert run("--version").stdout.decode() == f"safe-llm {__version__}\n"


def test_output_flags_are_documented_fields():
    assert [field.name for field in fields(OutputFlags)] == ["as_json", "show", "trace", "trace_prompt", "quiet"]


# ---------------------------------------------------------------------- --trace


@pytest.mark.parametrize("flags", [[], ["--json"], ["--show"]])
def test_trace_is_written_beside_the_answer(monkeypatch, tmp_path, flags):
    path = str(tmp_path / "t.jsonl")
    install(monkeypatch, {QUESTION: WRONG}, {QUESTION: RIGHT})
    plain = run("generate", "--weights", "1,3", QUESTION, *flags)
    traced = run("generate", "--weights", "1,3", QUESTION, *flags, "--trace", path)
    shown = [json.loads(r.stdout)["text"] if "--json" in flags else r.stdout.decode() for r in (plain, traced)]
    assert shown == [RIGHT, RIGHT]
    trace = read_trace(path)
    [request] = trace.requests
    assert trace.is_complete
    assert request.result.text == RIGHT
    assert request.points
    assert all(d.tops for r in request.rounds for d in r.decisions)
    assert request.prompt.content is None


def test_trace_prompt_writes_the_prompt_too(monkeypatch, tmp_path):
    path = str(tmp_path / "t.jsonl")
    install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", QUESTION, "--trace", path, "--trace-prompt").code == 0
    assert read_trace(path).requests[0].prompt.content == (Message(role="user", content=QUESTION),)
    result = run("generate", QUESTION, "--trace-prompt")
    assert (result.code, result.error_lines[0]) == (2, "error: --trace-prompt needs --trace")


def test_trace_replaces_what_the_file_held(monkeypatch, tmp_path):
    path = tmp_path / "t.jsonl"
    install(monkeypatch, {QUESTION: RIGHT})
    for _ in range(2):
        assert run("generate", QUESTION, "--trace", str(path)).code == 0
    assert len(read_trace(path).requests) == 1


def test_a_trace_that_cannot_be_written_is_refused_before_loading(monkeypatch, tmp_path):
    refuse_to_load(monkeypatch)
    for path in (tmp_path, tmp_path / "missing" / "t.jsonl"):
        result = run("generate", QUESTION, "--trace", str(path))
        assert (result.code, result.stdout) == (2, b"")
        assert result.error_lines[0].startswith("error: cannot write the trace")


def test_a_full_disk_ends_the_trace_with_an_error(monkeypatch):
    install(monkeypatch, {QUESTION: RIGHT})
    result = run("generate", QUESTION, "--trace", "/dev/full")
    assert result.code == 2
    assert result.error_lines == ["error: cannot write the trace '/dev/full': No space left on device"]


def test_a_trace_goes_into_a_pipe(monkeypatch, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    install(monkeypatch, {QUESTION: RIGHT})
    assert run("generate", QUESTION, "--trace", str(pipe)).code == 0
    reader.join()
    assert json.loads(received[0].splitlines()[-1])["type"] == "result"


def test_chat_traces_every_turn(monkeypatch, tmp_path):
    path = str(tmp_path / "t.jsonl")
    install(monkeypatch, {QUESTION: RIGHT})
    result = run("chat", "--trace", path, stdin=f"{QUESTION}\n/reset\n{QUESTION}\n".encode())
    assert result.stdout.decode() == f"{RIGHT}\n" * 2
    assert [request.result.text for request in read_trace(path).requests] == [RIGHT, RIGHT]

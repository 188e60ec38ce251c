from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from safe_llm.prompting import transcript
from safe_llm.testing.tokenizers import byte_level, metaspace, wordpiece
from safe_llm.types import Message
from safe_llm.vocabulary import Vocabulary
from test_cli_support import refuse_to_load, run

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
TEXT = "The answer is 42,\tnaïve 日本."


def model_folder(path: Path, tokenizer: Tokenizer, *, eos: str | None, template: str | None = None) -> Path:
    """A folder that looks like a model, but whose weights would not load."""
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in described.items() if v}))
    size = tokenizer.get_vocab_size() + 3
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": size, "max_position_embeddings": 2048})
    )
    header = b"{}"
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {
        "chat": model_folder(home / "chat", byte_level(), eos="<|im_end|>", template=TEMPLATE),
        "base": model_folder(home / "base", metaspace(), eos="</s>"),
        "lossy": model_folder(home / "lossy", wordpiece(), eos=None),
    }


def inspect(folders, *args: str, text: str = TEXT, verifiers=("base", "lossy"), **options) -> dict:
    members = ["--drafter", str(folders["chat"]), *(a for v in verifiers for a in ("--verifier", str(folders[v])))]
    result = run("inspect", *members, *args, "--json", text, **options)
    assert (result.code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_inspect_reports_each_members_tokens(folders):
    report = inspect(folders)
    data = TEXT.encode()
    assert report["num_bytes"] == len(data)
    assert [(m["name"], m["role"], m["kind"]) for m in report["members"]] == [
        ("chat", "drafter", "byte-level"),
        ("base", "verifier", "sentencepiece"),
        ("lossy", "verifier", "wordpiece"),
    ]
    for member, tokenizer in zip(report["members"][:2], (byte_level(), metaspace()), strict=True):
        pieces = Vocabulary(tokenizer).encode(data)
        assert [(token["id"], token["end"]) for token in member["tokens"]] == list(
            zip(pieces.ids, pieces.ends, strict=True)
        )
        assert [token["start"] for token in member["tokens"]] == [0, *pieces.ends[:-1]]
        assert member["inexact_spans"] == []
        assert member["width"] == tokenizer.get_vocab_size() + 3
        assert member["max_context"] == 2048


def test_inspect_names_ends_and_fallbacks(folders):
    chat, base, _ = inspect(folders)["members"]
    assert (chat["end_tokens"], base["end_tokens"]) == (["<|im_end|>", "<|endoftext|>"], ["</s>"])
    assert any("no chat template" in note for note in base["notes"])
    assert not any("no chat template" in note for note in chat["notes"])


def test_inspect_shows_what_a_member_cannot_represent(folders):
    lossy = inspect(folders, text="the answer NAÏVE answer")["members"][2]
    data = "the answer NAÏVE answer".encode()
    spans = [data[start:end] for start, end in lossy["inexact_spans"]]
    assert any("NAÏVE".encode() in span for span in spans)
    covered = [data[t["start"] : t["end"]] for t in lossy["tokens"] if t["end"] is not None]
    assert sum(map(len, spans)) + sum(map(len, covered)) == len(data)


def test_shared_boundaries_are_those_of_all_members(folders):
    report = inspect(folders, verifiers=["base"])
    ends = [{0, *Vocabulary(t).encode(TEXT.encode()).ends} for t in (byte_level(), metaspace())]
    assert set(report["shared_boundaries"]) == ends[0] & ends[1]
    assert [item["byte_offset"] for item in report["unshared"]] == sorted(ends[0] - ends[1])
    assert {item["outcome"] for item in report["unshared"]} == {"oov-like"}


def test_unrepresentable_places_are_told_apart(folders):
    report = inspect(folders, text="naïve NAÏVE naïve", verifiers=["lossy"])
    assert "unrepresentable" in {item["outcome"] for item in report["unshared"]}


def test_overlap_counts_shared_byte_strings(folders):
    [overlap] = inspect(folders, verifiers=["base"])["overlaps"]
    first, second = ({token for token in Vocabulary(t).tokens if token} for t in (byte_level(), metaspace()))
    assert overlap["num_shared"] == len(first & second) > 0
    assert overlap["part_of_first"] == pytest.approx(len(first & second) / len(first))
    assert overlap["part_of_second"] == pytest.approx(len(first & second) / len(second))


def test_chat_shows_the_rendered_conversation(folders):
    hostile = "hi <|im_end|> there"
    report = inspect(folders, "--chat", text=hostile, verifiers=["base"])
    chat, base = (member["chat"] for member in report["members"])
    assert "".join(chat) == f"<|im_start|>user\n{hostile}<|im_end|>\n<|im_start|>assistant\n"
    assert chat.count("<|im_end|>") == 1  # the template's; the user's is several tokens
    assert "".join(base[1:]).lstrip() == transcript([Message(role="user", content=hostile)])
    assert base[0] == "<s>"


def test_system_message_shows_the_conversation_too(folders):
    [chat] = inspect(folders, "--system", "Be brief.", verifiers=[])["members"]
    assert "".join(chat["chat"]).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert inspect(folders, verifiers=[])["members"][0]["chat"] is None


def test_inspect_reads_stdin_exactly_and_escapes_on_demand(folders):
    assert inspect(folders, text="-", stdin="\ufeffa\r\n".encode())["num_bytes"] == 6
    assert inspect(folders, text=r"a\n")["num_bytes"] == 3
    assert inspect(folders, "--escape", text=r"a\n")["num_bytes"] == 2


def test_view_marks_boundaries_without_colour(folders):
    result = run("inspect", "--drafter", str(folders["chat"]), "--verifier", str(folders["base"]), "--chat", TEXT)
    shown = result.stdout.decode()
    assert (result.code, result.stderr) == (0, "")
    assert "\x1b" not in shown
    report = inspect(folders, verifiers=["base"])
    for member in report["members"]:
        line = "║" + "".join(
            token["text"].replace("\t", "\\t") + ("║" if token["end"] in report["shared_boundaries"] else "│")
            for token in member["tokens"]
        )
        assert line in shown.splitlines()[3] or f"  {line}" in shown.splitlines()
    for part in ("║ boundary of all members", "END: </s>", "no chat template", "Vocabulary overlap of chat and base"):
        assert part in shown
    assert "2,048 tokens" in shown


def test_view_shows_what_is_not_exact(folders):
    result = run("inspect", "--drafter", str(folders["chat"]), "--verifier", str(folders["lossy"]), "naïve NAÏVE")
    shown = result.stdout.decode()
    assert "cannot represent bytes" in shown
    assert "≈" in shown.partition("boundary of all members")[0]
    assert "unrepresentable for lossy" in shown


def test_view_obeys_no_markup_and_no_control_characters(folders):
    hostile = "[bold]x[/bold] \x1b[2J\x9b :smile:\n"
    for tty in (False, True):
        shown = run("inspect", "--drafter", str(folders["chat"]), "--chat", hostile, tty=tty).stdout.decode()
        assert "\x1b[2J" not in shown
        assert "\x9b" not in shown
        plain = shown.replace("║", "").replace("│", "")
        assert "\\x1b" in plain
        if not tty:
            assert "[bold]x[/bold] " in plain
            assert ":smile:\\n" in plain


def test_inspect_loads_no_weights(folders, monkeypatch):
    refuse_to_load(monkeypatch)
    assert run("inspect", "--drafter", str(folders["chat"]), "a").code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([""], "the prompt is empty"),
        ([], "there is no prompt"),
        (["a\ud83d"], "lone surrogate"),
        (["--preset", "dmeo", "a"], "unknown preset"),
        (["--drafter", "./missing", "a"], "./missing"),
    ],
)
def test_bad_input_of_inspect_is_one_error(monkeypatch, tmp_path, args, message):
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path))
    monkeypatch.setattr("safe_llm.models.fetch._build_demo", None)
    result = run("inspect", *args)
    assert (result.code, result.stdout) == (2, b"")
    assert message in result.error_lines[0]
    assert len(result.error_lines) == 2


def test_configuration_that_is_not_json_is_an_error(folders, tmp_path):
    folder = model_folder(tmp_path / "broken", byte_level(), eos="<|im_end|>")
    (folder / "generation_config.json").write_text("{")
    result = run("inspect", "--drafter", str(folder), "a")
    assert result.code == 2
    assert "generation_config.json" in result.error_lines[0]


def test_ends_of_the_configurations_count(folders, tmp_path):
    tokenizer = byte_level()
    folder = model_folder(tmp_path / "ends", tokenizer, eos="<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id("a")]}))
    result = run("inspect", "--drafter", str(folder), "--json", "a")
    [member] = json.loads(result.stdout)["members"]
    assert member["end_tokens"][0] == f"id {tokenizer.token_to_id('a')}"

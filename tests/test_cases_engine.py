"""Cases from public reports that the engine, or loading, could equally suffer from."""

from __future__ import annotations

import json

import numpy as np
import pytest

import reference
from helpers import QUESTION, ensemble, tiny_folder, tiny_member
from safe_llm import Ensemble, EnsembleConfig, MemberConfig
from safe_llm.backends.loading import load_model
from safe_llm.errors import ModelError, UnknownNameError
from safe_llm.testing import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, characters, metaspace


@pytest.mark.parametrize("order", [("llama", "gpt2"), ("gpt2", "llama")])
def test_rotary_and_absolute_positions_in_one_ensemble(order):
    # D02: each member has its own positions, masks and lengths
    tokenizers = (byte_level, metaspace)
    members = [
        tiny_member(str(i), make(), seed=i + 3, architecture=kind)
        for i, (make, kind) in enumerate(zip(tokenizers, order, strict=True))
    ]
    expected = reference.generate(members, QUESTION, EnsembleConfig(), 40)
    result = ensemble(*members).generate([QUESTION, "x"], max_tokens=40)[0]
    assert result.text == expected.text.decode("utf-8", errors="replace")


def test_drafters_ids_are_kept_as_generated():
    # A20: "h" "i" "h" "i" is not how the tokenizer would write "hihi"; re-encoding is for the other members only
    tokenizer = characters(["hi"])
    single = {tokenizer.id_to_token(i): i for i in range(tokenizer.get_vocab_size())}
    ids = [single[c] for c in "hihi"]
    prompt = tokenizer.encode("Who?").ids

    def script(vocabulary):
        def next_logits(row):
            at = len(row) - len(prompt)
            logits = np.full(vocabulary.width, -5.0)
            logits[ids[at] if 0 <= at < len(ids) else vocabulary.symbols.end_id] = 5.0
            return logits

        return next_logits

    drafter = scripted_member("d", tokenizer, script)
    verifier = scripted_member("v", characters(["hi", "hihi"]), {"Who?": "hihi"})
    result = ensemble(drafter, verifier).generate("Who?", logprobs=0)
    assert result.text == "hihi"
    assert [entry.token for entry in result.logprobs] == [b"h", b"i", b"h", b"i", b""]
    fed = [i for call in drafter.backend.calls for feed in call for i in feed.ids]
    assert tokenizer.token_to_id("hi") not in fed


def test_number_of_answers_is_refused_and_not_ignored():
    # F18, G10
    with pytest.raises(UnknownNameError, match="unknown parameter 'n'"):
        scripted_ensemble({"Who?": "x"}).generate("Who?", n=3)


def test_enormous_max_tokens_is_bounded_by_the_context_window():
    # G10
    members = [
        scripted_member("a", byte_level(), {"Who?": "again " * 400}, max_context=64),
        scripted_member("b", metaspace(), {"Who?": "again " * 400}),
    ]
    result = ensemble(*members).generate("Who?", max_tokens=10**9)
    assert result.finish_detail == "context"
    assert result.usage.total_tokens <= 64


@pytest.mark.parametrize("model_type", ["llama", "never-heard-of"])
def test_code_that_ships_with_a_model_does_not_run(tmp_path, model_type):
    # G04
    folder = tiny_folder(tmp_path / "m")
    ran = tmp_path / "ran"
    (folder / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: ...\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    member = MemberConfig(model=str(folder), dtype="float32")
    assert member.trust_remote_code is False
    if model_type == "llama":
        load_model(folder, config=member, device="cpu")
    else:
        with pytest.raises(ModelError):
            load_model(folder, config=member, device="cpu")
    assert not ran.exists()


def test_errors_and_reprs_hold_no_prompt_text():
    # G08
    secret = "hunter2-is-my-password"
    members = [scripted_member(n, t(), {"x": "y"}, max_context=20) for n, t in (("a", byte_level), ("b", metaspace))]
    safe = ensemble(*members)
    with pytest.raises(Exception, match="prompt is") as caught:
        safe.generate(secret * 40)
    assert secret not in str(caught.value) + repr(caught.value) + repr(safe)


@pytest.mark.parametrize("name", ["../secret", "..", "a/../../b/c", "/etc"])
def test_member_names_cannot_leave_the_store(name, monkeypatch, tmp_path):
    # G06
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path))
    with pytest.raises((ModelError, UnknownNameError)):
        Ensemble.from_pretrained(name, progress=False)

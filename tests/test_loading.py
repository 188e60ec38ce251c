"""From folders on disk to an answer: the whole path of `from_pretrained`, on tiny models."""

from __future__ import annotations

import pytest

import reference
from helpers import QUESTION, tiny_folder, tiny_member
from safe_llm import Ensemble, EnsembleConfig, EnsembleSpec, MemberConfig
from safe_llm.errors import ConfigError, ModelCorruptError, ModelNotFoundError
from safe_llm.testing.tokenizers import byte_level, metaspace

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("SAFE_LLM_HOME", str(tmp_path / "home"))


def test_folders_become_an_ensemble_that_agrees_with_the_reference(tmp_path):
    drafter = tiny_folder(tmp_path / "drafter", byte_level(), seed=7, template=CHATML)
    verifier = tiny_folder(tmp_path / "verifier", metaspace(), seed=8)
    members = [MemberConfig(model=str(path), dtype="float32") for path in (drafter, verifier)]
    safe = Ensemble.from_pretrained(members[0], [members[1]], progress=False)
    twins = [tiny_member("drafter", byte_level(), seed=7), tiny_member("verifier", metaspace(), seed=8)]
    expected = reference.generate(twins, QUESTION, EnsembleConfig(), 30)
    assert safe.generate(QUESTION, max_tokens=30).text == expected.text.decode("utf-8", errors="replace")
    assert [m.name for m in safe.members] == ["drafter", "verifier"]
    assert safe.members[0].prompter.notes != safe.members[1].prompter.notes
    chat = safe.generate([{"role": "user", "content": "hi"}], max_tokens=4)
    assert chat.usage.completion_tokens <= 4


def test_spec_from_toml_loads_with_its_options(tmp_path):
    tiny_folder(tmp_path / "m")
    (tmp_path / "ensemble.toml").write_text(
        f"""
[drafter]
model = "{tmp_path / "m"}"
name = "one"
dtype = "float32"
[[verifiers]]
model = "{tmp_path / "m"}"
name = "two"
dtype = "float32"
max_context = 64
[ensemble]
lookahead = 3
[sampling]
max_tokens = 5
"""
    )
    safe = Ensemble.from_spec(EnsembleSpec.from_toml(tmp_path / "ensemble.toml"), progress=False, method="gac")
    assert safe.max_context == 64
    assert (safe.config.lookahead, safe.config.method) == (3, "gac")
    assert safe.generate(QUESTION).usage.completion_tokens <= 5


def test_fingerprint_follows_weights_and_dtype(tmp_path):
    first, second = (tiny_folder(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    load = Ensemble.from_pretrained
    one = load(MemberConfig(model=str(first), name="m", dtype="float32"), progress=False)
    other = load(MemberConfig(model=str(second), name="m", dtype="float32"), progress=False)
    half = load(MemberConfig(model=str(first), name="m", dtype="bfloat16"), progress=False)
    assert len({one.fingerprint, other.fingerprint, half.fingerprint}) == 3


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), ModelCorruptError),
        (lambda f: (f / "tokenizer.json").write_text("{"), ModelCorruptError),
        (lambda f: (f / "config.json").write_text("{"), ModelCorruptError),
    ],
)
def test_damaged_folder_is_one_clear_error(tmp_path, damage, error):
    folder = tiny_folder(tmp_path / "m")
    damage(folder)
    with pytest.raises(error) as caught:
        Ensemble.from_pretrained(folder, progress=False)
    assert caught.value.hint


def test_missing_folder_and_equal_names(tmp_path):
    with pytest.raises(ModelNotFoundError):
        Ensemble.from_pretrained("./nowhere", progress=False)
    folder = tiny_folder(tmp_path / "m")
    with pytest.raises(ConfigError, match="two members are called 'm'"):
        Ensemble.from_pretrained(folder, [folder], progress=False)

"""Configuration: what is refused, which name is suggested, TOML files, weights, presets."""

from __future__ import annotations

import pytest

from safe_llm.config import PRESETS, EnsembleConfig, EnsembleSpec, MemberConfig, preset
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError, UnknownNameError
from safe_llm.testing.members import scripted_ensemble, scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("lookahead", value) for value in (0, -1, 65, 2.5, "many", None, float("nan"))],
        *[("consensus_threshold", value) for value in (-0.1, 1.1, float("nan"), float("inf"), "half")],
        *[("sharpening_threshold", value) for value in (-0.1, 1.1, float("nan"), float("inf"))],
        *[("top_k", value) for value in (0, -5, 1001, 0.01, 9_999_999)],
        *[("max_batch_size", value) for value in (0, -1, 1025)],
        *[("weights", value) for value in ("1", 1.0, ["a"], [float("nan"), 1.0], [float("inf"), 1.0])],
        ("mode", 5), ("method", None), ("sharpening", 1.0),
    ],
)  # fmt: skip
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        EnsembleConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert "got" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"looakhead": 5}, "lookahead"),
        ({"weight": [1, 2]}, "weights"),
        ({"threshold": 0.5}, "consensus_threshold"),
        ({"mode": "saf"}, "safe"),
        ({"mode": "every_token"}, "every-token"),
        ({"method": "untie"}, "unite"),
        ({"method": "prefix_mass"}, "prefix-mass"),
        ({"sharpening": "geometrical"}, "geometric"),
    ],
)
def test_unknown_name_suggests_the_nearest(values, meant):
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        EnsembleConfig(**values)
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        EnsembleConfig().updated(values)


def test_defaults_are_the_papers_but_for_the_method_and_the_lookahead():
    config = EnsembleConfig()
    assert (config.mode, config.method, config.lookahead, config.consensus_threshold) == (
        "safe",
        "auto",
        "adaptive",
        0.5,
    )
    assert (config.sharpening, config.sharpening_threshold, config.top_k, config.weights) == ("prefix", 0.1, 10, None)


def test_whole_numbers_are_numbers():
    # F08
    config = EnsembleConfig(consensus_threshold=1, sharpening_threshold=0, weights=[1, 2])
    assert (config.consensus_threshold, config.sharpening_threshold, config.weights) == (1.0, 0.0, (1.0, 2.0))


def test_none_leaves_a_value_as_it_is():
    # F03
    config = EnsembleConfig(lookahead=7, weights=(1.0, 3.0))
    assert config.updated({"lookahead": None, "mode": None, "weights": None}) == config
    assert config.updated({"lookahead": 2}).lookahead == 2
    assert config.updated({}).weights == (1.0, 3.0)


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, (0.5, 0.5)),
        ((1, 3), (0.25, 0.75)),
        ((2.0, 2.0), (0.5, 0.5)),
        ((1e308, 1e308), (0.5, 0.5)),
        ((5e-324, 5e-324), (0.5, 0.5)),
    ],
)
def test_weights_are_scaled_to_sum_one(weights, expected):
    assert EnsembleConfig(weights=weights).normalized_weights(2) == pytest.approx(expected)


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_weights_that_do_not_fit_the_members_are_refused(weights):
    with pytest.raises(ConfigError, match=f"{len(weights)} weights for 2 members"):
        EnsembleConfig(weights=weights).normalized_weights(2)
    with pytest.raises(ConfigError, match="weights for 2 members"):
        scripted_ensemble({"q": "a"}, weights=weights)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (-1.0, 2.0)])
def test_weights_that_are_not_positive_are_refused(weights):
    with pytest.raises(ConfigError, match="positive"):
        EnsembleConfig(weights=weights).normalized_weights(2)


# ---------------------------------------------------------------------- members


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "model: Field required"),
        ({"model": ""}, "model"),
        ({"model": "x", "name": ""}, "name"),
        ({"model": "x", "dtype": "fp8"}, "dtype"),
        ({"model": "x", "max_context": 1}, "max_context"),
        ({"model": "x", "device": "cpu", "device_map": "auto"}, "device or device_map, not both"),
        ({"model": 5}, "model"),
    ],
)
def test_member_that_is_not_valid_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        MemberConfig(**values)


def test_unknown_member_key_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'device'"):
        MemberConfig(model="x", devcie="cpu")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/name", "name"), ("/a/b/", "b"), ("x.Q4_1.gguf", "x.Q4_1"), ("qwen", "qwen"), (".", "."), ("/", "/"),
    ],
)  # fmt: skip
def test_member_is_called_after_its_model(model, name):
    assert MemberConfig(model=model).display_name == name
    assert MemberConfig(model=model, name="mine").display_name == "mine"


def test_two_members_of_one_name_are_refused():
    members = [scripted_member("same", make(), {"q": "a"}) for make in (byte_level, metaspace)]
    with pytest.raises(ConfigError, match="two members are called 'same'"):
        Ensemble(members)
    with pytest.raises(ConfigError, match="at least one member"):
        Ensemble([])


def test_configuration_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        EnsembleConfig().lookahead = 3


# ---------------------------------------------------------------------- presets and files


def test_presets_are_known_by_name():
    assert preset("demo") is PRESETS["demo"]
    assert [m.model for m in preset("demo3").members] == [
        "qwen2.5-coder-0.5b-instruct",
        "smollm2-135m-instruct",
        "gemma-3-270m",
    ]
    with pytest.raises(UnknownNameError, match="did you mean 'demo"):
        preset("dem")
    with pytest.raises(UnknownNameError, match="unknown preset"):
        Ensemble.from_preset("nothing of the kind")


TOML = """
[drafter]
model = "owner/a"
device = "cpu"
template_kwargs = { enable_thinking = false }

[[verifiers]]
model = "owner/b"
name = "second"

[ensemble]
method = "prefix-mass"
weights = [2, 1]

[sampling]
max_tokens = 32
stop = ["\\n\\n"]
"""


def spec_of(tmp_path, text: str) -> EnsembleSpec:
    path = tmp_path / "ensemble.toml"
    path.write_text(text, encoding="utf-8")
    return EnsembleSpec.from_toml(path)


def test_toml_file_describes_an_ensemble(tmp_path):
    spec = spec_of(tmp_path, TOML)
    assert [m.display_name for m in spec.members] == ["a", "second"]
    assert spec.drafter.template_kwargs == {"enable_thinking": False}
    assert spec.ensemble == EnsembleConfig(method="prefix-mass", weights=(2.0, 1.0))
    assert spec.sampling == {"max_tokens": 32, "stop": ["\n\n"]}


def test_toml_file_of_a_drafter_alone_has_defaults(tmp_path):
    spec = spec_of(tmp_path, '[drafter]\nmodel = "a"\n')
    assert (spec.verifiers, spec.ensemble, spec.sampling) == ((), EnsembleConfig(), {})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[drafter]", "[draftr]", "did you mean 'drafter'"),
        ("[[verifiers]]", "[[verifier]]", "did you mean 'verifiers'"),
        ("[ensemble]", "[ensembles]", "did you mean 'ensemble'"),
        ("device =", "devices =", "did you mean 'device'"),
        ('name = "second"', 'nam = "second"', "did you mean 'name'"),
        ("weights =", "wieghts =", "did you mean 'weights'"),
        ("max_tokens", "max_token", "did you mean 'max_tokens'"),
        ("max_tokens = 32", "max_tokens = 0", "max_tokens must be a whole number at least 1"),
        ('"prefix-mass"', '"prefixmass"', "did you mean 'prefix-mass'"),
        ("weights = [2, 1]", "weights = [2]", "1 weights for 2 members"),
        ("[[verifiers]]", "[verifiers]", "verifiers"),
        ("[drafter]", "[drafter", "is not valid TOML"),
        ('model = "owner/a"', "", "model: Field required"),
        ('[drafter]\nmodel = "owner/a"', 'drafter = "owner/a"\n[ensemble2]', "unknown parameter 'ensemble2'"),
        (
            '[drafter]\nmodel = "owner/a"\ndevice = "cpu"\ntemplate_kwargs = { enable_thinking = false }',
            'drafter = "a"',
            "drafter: ",
        ),
    ],
)
def test_mistake_in_a_toml_file_is_one_clear_error(tmp_path, old, new, words):
    assert old in TOML
    with pytest.raises(ConfigError, match=words):
        spec_of(tmp_path, TOML.replace(old, new, 1))


def test_toml_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        EnsembleSpec.from_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        EnsembleSpec.from_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[drafter]\nmodel = "\xe9"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        EnsembleSpec.from_toml(tmp_path / "latin.toml")


def test_options_change_the_configuration_of_a_spec():
    spec = EnsembleSpec(drafter=MemberConfig(model="a"), verifiers=(MemberConfig(model="b"),))
    with pytest.raises(UnknownNameError, match="did you mean 'lookahead'"):
        Ensemble.from_spec(spec, lookahed=3)
    with pytest.raises(ConfigError, match="3 weights for 2 members"):
        Ensemble.from_spec(spec, weights=(1, 1, 1))
    with pytest.raises(UnknownNameError, match="did you mean 'max_tokens'"):
        Ensemble.from_spec(spec.model_copy(update={"sampling": {"max_tokes": 1}}))


def test_dtype_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'bfloat16'"):
        MemberConfig(model="m", dtype="bfloat")


def test_server_that_names_fewer_tokens_than_the_union_takes_is_refused():
    there = {"model": "b", "backend": "vllm", "server": {"url": "http://127.0.0.1:8000", "top_k": 9}}
    spec = {"drafter": {"model": "a"}, "verifiers": [there]}
    with pytest.raises(ConfigError, match=r"'b' is asked for 9 tokens a position .* puts 10 into the union"):
        EnsembleSpec.from_mapping(spec)
    for settings in ({"top_k": 9}, {"method": "gac"}):
        EnsembleSpec.from_mapping({**spec, "ensemble": settings})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "llama-cpp", "device_map": "auto"}, "backend 'llama-cpp' has no device_map"),
        ({"backend": "llama-cpp", "cuda_graphs": True}, "backend 'llama-cpp' has no cuda_graphs"),
        ({"num_threads": 2}, "backend 'transformers' has no num_threads"),
        ({"backend": "llama-cpp", "num_threads": 0}, "greater than or equal to 1"),
    ],
)
def test_options_of_another_backend_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        MemberConfig(model="m", **values)
    assert MemberConfig(model="m", backend="llama-cpp", num_threads=2).num_threads == 2

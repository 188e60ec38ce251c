"""A member on a vLLM server: the protocol, every way in which a server can fail, and whole ensembles."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from model_servers import ModelServer, changed, dies, raw, status, waits
from remote_support import member_config, model_folder, opened, remote_member
from safe_llm.backends import endpoint as endpoint_module
from safe_llm.backends.base import Feed
from safe_llm.backends.endpoint import Endpoint
from safe_llm.backends.remote import RemoteBackend
from safe_llm.backends.vllm import VLLMServer
from safe_llm.config import EnsembleConfig, ServerConfig
from safe_llm.ensemble import Ensemble
from safe_llm.errors import (
    ConfigError,
    GenerationError,
    MemberError,
    ModelAccessError,
    ModelCorruptError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from safe_llm.testing import BackendConformance, answering, plain_symbols, scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace
from safe_llm.vocabulary import Vocabulary

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

WIDTH = 40
SYMBOLS = plain_symbols(WIDTH, end_ids=(2, 5), unusable=(0, 39))
KEY = "sk-very-secret"


def hashed_logits(ids):
    return np.random.default_rng(ids).normal(size=WIDTH)


def connected(server, *, top_k=64, tokens_per_call=4, sleep=None, **options):
    settings = ServerConfig(url=server.url, top_k=top_k, **{"timeout_s": 20.0, "max_retries": 0, **options})
    endpoint = Endpoint("there", settings, sleep=sleep or (lambda seconds: None))
    backend = RemoteBackend(VLLMServer(endpoint, "tiny", top_k), SYMBOLS, tokens_per_call=tokens_per_call)
    server.calls.clear()
    server.headers.clear()
    return backend


@pytest.fixture
def server():
    with ModelServer(hashed_logits) as running:
        yield running


class TestVLLMBackend(BackendConformance):
    def make_backend(self):
        self.server = ModelServer(hashed_logits).__enter__()
        return connected(self.server), SYMBOLS

    def teardown_method(self):
        self.server.__exit__()


# ---------------------------------------------------------------------- what is asked


def test_call_reads_the_prefix_cache_and_asks_for_what_is_needed(server):
    backend = connected(server, top_k=3, api_key=KEY)
    row = backend.open()
    backend.forward([Feed(row=row, ids=[7] * 9)])
    backend.forward([Feed(row=row, ids=[8, 9], keep=3 - 1)]).top1()
    prefill, verify = server.calls
    assert verify["token_ids"] == [7] * 9 + [8, 9]
    assert verify["sampling_params"] == {
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 3,
        "detokenize": False,
        "prompt_logprobs": 3,
        "skip_reading_prefix_cache": False,
    }
    assert "prompt_logprobs" not in prefill["sampling_params"]
    assert backend.num_computed == 9 + 3  # blocks of 4: 8 of 11 ids were there
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert len({headers["X-Session-ID"] for headers in server.headers}) == 1


def test_positions_inside_of_the_cached_part_are_computed_anew(server):
    backend = connected(server)
    first, second = backend.open(), backend.open()
    text = [int(i) for i in np.arange(6, 22)]
    wanted = backend.forward([Feed(row=first, ids=text, keep=12)]).logits([0, 5], [7, 8])
    found = backend.forward([Feed(row=second, ids=text, keep=12)]).logits([0, 5], [7, 8])
    np.testing.assert_allclose(found, wanted)
    skips = [call["sampling_params"]["skip_reading_prefix_cache"] for call in server.calls]
    assert skips == [False, False, True]


def test_rows_that_hold_nothing_and_cannot_be_written_are_asked_for_anew(server):
    backend = connected(server)
    nan = {"error": {"message": "Out of range float values are not JSON compliant", "code": 400}}
    for number, fault in enumerate((status(500), status(400, nan)), 1):
        server.faults = [fault]
        assert backend.forward([Feed(row=backend.open(), ids=[7, 8], keep=2)]).top1()[1].all()
        assert len(server.calls) == 2 * number
    server.faults = [status(500), status(500)]
    with pytest.raises(MemberError, match="status 500"):
        backend.forward([Feed(row=backend.open(), ids=[7, 8], keep=2)]).top1()


def test_rows_that_are_left_out_are_counted_from_the_end(server):
    backend = connected(server)  # as the runner with Triton does
    row, other = backend.open(), backend.open()
    text = list(range(6, 16))
    wanted = backend.forward([Feed(row=row, ids=text, keep=2)]).logits([0, 1], [7, 8])
    server.faults = [changed(lambda reply: reply["prompt_logprobs"].__delitem__(slice(1, 9)))]
    found = backend.forward([Feed(row=other, ids=text, keep=2)]).logits([0, 1], [7, 8])
    np.testing.assert_allclose(found, wanted)


# ---------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raw(b"<html>"), "no JSON"),
        (raw(b"[" * 100_000), "no JSON"),
        (raw(b"[]"), "in another form"),
        (raw(b"{}"), "in another form"),
        (changed(lambda reply: reply.update(choices=[])), "in another form"),
        (changed(lambda reply: reply.update(usage={"prompt_tokens": 3})), "in another form .*enable-prompt-tokens"),
        (changed(lambda reply: reply["usage"].update(prompt_tokens=2)), "read 2 ids where 3 were sent"),
        (changed(lambda reply: reply.update(prompt_logprobs=[None])), "fewer positions than asked for"),
        (changed(lambda reply: reply["prompt_logprobs"].reverse()), "in another form"),
        (changed(lambda reply: reply["prompt_logprobs"][2].pop("9")), "other ids than were sent, from number 2"),
        (changed(lambda reply: reply["prompt_logprobs"][2]["9"].update(logprob=float("nan"))), "NaN or infinite"),
        (changed(lambda reply: reply["choices"][0].update(token_ids=[1, 1])), "other ids than it generated"),
        (dies(after=30), "broke off in the middle"),
        (dies(after=0), "no connection to its server"),
        (status(400), "refuses a call with status 400"),
        (status(404), "status 404 .*enable-scale-out"),
        (status(401), "refuses the key .status 401"),
        (status(503), "too busy: status 503 after 1 tries"),
        (
            status(
                400, {"error": {"message": "Requested prompt logprobs of 64, which is greater than max allowed: 20"}}
            ),
            "names at most 20 ids .*--max-logprobs 64",
        ),
    ],
)
def test_a_server_that_fails_is_one_clear_error_and_the_next_call_works(server, fault, message):
    backend = connected(server, api_key=KEY, top_k=64)
    row = backend.open()
    server.faults = [fault]
    scores = backend.forward([Feed(row=row, ids=[7, 8, 9], keep=2)])
    with pytest.raises(MemberError, match=message) as caught:
        scores.top1()
    assert "there" in str(caught.value)
    assert KEY not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"  # G08
    assert "secret" not in str(caught.value)
    assert backend.forward([Feed(row=row, ids=[10])]).top1()[1].all()


def test_a_server_that_hangs_is_an_error_that_says_for_how_long(server):
    backend, release = connected(server, timeout_s=0.2), threading.Event()
    server.faults = [waits(release)]
    scores = backend.forward([Feed(row=backend.open(), ids=[7])])
    host = server.url.removeprefix("http://")
    with pytest.raises(MemberError, match=f"'there'.*{host} did not answer within 0.2 seconds .*timeout_s"):
        scores.top1()
    release.set()


def test_an_answer_that_drips_or_never_ends_is_cut_off(server, monkeypatch):
    backend = connected(server)
    monkeypatch.setattr(endpoint_module, "_MOST_BYTES", 10)
    with pytest.raises(MemberError, match="answers more than 10 bytes"):
        backend.forward([Feed(row=backend.open(), ids=[7])]).top1()
    monkeypatch.setattr(endpoint_module.time, "monotonic", iter([0.0, 21.0]).__next__)
    with pytest.raises(MemberError, match="within 20 seconds"):
        backend.forward([Feed(row=backend.open(), ids=[7])]).top1()


def test_busy_servers_and_lost_connections_are_tried_again(server):
    pauses = []
    backend = connected(server, max_retries=3, sleep=pauses.append)
    server.faults = [status(429, Retry_After="7"), dies(after=0), status(503, Retry_After="900")]
    assert backend.forward([Feed(row=backend.open(), ids=[7])]).top1()[1].all()
    assert pauses == [7.0, 0.5, 20.0]
    assert len(server.calls) == 4
    server.faults = [status(502, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT")] * 4
    with pytest.raises(MemberError, match="status 502 after 4 tries"):
        backend.forward([Feed(row=backend.open(), ids=[7])]).top1()
    server.faults = [status(400)]
    with pytest.raises(MemberError, match="status 400"):
        backend.forward([Feed(row=backend.open(), ids=[7])]).top1()
    assert len(server.calls) == 9


# ---------------------------------------------------------------------- opening


def toy(answers):
    tokenizer = metaspace()
    end = tokenizer.token_to_id("</s>")
    return tokenizer, answering(Vocabulary(tokenizer, end_ids=[end]), answers), end


ANSWERS = {"Who?": "Mr Black, of course, and 12 friends of his."}


@pytest.fixture
def toy_server():
    tokenizer, next_logits, _ = toy(ANSWERS)
    with ModelServer(next_logits, tokenizer=tokenizer, context=400) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    tokenizer, _, end = toy(ANSWERS)
    return model_folder(tmp_path / "toy", tokenizer, [end])


def test_opening_says_what_the_model_is(toy_server, folder):
    model = opened(member_config(toy_server, folder))
    assert model.width == 513
    assert model.end_ids == [2]
    assert (model.identity, model.device) == (f"vllm:{toy_server.url}:tiny", toy_server.url)
    wider = model_folder(folder, metaspace(), [2], text_config={"vocab_size": 600, "eos_token_id": 7})
    model = opened(member_config(toy_server, wider))
    assert (model.width, model.end_ids) == (600, [2, 7])


def test_another_tokenizer_is_refused_with_the_first_difference(toy_server, folder):
    byte_level().save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match=r"token 0 of a test text is \d+ there and \d+ here"):
        opened(member_config(toy_server, folder))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "other"}, ModelNotFoundError, r"serves \['tiny'\], not 'other'"),
        ({"url": "http://127.0.0.1:9"}, ModelAccessError, "no connection to its server at 127.0.0.1:9"),
        ({"url": "/nowhere"}, UnsupportedModelError, "/v1/models with status 404"),
        ({"api_key": "line\nbreak"}, ConfigError, "no HTTP header can hold"),
    ],
)
def test_servers_that_cannot_be_used_are_refused(toy_server, folder, change, error, message):
    if change.get("url", "").startswith("/"):
        change = {"url": toy_server.url + change["url"]}
    with pytest.raises(error, match=message):
        opened(member_config(toy_server, folder, **change))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (status(404), UnsupportedModelError, "start vLLM 0.32 or later with --enable-scale-out"),
        (status(403), ModelAccessError, "set server.api_key"),
        (
            status(400, {"error": {"message": "Requested sample logprobs of 9, which is greater than max allowed: 5"}}),
            ConfigError,
            "start it with --max-logprobs 1000",
        ),
    ],
)
def test_what_a_server_lacks_is_said_when_it_is_opened(toy_server, folder, fault, error, message):
    toy_server.faults = [fault]
    with pytest.raises(error, match=message):
        opened(member_config(toy_server, folder))


def test_servers_of_another_kind_are_refused(toy_server, folder, monkeypatch):
    for models, message in (({"data": 3}, "does not list its models"), ({"data": [{"id": "tiny"}]}, "no vLLM server")):
        monkeypatch.setattr(toy_server, "answer", lambda path, body, models=models: models)
        with pytest.raises(UnsupportedModelError, match=message):
            opened(member_config(toy_server, folder))
    monkeypatch.undo()
    answer = toy_server.answer
    monkeypatch.setattr(toy_server, "answer", lambda path, body: {} if path == "/tokenize" else answer(path, body))
    with pytest.raises(MemberError, match="answers /tokenize in another form"):
        opened(member_config(toy_server, folder))


def test_folders_that_do_not_say_enough_are_refused(toy_server, folder):
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelCorruptError, match="does not say vocab_size"):
        opened(member_config(toy_server, folder))
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelCorruptError, match="cannot be read"):
        opened(member_config(toy_server, folder))


def test_without_httpx_there_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(endpoint_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need httpx.*safe-llm-ensemble\[remote\]"):
        Endpoint("there", ServerConfig(url="http://127.0.0.1:9"))


# ---------------------------------------------------------------------- ensembles


def local(name, tokenizer, answers=ANSWERS):
    return scripted_member(name, tokenizer, answers)


def test_remote_verifier_gives_the_text_of_a_local_one(toy_server, folder):
    config = EnsembleConfig(method="unite", run_ahead=False)
    drafter = {"Who?": "Mr Blue, of course, and 12 friends of his."}
    with Ensemble([local("d", byte_level(), drafter), local("v", metaspace())], config) as ensemble:
        wanted = ensemble.generate("Who?", max_tokens=60)
    there = remote_member(member_config(toy_server, folder), metaspace())
    with Ensemble([local("d", byte_level(), drafter), there], config) as ensemble:
        found = ensemble.generate("Who?", max_tokens=60)
    assert found.text == wanted.text
    assert there.backend.num_calls == there.backend.num_forwards > 1
    computed = there.backend.num_sent - there.backend.num_computed
    assert computed > 0, "the prefix cache was never read"


def test_remote_drafter_gives_the_text_of_a_local_one_with_fewer_calls(toy_server, folder):
    config = EnsembleConfig(method="unite", lookup=False)
    verifier = {"Who?": "Mr Black, of course, and 13 friends of his."}
    with Ensemble([local("d", metaspace()), local("v", byte_level(), verifier)], config) as ensemble:
        wanted = ensemble.generate("Who?", max_tokens=60)
        local_passes = ensemble.members[0].backend.num_forwards
    there = remote_member(member_config(toy_server, folder, tokens_per_call=8), metaspace())
    with Ensemble([there, local("v", byte_level(), verifier)], config) as ensemble:
        assert ensemble.generate("Who?", max_tokens=60).text == wanted.text
    assert there.backend.num_calls < local_passes / 2
    assert [call["sampling_params"]["max_tokens"] for call in toy_server.calls].count(8) >= 1


def test_verifiers_are_asked_at_the_same_time(toy_server, folder):
    tokenizer, next_logits, _ = toy(ANSWERS)
    with ModelServer(next_logits, tokenizer=tokenizer, context=400) as second:
        verifiers = [
            remote_member(member_config(server, folder, name), tokenizer)
            for server, name in ((toy_server, "one"), (second, "two"))
        ]
        # every call to one of them waits for a call to the other
        toy_server.meet = second.meet = threading.Barrier(2)
        config = EnsembleConfig(method="unite")
        with Ensemble([local("d", byte_level()), *verifiers], config) as ensemble:
            answer = ensemble.generate("Who?", max_tokens=60)
    assert answer.text == ANSWERS["Who?"]
    assert len(toy_server.calls) == len(second.calls) > 3


def test_a_verifier_that_dies_fails_the_request_and_the_next_one_works(toy_server, folder):
    there = remote_member(member_config(toy_server, folder), metaspace())
    with Ensemble([local("d", byte_level()), there], EnsembleConfig(method="unite")) as ensemble:
        toy_server.faults = [changed(lambda reply: None)] * 2 + [dies(after=0)]
        with pytest.raises(MemberError, match="no connection to its server"):
            ensemble.generate("Who?", max_tokens=60)
        assert ensemble.generate("Who?", max_tokens=60).text == ANSWERS["Who?"]  # F21


def test_remote_drafter_in_a_grammar_of_which_it_names_nothing_is_an_error(toy_server, folder):
    there = remote_member(member_config(toy_server, folder, top_k=2), metaspace())
    verifier = local("v", byte_level())
    ensemble = Ensemble([there, verifier], EnsembleConfig(method="unite", top_k=2))
    with ensemble, pytest.raises(GenerationError, match=r"server\.top_k"):
        ensemble.generate("Who?", max_tokens=60, regex="[0-9]{3}")


def test_body_is_plain_json(server):
    backend = connected(server)
    backend.forward([Feed(row=backend.open(), ids=np.array([7, 8]))]).top1()
    assert json.loads(json.dumps(server.calls))[0]["token_ids"] == [7, 8]

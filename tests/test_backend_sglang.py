"""A member on an SGLang server: its protocol, and answers in another form."""

from __future__ import annotations

import numpy as np
import pytest

from model_servers import ModelServer, changed, raw, status
from remote_support import member_config, model_folder, opened, remote_member
from safe_llm.backends.base import Feed
from safe_llm.backends.endpoint import Endpoint
from safe_llm.backends.remote import RemoteBackend
from safe_llm.backends.sglang import SGLangServer
from safe_llm.config import EnsembleConfig, ServerConfig
from safe_llm.ensemble import Ensemble
from safe_llm.errors import MemberError, UnsupportedModelError
from safe_llm.testing import BackendConformance, answering, plain_symbols, scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace
from safe_llm.vocabulary import Vocabulary

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

WIDTH = 40
SYMBOLS = plain_symbols(WIDTH, end_ids=(2, 5), unusable=(0, 39))
ANSWERS = {"Who?": "Mr Black, of course, and 12 friends of his."}


def hashed_logits(ids):
    return np.random.default_rng(ids).normal(size=WIDTH)


def connected(server, top_k=64):
    endpoint = Endpoint("there", ServerConfig(url=server.url, top_k=top_k, timeout_s=20.0, max_retries=0))
    backend = RemoteBackend(SGLangServer(endpoint, "tiny", top_k), SYMBOLS, tokens_per_call=4)
    server.calls.clear()
    return backend


@pytest.fixture
def server():
    with ModelServer(hashed_logits, "sglang") as running:
        yield running


class TestSGLangBackend(BackendConformance):
    def make_backend(self):
        self.server = ModelServer(hashed_logits, "sglang").__enter__()
        return connected(self.server), SYMBOLS

    def teardown_method(self):
        self.server.__exit__()


def test_call_starts_one_id_before_the_first_position_that_is_wanted(server):
    backend = connected(server, top_k=3)
    row = backend.open()
    backend.forward([Feed(row=row, ids=[7] * 9)])
    backend.forward([Feed(row=row, ids=[8, 9], keep=2)]).top1()
    body = server.calls[1]
    assert len(body.pop("session_id")) == 16
    assert body == {
        "input_ids": [7] * 9 + [8, 9],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "logprob_start_len": 9,
        "top_logprobs_num": 3,
    }
    assert backend.num_computed == 9 + 2, "the cache is read up to the first position that is wanted"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raw(b"[]"), "answers /generate in another form"),
        (changed(lambda reply: reply["meta_info"].pop("cached_tokens")), "in another form"),
        (changed(lambda reply: reply["meta_info"].update(prompt_tokens=2)), "read 2 ids where 3 were sent"),
        (changed(lambda reply: reply["meta_info"]["input_token_logprobs"].pop()), "scores of 1 positions where 2"),
        (changed(lambda reply: reply["meta_info"]["input_token_logprobs"][1].__setitem__(1, 4)), "other ids than"),
        (changed(lambda reply: reply["meta_info"]["output_top_logprobs"].pop()), "in another form"),
        (changed(lambda reply: reply["meta_info"]["input_top_logprobs"][1][0].__setitem__(0, None)), "NaN or infinite"),
        (status(400), "refuses a call with status 400"),
        (status(404), "/generate with status 404 .*start SGLang"),
    ],
)
def test_a_server_that_fails_is_one_clear_error_and_the_next_call_works(server, fault, message):
    backend = connected(server)
    row = backend.open()
    server.faults = [fault]
    with pytest.raises(MemberError, match=message):
        backend.forward([Feed(row=row, ids=[7, 8, 9], keep=2)]).top1()
    assert backend.forward([Feed(row=row, ids=[10])]).top1()[1].all()


def test_servers_of_another_kind_are_refused(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "toy", metaspace(), [2])
    with ModelServer(hashed_logits, "sglang") as server:
        answer = server.answer
        monkeypatch.setattr(server, "answer", lambda path, body: {"data": [{"id": "tiny"}]})
        with pytest.raises(UnsupportedModelError, match="no SGLang server"):
            opened(member_config(server, folder))
        monkeypatch.setattr(server, "answer", lambda path, body: {} if path == "/tokenize" else answer(path, body))
        with pytest.raises(MemberError, match="/tokenize in another form"):
            opened(member_config(server, folder))


def test_remote_verifier_gives_the_text_of_a_local_one(tmp_path):
    tokenizer, config = metaspace(), EnsembleConfig(method="unite")
    drafter = scripted_member("d", byte_level(), {"Who?": "Mr Blue, of course, and 12 friends of his."})
    with Ensemble([drafter, scripted_member("v", tokenizer, ANSWERS)], config) as ensemble:
        wanted = ensemble.generate("Who?", max_tokens=60)
    next_logits = answering(Vocabulary(tokenizer, end_ids=[2]), ANSWERS)
    folder = model_folder(tmp_path / "toy", tokenizer, [2])
    with ModelServer(next_logits, "sglang", tokenizer=tokenizer, context=400) as server:
        there = remote_member(member_config(server, folder), tokenizer)
        with Ensemble([drafter, there], config) as ensemble:
            assert ensemble.generate("Who?", max_tokens=60).text == wanted.text
    assert there.backend.num_calls > 1

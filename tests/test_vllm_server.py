"""A verifier on a real vLLM server, on CPUs. It runs where SAFE_LLM_VLLM names a Python in which vLLM is installed."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from safe_llm.backends.base import Feed
from safe_llm.config import EnsembleConfig, MemberConfig, ServerConfig
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError, MemberError
from safe_llm.member import Member

PYTHON = os.environ.get("SAFE_LLM_VLLM", "")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.demo,
    pytest.mark.allow_hosts(["127.0.0.1"]),
    pytest.mark.skipif(not PYTHON, reason="SAFE_LLM_VLLM does not name a Python that has vLLM"),
]

MODEL = "smollm2-135m-instruct"
PROMPT = "Name three colours and say in one sentence what a rainbow is."
MAX_TOKENS = 32
STARTS_WITHIN_S = 420
QUESTION_S = 240.0
BLOCK = 32  # the smallest on CPUs


class Server:
    """vLLM with one model.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        flags = ["--host", "127.0.0.1", "--port", str(port), "--model", str(folder), "--served-model-name", MODEL]
        flags += ["--enable-scale-out", "--enable-prompt-tokens-details", "--max-logprobs", "20", "--dtype", "float32"]
        flags += ["--max-model-len", "1024", "--block-size", str(BLOCK), "--enforce-eager", "--max-num-seqs", "4"]
        # rows of the cached part hold what was in memory: zeros, so that no NaN makes the server refuse to write them
        settings = {
            "MALLOC_PERTURB_": "255",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags],
                env={**os.environ, **settings, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it answers."""
        give_up = time.monotonic() + STARTS_WITHIN_S
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        pytest.fail(f"vLLM did not start: {self._log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End it and its workers at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def drafter():
    return Member.load(MemberConfig(model="qwen2.5-coder-0.5b-instruct", dtype="float32"), progress=False)


def verifier_config(url, **options):
    settings = {"url": url, "model": MODEL, "timeout_s": QUESTION_S, **options}
    return MemberConfig(model=MODEL, name="there", backend="vllm", server=ServerConfig(**settings))


def test_real_server_verifies_as_a_local_model_does(drafter, tmp_path):
    from safe_llm.models import resolve

    config = EnsembleConfig(method="unite")
    here = Member.load(MemberConfig(model=MODEL, dtype="float32"), progress=False)
    with Ensemble([drafter, here], config) as ensemble:
        wanted = ensemble.generate(PROMPT, max_tokens=MAX_TOKENS)
    server = Server(resolve(MemberConfig(model=MODEL), progress=False).path, tmp_path / "log")
    try:
        server.wait()
        with pytest.raises(ConfigError, match="start it with --max-logprobs 30"):
            Member.load(verifier_config(server.url, top_k=30), progress=False)
        there = Member.load(verifier_config(server.url), progress=False)
        _check_reuse(there)
        _check_drafting(there, here)
        with Ensemble([drafter, there], config) as ensemble:
            found = ensemble.generate(PROMPT, max_tokens=MAX_TOKENS)
            assert found.text == wanted.text
            assert found.counters.num_replaced == wanted.counters.num_replaced
            with pytest.raises(MemberError, match="'there'"):
                _generate_and_kill(ensemble, server)
    finally:
        server.kill()
    with Ensemble([drafter, here], config) as ensemble:
        assert ensemble.generate(PROMPT, max_tokens=MAX_TOKENS).text == wanted.text


def _check_drafting(there, here):
    """As a drafter it writes what the local model writes, with a call for several tokens."""
    answers = []
    for member in (here, there):
        with Ensemble([member], EnsembleConfig(method="unite")) as ensemble:
            calls = there.backend.num_calls
            answers.append(ensemble.generate([{"role": "user", "content": PROMPT}], max_tokens=MAX_TOKENS))
    assert answers[1].text == answers[0].text != ""
    tokens = answers[1].counters.num_tokens
    assert there.backend.num_calls - calls <= 2 + tokens / 8, "the prompt's, and one for each 8 tokens"


def _generate_and_kill(ensemble, server):
    for _ in ensemble.stream("Write the numbers from one to fifty as words.", max_tokens=200):
        server.kill()


def _check_reuse(member):
    """A call computes what is new and no more than a block besides, however long the text in front of it is."""
    backend = member.backend
    words = member.vocabulary.encode(b"The rainbow shows red, orange, yellow, green and blue. " * 60).ids
    for length in (64, 256, 600):
        session = member.open(words[:length])
        member.prefill(session)
        row = session.row
        backend.forward([Feed(row=row, ids=words[length - 1 : length])]).top1()
        computed = []
        for start in range(length, length + 30, 6):
            before = backend.num_computed
            assert backend.forward([Feed(row=row, ids=words[start : start + 6], keep=6)]).top1()[1].all()
            computed.append(backend.num_computed - before)
        # a NaN there after all costs a whole computation, now and then
        assert statistics.median(computed) <= 6 + BLOCK, f"text of {length} ids: {computed} ids were computed"
        member.close(session)

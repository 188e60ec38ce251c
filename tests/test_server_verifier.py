"""A verifier's server is killed while clients stream: their answers are finished without it, and say so."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from remote_support import member_config, model_folder, remote_member
from safe_llm.config import EnsembleConfig
from safe_llm.ensemble import Ensemble
from safe_llm.testing import scripted_member
from safe_llm.testing.tokenizers import byte_level, metaspace
from server_support import NAME, Server, until

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])

NUM_CLIENTS = 8
ANSWERS = {f"Client {i}?": f"The answer of {i} is {i * 17}. " * (30 + i) for i in range(NUM_CLIENTS)}
THERE = """
import json, sys
from model_servers import ModelServer
from safe_llm.testing import answering
from safe_llm.testing.tokenizers import metaspace
from safe_llm.vocabulary import Vocabulary
tokenizer = metaspace()
known = answering(Vocabulary(tokenizer, end_ids=[tokenizer.token_to_id("</s>")]), json.loads(sys.argv[1]))
with ModelServer(known, tokenizer=tokenizer, context=2000) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def verifier_process():
    """A process that serves the verifier."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", THERE, json.dumps(ANSWERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def stream(client, prompt, killed, kill):
    """Return an answer's text and its record; the first words of any answer bring the kill about."""
    text, record = "", None
    async for chunk in await client.completions.create(model=NAME, prompt=prompt, stream=True, max_tokens=600):
        text += chunk.choices[0].text if chunk.choices else ""
        record = chunk.model_extra.get("safe_llm") or record
        if text and not killed:
            killed.append(prompt)
            kill()
    return text, record[0]


def test_clients_of_a_killed_verifier_get_whole_answers_that_name_it(tmp_path):
    tokenizer = metaspace()
    folder = model_folder(tmp_path / "toy", tokenizer, [tokenizer.token_to_id("</s>")])
    with verifier_process() as (process, url):
        there = remote_member(member_config(SimpleNamespace(url=url, kind="vllm"), folder), tokenizer)
        config = EnsembleConfig(method="unite", on_verifier_failure="continue")
        ensemble = Ensemble([scripted_member("here", byte_level(), ANSWERS), there], config)
        with Server(ensemble) as server:

            async def everybody():
                killed = []
                async with server.async_client() as client:
                    calls = [stream(client, prompt, killed, process.kill) for prompt in ANSWERS]
                    return await asyncio.gather(*calls)

            answers = asyncio.run(everybody())
            assert [text for text, _ in answers] == list(ANSWERS.values())
            for _, record in answers:
                [lost] = record["lost"]
                assert lost.startswith("there after ")
                assert "no connection to its server" in lost
            # a client may have come so late that it was gone before
            assert not all("after 0 tokens" in record["lost"][0] for _, record in answers)
            # who comes now does without it from the beginning
            after = server.complete("Client 3?", max_tokens=600).json()
            assert after["choices"][0]["text"] == ANSWERS["Client 3?"]
            assert after["safe_llm"][0]["lost"][0].startswith("there after 0 tokens")
            until(server.is_idle)
            assert server.get("/health").status_code == 200

"""The command, and the end: what is under way may finish, nothing new comes in, and a limit ends the waiting."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from safe_llm.cli import serving
from safe_llm.errors import ConfigError
from safe_llm.server import ServerSettings
from safe_llm.server.running import bind
from safe_llm.testing import scripted_ensemble
from server_support import ANSWERS, GUARD_S, RIGHT, Server, chunks_of, hold_rounds, received, until
from test_cli_support import install, refuse_to_load, run

pytestmark = pytest.mark.allow_hosts(["127.0.0.1", "0.0.0.0"])

SERVE = """
from safe_llm.server import ServerSettings, serve
from safe_llm.testing import scripted_ensemble
ensemble = scripted_ensemble({"long": "The position is Incorrect " * 200})
serve(ensemble, ServerSettings(port=0), ready=lambda url: print(url, flush=True))
print("closed" if ensemble.is_closed else "open", flush=True)
"""


def test_end_lets_finish_what_is_under_way_and_lets_nothing_in(monkeypatch):
    ensemble = scripted_ensemble(ANSWERS)
    with Server(ensemble) as server:
        permits = hold_rounds(monkeypatch, ensemble)
        replies = []
        running = threading.Thread(target=lambda: replies.append(server.chat(stream=True)))
        running.start()
        until(lambda: ensemble.occupancy == (1, 0))
        server.service.is_closing = True
        health, refused = server.get("/health"), server.chat()
        assert (health.status_code, health.json()["status"]) == (503, "closing")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"]
        server.listener.should_exit = True
        until(lambda: not server.listener.servers[0].is_serving())
        with pytest.raises(httpx.TransportError):
            server.get("/health")
        permits.release(1000)
        running.join(GUARD_S)
    assert chunks_of(replies[0])[-1] == "[DONE]"
    assert not ensemble.is_closed, "the app does not own it"


def test_end_of_patience_ends_answers_with_an_error(monkeypatch):
    ensemble = scripted_ensemble(ANSWERS)
    with Server(ensemble, drain_s=0) as server:
        permits = hold_rounds(monkeypatch, ensemble)
        with server.raw_chat("long", stream=True) as connection:
            permits.release()
            received(connection, b"Incorrect")
            server.listener.should_exit = True
            until(lambda: not server.listener.servers[0].is_serving())
            permits.release()
            rest = received(connection, b"0\r\n\r\n").decode()
            permits.release(1000)
    assert json.loads(rest.split("data: ")[-1].split("\n\n")[0])["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_the_process_ends_well(number):
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    with process:
        url = process.stdout.readline().strip()
        body = {"model": "safe-llm", "prompt": "long", "stream": True, "max_tokens": 1500}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=GUARD_S) as response:
            events = response.iter_lines()
            first = next(events)
            process.send_signal(number)
            rest = [event for event in events if event]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert process.stdout.readline() == "closed\n"
        assert process.wait(GUARD_S) == 0


# ---------------------------------------------------------------------- the command


@pytest.fixture
def served(monkeypatch):
    """Run the command up to the point where it would listen; remember what it would serve."""
    calls = []

    def serve(ensemble, settings, *, bound, ready):
        calls.append((ensemble, settings))
        ready("http://here")

    monkeypatch.setattr("safe_llm.server.serve", serve)
    return calls


def test_command_serves_what_its_flags_say(monkeypatch, served):
    scripted = install(monkeypatch, {"Who?": RIGHT})
    flags = (
        "--preset",
        "demo3",
        "--port",
        "0",
        "--max-n",
        "2",
        "--model-name",
        "a",
        "--model-name",
        "b",
        "--max-tokens",
        "9",
    )
    done = run("serve", *flags)
    ((ensemble, settings),) = served
    assert done.code == 0
    assert ensemble is scripted.ensembles[0]
    assert scripted.specs[0].sampling["max_tokens"] == 9
    assert (settings.model_names, settings.max_n, settings.host) == (("a", "b"), 2, "127.0.0.1")
    assert done.stderr.splitlines() == ["serving a, b at http://here/v1"]


def test_command_takes_the_key_from_the_environment_and_the_name_from_the_preset(monkeypatch, served):
    install(monkeypatch, {"Who?": RIGHT})
    monkeypatch.setenv("SAFE_LLM_API_KEY", "s3cret")
    done = run("serve", "--preset", "demo", "--port", "0", "-q")
    assert served[0][1].api_key.get_secret_value() == "s3cret"
    assert served[0][1].model_names == ("demo",)
    assert done.stderr == ""
    run("serve", "--drafter", "x/y", "--port", "0", "-q")
    assert served[1][1].model_names == ("safe-llm",)


def test_command_warns_where_everybody_may_come_in(monkeypatch, served):
    install(monkeypatch, {"Who?": RIGHT})
    assert "warning: whoever reaches 0.0.0.0" in run("serve", "--port", "0", "--host", "0.0.0.0").stderr
    assert "warning" not in run("serve", "--port", "0", "--host", "0.0.0.0", "--api-key", "x").stderr


def test_command_checks_flags_and_address_before_weights(monkeypatch):
    refuse_to_load(monkeypatch)
    with bind(ServerSettings(port=0)) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", "--port", port)
        assert done.code == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    done = run("serve", "--max-queue", "-1")
    assert (done.code, "max_queue" in done.stderr) == (2, True)


def test_host_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match="cannot listen on host"):
        bind(ServerSettings(host="no host.invalid"))


def test_loopback_is_told_from_the_rest():
    assert [serving._is_loopback(host) for host in ("127.0.0.1", "::1", "0.0.0.0", "fe80::1%eth0")] == [
        True, True, False, False
    ]  # fmt: skip

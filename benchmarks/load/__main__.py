"""Many streaming clients on one server: are the texts whole, how much faster than one client is it, does memory grow.

    python benchmarks/load [--clients 64] [--rounds 3] [--members scripted|demo] [--max-tokens 64] [--pass-ms 10]
                           [--output FILE.json]
    python benchmarks/load serve --members scripted     the server alone, as the run starts it in a process of its own

1. One client asks every question alone: the texts that all later ones must be, and one client's speed.
2. All clients at once, `--rounds` times: lost or mixed texts, speed, the server's resident memory after each round.
3. All clients at once, beside one that is killed (SIGKILL) in the middle: the others' texts, and nothing left running.

Passes of scripted members take `--pass-ms`, whatever the batch, as they would on a GPU; without that only the engine's
and the server's own work is measured, of which a batch saves little.

Prints a table, and one JSON object as the last line. Exit code 1 if a text was wrong or something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

MODEL = "load"
TIMEOUT_S = 600.0
_WORDS = ("position", "answer", "ensemble", "apples", "correct", "census", "people", "result")


def questions(number: int) -> list[str]:
    """Different questions, with answers of different lengths."""
    return [f"Client {i} has {i * 7919 % 1000} {_WORDS[i % len(_WORDS)]}. How many is that?" for i in range(number)]


# ---------------------------------------------------------------------- the server


def serve(members: str, number: int, pass_ms: float) -> None:
    """Serve until a signal; the first line on stdout is the URL."""
    from safe_llm.ensemble import Ensemble
    from safe_llm.server import ServerSettings, serve
    from safe_llm.testing import scripted_ensemble

    if members == "demo":
        ensemble = Ensemble.from_preset("demo", progress=False)
    else:
        known = {q: f"{q} It is the number {i}. " * (1 + i % 4) for i, q in enumerate(questions(number + 1))}
        ensemble = scripted_ensemble(known)
        for member in ensemble.members:
            slow_down(member.backend, pass_ms / 1000)
    settings = ServerSettings(port=0, model_names=(MODEL,), max_queue=4 * number, max_tokens_limit=4096)
    serve(ensemble, settings, ready=lambda url: print(url, flush=True))


def slow_down(backend: Any, seconds: float) -> None:
    """Let every pass take so much longer, and forget what it was fed, or memory would grow with that."""
    forward = backend.forward

    def slow(feeds: Any) -> Any:
        time.sleep(seconds)
        backend.calls.clear()
        return forward(feeds)

    backend.forward = slow


@contextmanager
def running(members: str, number: int, pass_ms: float) -> Iterator[str]:
    """Run the server in a process of its own, and yield its URL."""
    command = [
        sys.executable,
        __file__,
        "serve",
        "--members",
        members,
        "--clients",
        str(number),
        "--pass-ms",
        str(pass_ms),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()  # type: ignore[union-attr]
        finally:
            process.send_signal(signal.SIGTERM)


def metrics(url: str) -> dict[str, float]:
    """The server's counts, without those that have labels."""
    lines = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in lines if "{" not in name}


# ---------------------------------------------------------------------- the clients


async def ask(client: httpx.AsyncClient, question: str, max_tokens: int) -> tuple[str, int, bool]:
    """Stream one answer: its text, its tokens, and whether the stream ended as it should."""
    body: dict[str, Any] = {"model": MODEL, "prompt": question, "stream": True, "max_tokens": max_tokens}
    body["stream_options"] = {"include_usage": True}
    text, tokens, ended = "", 0, False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
            elif data:
                chunk = json.loads(data)
                text += "".join(choice["text"] for choice in chunk["choices"])
                tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
    return text, tokens, ended


async def wave(url: str, asked: list[str], max_tokens: int, *, at_once: bool) -> tuple[list[str], int, int, float]:
    """Ask everything, at once or one after the other: texts, tokens, streams without an end, seconds."""
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        started = time.perf_counter()
        calls = [ask(client, question, max_tokens) for question in asked]
        answers = await asyncio.gather(*calls) if at_once else [await call for call in calls]
        took = time.perf_counter() - started
    texts, tokens, ends = zip(*answers, strict=True)
    return list(texts), sum(tokens), ends.count(False), took


async def wave_with_a_kill(url: str, asked: list[str], max_tokens: int) -> tuple[list[str], int, int, float]:
    """As `wave` at once, beside a client in a process of its own that is killed once it has begun to read."""
    body = {"model": MODEL, "prompt": questions(len(asked) + 1)[-1], "stream": True}
    body |= {"max_tokens": 2000, "min_tokens": 2000}
    code = (
        "import httpx\n"
        f"with httpx.stream('POST', '{url}/v1/completions', json={body!r}, timeout=None) as reply:\n"
        "    for line in reply.iter_lines():\n"
        "        print(line[:5], flush=True)\n"
    )
    doomed = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    others = asyncio.create_task(wave(url, asked, max_tokens, at_once=True))
    begun = await doomed.stdout.readline()  # type: ignore[union-attr]
    doomed.kill()
    await doomed.wait()
    if begun != b"data:\n":
        raise SystemExit("the client that was to be killed got no event")
    return await others


def idle(url: str) -> bool:
    """Wait until nothing is decoded; False if it does not end within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        counts = metrics(url)
        if not counts["safe_llm_answers_running"] + counts["safe_llm_answers_waiting"]:
            return True
        time.sleep(0.1)
    return False


# ---------------------------------------------------------------------- the run


def measure(url: str, number: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Run all steps against a server."""
    asked = questions(number)
    alone, tokens, _, took = asyncio.run(wave(url, asked, max_tokens, at_once=False))
    results: dict[str, Any] = {"clients": number, "one_client_tokens_per_s": tokens / took, "rounds": []}
    for step in range(rounds + 1):
        is_last = step == rounds
        run = wave_with_a_kill(url, asked, max_tokens) if is_last else wave(url, asked, max_tokens, at_once=True)
        texts, tokens, unended, took = asyncio.run(run)
        results["rounds"].append(
            {
                "killed_one": is_last,
                "wrong_texts": sum(a != b for a, b in zip(texts, alone, strict=True)),
                "streams_without_end": unended,
                "tokens_per_s": tokens / took,
                "ratio": tokens / took / results["one_client_tokens_per_s"],
                "rss_mib": metrics(url)["process_resident_memory_bytes"] / 2**20,
            }
        )
    results["idle_in_the_end"] = idle(url)
    return results


def table(results: dict[str, Any]) -> str:
    """The results for people."""
    head = f"{'':<14}{'wrong':>6}{'unended':>9}{'tokens/s':>10}{'ratio':>7}{'RSS MiB':>9}"
    rows = [f"{'one client':<14}{'':>6}{'':>9}{results['one_client_tokens_per_s']:>10.1f}{1:>7.2f}"]
    for number, row in enumerate(results["rounds"], 1):
        name = "with a kill -9" if row["killed_one"] else f"round {number}"
        counts = f"{row['wrong_texts']:>6}{row['streams_without_end']:>9}"
        rows.append(f"{name:<14}{counts}{row['tokens_per_s']:>10.1f}{row['ratio']:>7.2f}{row['rss_mib']:>9.1f}")
    return "\n".join([head, *rows, f"idle in the end: {results['idle_in_the_end']}"])


def is_right(results: dict[str, Any]) -> bool:
    """Whether no text was lost or mixed, and nothing was left running."""
    wrong = sum(row["wrong_texts"] + row["streams_without_end"] for row in results["rounds"])
    return wrong == 0 and bool(results["idle_in_the_end"])


def main(argv: list[str] | None = None) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Many streaming clients on one server.")
    parser.add_argument("command", nargs="?", choices=("run", "serve"), default="run")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--members", choices=("scripted", "demo"), default="scripted")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--pass-ms", type=float, default=10.0)
    parser.add_argument("--url", help="a server that runs already, with the model name 'load'")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args(argv)
    if flags.command == "serve":
        serve(flags.members, flags.clients, flags.pass_ms)
        return 0
    if flags.url:
        results = measure(flags.url, flags.clients, flags.rounds, flags.max_tokens)
    else:
        with running(flags.members, flags.clients, flags.pass_ms) as url:
            results = measure(url, flags.clients, flags.rounds, flags.max_tokens)
    results |= {"members": flags.members, "pass_ms": flags.pass_ms if flags.members == "scripted" else None}
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    print(json.dumps(results))
    return 0 if is_right(results) else 1


if __name__ == "__main__":
    sys.exit(main())

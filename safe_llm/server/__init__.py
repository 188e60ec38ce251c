"""The ensemble over HTTP, in OpenAI's form: what any OpenAI client can talk to.

    settings.py      where it listens, what it allows
    schema.py        what a request may say; replies.py: what answers look like
    problems.py      what went wrong, in OpenAI's words
    bodies.py        bytes of a request -> checked values
    jobs.py          a checked request -> prompts and parameters of the engine
    answers.py       the engine's events -> choices; several of them at once
    completions.py   choices -> bodies and chunks
    service.py       what all requests share: the ensemble, who may come in, counts
    endpoints.py     one request from its first byte to its last, or to its client's leaving
    app.py           routes, the key; openapi.py: their description
    running.py       the listening process: signals, draining

Needs the extra `server`. There is no scheduler here: each answer is an `Ensemble.stream` in a thread of its own
(`safe_llm.concurrency`), and the ensemble decodes all that are under way in one batch.
"""

from __future__ import annotations

from safe_llm.errors import ConfigError

try:
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the server needs {error.name}, not installed",
        hint='install it with: pip install "safe-llm-ensemble[server]"',
    ) from None

from safe_llm.server.app import make_app
from safe_llm.server.running import serve
from safe_llm.server.settings import ServerSettings

__all__ = ["ServerSettings", "make_app", "serve"]

"""The listening process: it says where, serves until a signal, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from safe_llm.concurrency import run_in_thread
from safe_llm.ensemble import Ensemble
from safe_llm.errors import ConfigError
from safe_llm.server.app import make_app
from safe_llm.server.service import Service
from safe_llm.server.settings import ServerSettings

__all__ = ["Listener", "bind", "serve"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 5.0
"""What cancelled answers have left to tell their clients."""


def serve(
    ensemble: Ensemble,
    settings: ServerSettings,
    *,
    bound: socket.socket | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Answer requests until SIGINT or SIGTERM, then drain, and close the ensemble.

    Args:
        ensemble: Who answers.
        settings: Where and within which limits.
        bound: What `bind` returned for them, if it was called before.
        ready: Called with the base URL once requests are answered.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    app = make_app(ensemble, settings)
    with bound or bind(settings) as at:
        Listener(app, settings, ready=lambda: ready(_url(at))).run(sockets=[at])
    ensemble.close()


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address, so that one that is taken is known before weights are loaded; nobody is answered yet.

    Raises:
        ConfigError: It cannot be had.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {settings.host!r}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", hint="choose another --port"
        ) from None
    return bound


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener(uvicorn.Server):
    """A server that ends in order: it refuses what is new, lets what is under way finish, and cancels it in the end."""

    def __init__(self, app: Starlette, settings: ServerSettings, *, ready: Callable[[], None] = lambda: None) -> None:
        """Prepare to serve an app that `make_app` made; `ready` is called once it is served."""
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(settings.drain_s + _GRACE_S),
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._drain_s = settings.drain_s
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take signals for the wish to drain. Unlike uvicorn, do not die of them afterwards: it was an orderly end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second Ctrl-C ends at once."""
        self._service.is_closing = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what is under way, up to the limit; then the ensemble is closed, which ends it with an error."""
        self._service.is_closing = True
        closing = asyncio.create_task(self._close_in_the_end())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_in_the_end(self) -> None:
        await asyncio.sleep(self._drain_s)
        await run_in_thread(lambda _: self._service.ensemble.close())

"""HTTP to one model server: pooled connections, a time limit, bounded retries, and errors that say what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from safe_llm.config import ServerConfig
from safe_llm.errors import ConfigError, MemberError, ModelAccessError, UnsupportedModelError

if TYPE_CHECKING:
    import httpx

__all__ = ["Endpoint", "RefusedError"]

_BUSY = (429, 502, 503, 504)
_CONNECT_S = 10.0
_FIRST_PAUSE_S = 0.25
_MOST_BYTES = 1 << 28
_MOST_CONNECTIONS = 64


class RefusedError(Exception):
    """The server answered, and the answer is no.

    Attributes:
        status: HTTP status.
        text: What the server says. It may quote the prompt, so it must not get into an error that users see.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.text = text


class Endpoint:
    """One server, asked from any number of threads.

    Attributes:
        host: Name and port, for errors.
        name: The member, for errors.
        timeout_s: Seconds that one call may take.
    """

    def __init__(self, name: str, server: ServerConfig, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """Make a client; nothing is sent yet.

        Args:
            name: The member.
            server: Where, and how patiently.
            sleep: Waits between two tries.

        Raises:
            ConfigError: httpx is not installed, or the key cannot be sent.
        """
        if importlib.util.find_spec("httpx") is None:
            raise ConfigError(
                "members on servers need httpx, not installed",
                hint='install it with: pip install "safe-llm-ensemble[remote]"',
            )
        import httpx

        self.name = name
        self.host = urlsplit(server.url).netloc
        self.timeout_s = server.timeout_s
        self._max_retries = server.max_retries
        self._sleep = sleep
        limits = httpx.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS)
        timeout = httpx.Timeout(server.timeout_s, connect=min(server.timeout_s, _CONNECT_S), pool=None)
        self._client = httpx.Client(
            base_url=server.url, headers=_authorization(name, server), timeout=timeout, limits=limits
        )
        weakref.finalize(self, self._client.close)

    def call(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """POST a body, or GET without one, and return the JSON that comes back.

        A call is repeated where the connection failed before there was an answer, and where the server says that it is
        busy; it must make no difference how often it arrives.

        Raises:
            RefusedError: The server answered with another status than 200.
            ModelAccessError: It wants another key, or cannot be reached.
            MemberError: It took too long, is too busy, broke off, or answered no JSON.
        """
        for tries in range(1, self._max_retries + 2):
            try:
                status, content, retry_after = self._once(path, body, headers)
            except ModelAccessError:
                if tries > self._max_retries:
                    raise
                status, retry_after = 0, None
            else:
                if status not in _BUSY:
                    return self._read(status, content)
            if tries <= self._max_retries:
                self._sleep(min(retry_after or _FIRST_PAUSE_S * 2 ** (tries - 1), self.timeout_s))
        raise MemberError(
            self.name,
            f"its server at {self.host} is too busy: status {status} after {tries} tries",
            hint="send it fewer requests at once, or raise server.max_retries",
        )

    def ask(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """Make a call that no server of the right kind refuses.

        Raises:
            UnsupportedModelError: It does.
            SafeLLMError: As `call` does.
        """
        try:
            return self.call(path, body, headers)
        except RefusedError as refused:
            raise self.unsupported(path, refused) from None

    def unsupported(self, path: str, refused: RefusedError, hint: str = "check server.url") -> UnsupportedModelError:
        """Return the error of a server that has no such path, or makes nothing of the call."""
        return UnsupportedModelError(
            f"member {self.name!r}: the server at {self.host} answers {path} with status {refused.status}", hint=hint
        )

    def _once(
        self, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None
    ) -> tuple[int, bytes, float | None]:
        """Try once; return status, body and the pause that the server asks for."""
        import httpx

        started = time.monotonic()
        method = "GET" if body is None else "POST"
        request = self._client.build_request(method, path, json=body, headers=headers)
        try:
            response = self._client.send(request, stream=True)
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise self._too_slow() from None
        except httpx.TransportError as error:
            raise ModelAccessError(
                f"member {self.name!r}: no connection to its server at {self.host} ({type(error).__name__})",
                hint="start the server, or correct server.url",
            ) from error
        with contextlib.closing(response):
            return response.status_code, self._content(response, started), _pause(response.headers.get("Retry-After"))

    def _content(self, response: httpx.Response, started: float) -> bytes:
        import httpx

        content = bytearray()
        try:
            for chunk in response.iter_bytes():
                content += chunk
                if time.monotonic() - started > self.timeout_s:
                    raise self._too_slow()
                if len(content) > _MOST_BYTES:
                    raise MemberError(self.name, f"its server at {self.host} answers more than {_MOST_BYTES} bytes")
        except httpx.TimeoutException:
            raise self._too_slow() from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise MemberError(
                self.name,
                f"its server at {self.host} broke off in the middle of an answer ({type(error).__name__})",
                hint="see the server's log",
            ) from error
        return bytes(content)

    def _read(self, status: int, content: bytes) -> Any:
        """Return the JSON of a 200, raise for anything else."""
        if status in (401, 403):
            raise ModelAccessError(
                f"member {self.name!r}: its server at {self.host} refuses the key (status {status})",
                hint="set server.api_key",
            )
        if status != 200:
            raise RefusedError(status, content[:4096].decode("utf-8", errors="replace"))
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise MemberError(
                self.name, f"its server at {self.host} answers something that is no JSON", hint="check server.url"
            ) from None

    def _too_slow(self) -> MemberError:
        return MemberError(
            self.name,
            f"its server at {self.host} did not answer within {self.timeout_s:g} seconds",
            hint="raise server.timeout_s, or see the server's log",
        )


def _authorization(name: str, server: ServerConfig) -> dict[str, str]:
    if server.api_key is None:
        return {}
    key = server.api_key.get_secret_value()
    if not key.isascii() or not key.isprintable() or not key.strip():
        raise ConfigError(f"member {name!r}: server.api_key has characters that no HTTP header can hold")
    return {"Authorization": f"Bearer {key}"}


def _pause(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks for; None for its other form, a date."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None

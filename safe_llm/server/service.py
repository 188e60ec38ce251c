"""What all requests of one app share: the ensemble, the limits, who may come in, and how it has gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from safe_llm.ensemble import Ensemble
from safe_llm.errors import Cancelled, ConfigError, PromptError
from safe_llm.events import Result
from safe_llm.server.metrics import Metrics
from safe_llm.server.problems import ApiError, closing
from safe_llm.server.replies import Health
from safe_llm.server.settings import ServerSettings

__all__ = ["Service"]

MAX_FAILURES = 3
"""After so many answers that failed in a row, `/health` says so."""


class Service:
    """State of one app.

    Attributes:
        ensemble: Who answers.
        settings: The limits.
        metrics: The counts.
        created: Unix time of its start.
        is_closing: New requests are refused.
    """

    def __init__(self, ensemble: Ensemble, settings: ServerSettings) -> None:
        self.ensemble = ensemble
        self.settings = settings
        self.metrics = Metrics(lambda: ensemble.occupancy)
        self.created = int(time.time())
        self.is_closing = False
        self._capacity = ensemble.config.max_batch_size + settings.max_queue
        self._num_answers = 0
        self._num_failures = 0
        self._seconds = 1.0  # a moving mean of an answer's time in the batch

    @contextlib.contextmanager
    def place(self, size: int) -> Iterator[None]:
        """Take places for the answers of a request, as long as it runs.

        Raises:
            ApiError: There are none (429, with a guess at when there will be), or the server is closing (503).
        """
        if self.is_closing or self.ensemble.is_closed:
            raise closing()
        # a request that is larger than everything may come in alone
        if self._num_answers and self._num_answers + size > self._capacity:
            batches = self._num_answers / self.ensemble.config.max_batch_size
            retry = {"Retry-After": str(min(60, max(1, round(self._seconds * batches))))}
            raise ApiError(
                429,
                f"{self._num_answers} answers are under way or wait, {self._capacity} is the limit; try again later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers=retry,
            )
        self._num_answers += size
        try:
            yield
        finally:
            self._num_answers -= size

    def succeeded(self, result: Result) -> None:
        """Take note of a finished answer."""
        self._num_failures = 0
        self._seconds += 0.1 * (result.timings.total_s - self._seconds)
        self.metrics.answered(result)

    def failed(self, error: Exception) -> None:
        """Take note of an answer that failed, unless that was its request's own doing or the end of the server."""
        if not isinstance(error, ApiError | PromptError | ConfigError | Cancelled):
            self._num_failures += 1

    def health(self) -> Health:
        """Return how the server is."""
        running, waiting = self.ensemble.occupancy
        status = "failing" if self._num_failures >= MAX_FAILURES else "ok"
        if self.is_closing or self.ensemble.is_closed:
            status = "closing"
        return Health.model_validate(
            {
                "status": status,
                "running": running,
                "waiting": waiting,
                "consecutive_failures": self._num_failures,
            }
        )

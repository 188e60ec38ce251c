"""What the server counts, in Prometheus' form. Every app has a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from safe_llm.events import Result
from safe_llm.record import phase_seconds

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_COUNTS = {
    "prompt_tokens": "Tokens of prompts, in the drafter's tokens.",
    "cached_tokens": "Tokens of prompts that were not computed, since another request had them in the cache.",
    "completion_tokens": "Tokens generated.",
    "draft_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that were committed as drafted.",
    "ensemble_points": "Positions at which distributions were merged.",
    "replaced_tokens": "Ensemble points that chose another token than the drafter.",
    "rounds": "Rounds that answers took part in.",
}


class Metrics:
    """Counters, gauges and histograms of one app."""

    def __init__(self, occupancy: Callable[[], tuple[int, int]]) -> None:
        """Begin to count.

        Args:
            occupancy: Returns how many answers are decoded now, and how many wait.
        """
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "safe_llm_requests",
            "Requests by how they ended: ok, rejected, refused, disconnected, cancelled, failed.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self._counts = {
            name: Counter(f"safe_llm_{name}", text, registry=self.registry) for name, text in _COUNTS.items()
        }
        running = Gauge("safe_llm_answers_running", "Answers in the running batch.", registry=self.registry)
        waiting = Gauge("safe_llm_answers_waiting", "Answers that wait for a place in it.", registry=self.registry)
        running.set_function(lambda: occupancy()[0])
        waiting.set_function(lambda: occupancy()[1])
        self._phases = self._histogram("phase_seconds", "Seconds of an answer per phase, the whole batch's.", "phase")
        self._ttft = self._histogram("time_to_first_token_seconds", "From submission to the first committed token.")
        self._tpot = self._histogram("time_per_output_token_seconds", "Seconds per token after the first one's round.")
        self._total = self._histogram("answer_seconds", "From submission to the last token.")

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"safe_llm_{name}", text, labels, buckets=_SECONDS, registry=self.registry)

    def ended(self, endpoint: str, outcome: str) -> None:
        """Count a request that has ended."""
        self._requests.labels(endpoint, outcome).inc()

    def answered(self, result: Result) -> None:
        """Count what a finished answer did."""
        counters, timings, usage = result.counters, result.timings, result.usage
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "draft_tokens": counters.num_draft_tokens,
            "accepted_tokens": counters.num_accepted_tokens,
            "ensemble_points": counters.num_ensembled,
            "replaced_tokens": counters.num_replaced,
            "rounds": counters.num_rounds,
        }
        for name, count in counts.items():
            self._counts[name].inc(count)
        for phase, seconds in phase_seconds(timings).items():
            self._phases.labels(phase).observe(seconds)
        self._total.observe(timings.total_s)
        for histogram, value in ((self._ttft, timings.ttft_s), (self._tpot, timings.tpot_s)):
            if value is not None:
                histogram.observe(value)

    def exposition(self) -> bytes:
        """Return everything as text."""
        return generate_latest(self.registry)

"""Prometheus metrics of one server, all under `quantkit_`, fed by the front's requests and the engine's reports."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quantkit.runtime.engine import EngineStats
from quantkit.server.messages import Report, Started

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_COUNTED = {
    "prefix_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_hits": "Prompt tokens found in the prefix cache",
    "preemptions": "Requests whose blocks were taken and that were computed again",
    "steps": "Engine steps",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens sampled",
}


class Metrics:
    """The server's numbers. A request is one HTTP call that generates, whatever its number of choices."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"quantkit_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"quantkit_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"quantkit_{name}", text, buckets=buckets, registry=self.registry)

        self.accepted = counter("requests_accepted", "Generating requests let in")
        self.ended = counter("requests_ended", "Generating requests that ended, by outcome", "outcome")
        self.refused = counter("requests_refused", "Generating requests not let in, by HTTP status", "status")
        self.in_flight = gauge("requests_in_flight", "Generating requests between acceptance and end")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "Mean time a token after the first", _TOKEN_SECONDS)
        self.itl = histogram(
            "inter_token_latency_seconds", "Time between tokens as they reached the front", _TOKEN_SECONDS
        )
        self.latency = histogram("request_latency_seconds", "Arrival to end", _SECONDS)
        self.step_time = histogram("engine_step_seconds", "Duration of an engine step", _TOKEN_SECONDS)
        self.restarts = counter("engine_deaths", "Engine processes that died")
        self._running = gauge("requests_running", "Sequences in the running batch")
        self._waiting = gauge("requests_waiting", "Sequences waiting for blocks or a place in the batch")
        self._kv_blocks = gauge("kv_blocks", "KV cache blocks by state", "state")
        self._kv_usage = gauge("kv_usage_ratio", "Share of the KV cache's blocks that requests hold")
        self._info = gauge("artifact_info", "The artifact served", "payload_digest", "verdict", "backend", "kv_format")
        self._counters = {name: counter(f"engine_{name}", text) for name, text in _COUNTED.items()}
        self._latest: EngineStats | None = None
        self._counted = dict.fromkeys(_COUNTED, 0)

    def engine_started(self, started: Started) -> None:
        """A new engine counts from zero."""
        self._take_over()
        self._latest, self._counted = None, dict.fromkeys(_COUNTED, 0)
        self._info.clear()
        self._info.labels(started.payload_digest, started.verdict, started.backend, started.kv_format).set(1)

    def engine_report(self, report: Report) -> None:
        """Note the scheduler's state; it is counted up when somebody asks, this being called at every step."""
        self._latest = report.stats
        if report.step_seconds > 0:
            self.step_time.observe(report.step_seconds)

    def text(self) -> bytes:
        """The exposition format."""
        self._take_over()
        return generate_latest(self.registry)

    def _take_over(self) -> None:
        stats = self._latest
        if stats is None:
            return
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        for state in ("used", "cached", "free"):
            self._kv_blocks.labels(state).set(getattr(stats, f"blocks_{state}"))
        self._kv_usage.set(stats.blocks_used / max(1, stats.blocks_total))
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name) - self._counted[name])
            self._counted[name] = getattr(stats, name)

"""A replica's Prometheus metrics, through Ray's metrics API: `ray_corral_*`, by model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from serve_app.engine import EngineStats
from serve_app.placement.machine import throttled_s
from serve_app.types import GAP_BOUNDARIES_S, SequenceEnd

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
# Counters by their group in EngineStats, and what they count.
_COUNTED = {
    "tokens": {
        "prompt_tokens": "Prompt tokens that were computed.",
        "cached_tokens": "Prompt tokens that were found in the cache.",
        "restored_tokens": "Prompt tokens that came back from the memory tier.",
        "generated_tokens": "Generated tokens.",
    },
    "cache": {
        "received_prefixes": "Prefixes that came from other replicas.",
        "received_bytes": "Bytes of the prefixes that came.",
        "sent_prefixes": "Prefixes that went to other replicas.",
        "sent_bytes": "Bytes of the prefixes that went.",
    },
    "speculation": {
        "drafted_tokens": "Tokens that speculation guessed.",
        "accepted_tokens": "Guessed tokens that were right.",
        "proposed_tokens": "Guessed tokens that a draft model proposed.",
        "accepted_proposed_tokens": "Tokens of a draft model that were right.",
    },
    "requests": {
        "preemptions": "Sequences that lost their slot for a time.",
        "context_shifts": "Contexts that were full and went on.",
        "failovers": "Requests that other replicas began and could not end.",
    },
    "embeddings": {
        "embedded_texts": "Texts that became vectors.",
        "embedded_tokens": "Tokens of the texts that became vectors.",
    },
    "pictures": {
        "encoded_tiles": "Parts of pictures and sounds that were encoded.",
        "found_tiles": "Parts of pictures and sounds that had been encoded for others.",
    },
    "timing": {"steps": "Steps of the engine."},
}


class ReplicaMetrics:
    """One replica's metrics. Used in its event loop.

    Times are observed as requests end. Counters and gauges follow the engine's statistics, as often as
    `update` is called.
    """

    def __init__(self, model: str) -> None:
        def histogram(name: str, what: str, ends: Sequence[float] = _SECONDS) -> Histogram:
            made = Histogram(f"corral_{name}_seconds", what, list(ends), ("model",))
            made.set_default_tags({"model": model})
            return made

        def counter(name: str, what: str, *tags: str) -> Counter:
            made = Counter(f"corral_{name}", what, ("model", *tags))
            made.set_default_tags({"model": model})
            return made

        def gauge(name: str, what: str) -> Gauge:
            made = Gauge(f"corral_{name}", what, ("model",))
            made.set_default_tags({"model": model})
            return made

        self._queue = histogram("queue_time", "From arrival to a slot.")
        self._prefill = histogram("prefill_time", "From a slot to the first token.")
        self._ttft = histogram("time_to_first_token", "From arrival to the first token.")
        self._itl = histogram("inter_token_latency", "Between two tokens.", GAP_BOUNDARIES_S)
        self._e2e = histogram("request_latency", "From arrival to the end.")
        self._counters = {
            (group, name): counter(name, what)
            for group, counters in _COUNTED.items()
            for name, what in counters.items()
        }
        self._requests = counter("requests", "Requests by the reason of their end.", "reason")
        self._throttled = counter("cpu_throttled_seconds", "CPU time withheld by quotas.")
        self._encoding = counter("encode_seconds", "Time that pictures and sounds were encoded.")
        self._downloaded = counter(
            "downloaded_bytes",
            "Bytes of files that came at its start: from their `origin`, or from other `nodes`.",
            "source",
        )
        self._running = gauge("slots_busy", "Slots with a request.")
        self._waiting = gauge("requests_waiting", "Requests that wait for a slot.")
        self._kv_used = gauge("kv_cache_used_ratio", "Of the cache's tokens, those in use.")
        self._stored = gauge("memory_tier_bytes", "Prefixes that lost their slot.")
        self._backlog = gauge("backlog_seconds", "Forecast of the time until all is done.")
        self._seen: dict[str, float] = {"throttled": throttled_s()}

    def ended(self, end: SequenceEnd) -> None:
        spent, n_own = end.timings, end.usage.completion_tokens - end.timings.n_resumed
        self._queue.observe(spent.queue_s)
        if n_own:
            self._prefill.observe(spent.prefill_s)
        if n_own and not spent.n_resumed:
            self._ttft.observe(spent.failed_over_s + spent.queue_s + spent.prefill_s)
        for n_gaps, seconds in spent.gaps:  # Ray takes them one by one, in about a microsecond each
            for _ in range(n_gaps):
                self._itl.observe(seconds / n_gaps)
        in_engine_s = spent.queue_s + spent.prefill_s + spent.decode_s
        self._e2e.observe(spent.failed_over_s + in_engine_s)

    def downloaded(self, n_bytes: Mapping[str, int]) -> None:
        """Count what came for this replica, by its source."""
        for source, n in n_bytes.items():
            if n > 0:
                self._downloaded.inc(n, {"source": source})

    def update(self, stats: EngineStats) -> None:
        for (group, name), counter in self._counters.items():
            self._follow(counter, name, getattr(getattr(stats, group), name))
        for reason, n_ended in stats.requests.ended.items():
            self._follow(self._requests, f"ended {reason}", n_ended, reason=reason)
        self._follow(self._throttled, "throttled", throttled_s())
        self._follow(self._encoding, "encoding", stats.pictures.encode_s)
        used = sum(slot.n_past for slot in stats.slots)
        self._running.set(stats.queue.running)
        self._waiting.set(stats.queue.waiting)
        self._kv_used.set(used / stats.n_ctx)
        self._stored.set(stats.cache.stored_bytes)
        self._backlog.set(stats.queue.backlog_s)

    def rest(self) -> None:
        """The model is unloaded: nothing runs, waits or is kept any more."""
        gauges = self._running, self._waiting, self._kv_used, self._stored, self._backlog
        for gauge in gauges:
            gauge.set(0.0)

    def _follow(self, counter: Counter, name: str, value: float, **tags: str) -> None:
        more = value - self._seen.get(name, 0)
        if more > 0:
            counter.inc(more, tags)
            self._seen[name] = value

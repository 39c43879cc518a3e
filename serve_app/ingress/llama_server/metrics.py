"""llama-server's metrics, for its dashboards.

Source: llama.cpp, tools/server/README.md, "GET /metrics".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serve_app.types import ReplicaStats

# By llama-server's name: the group and the field of EngineStats, and what it is. Prometheus adds `_total`.
_COUNTERS = {
    "prompt_tokens": ("tokens", "prompt_tokens", "Number of prompt tokens processed."),
    "prompt_tokens_cached": (
        "tokens",
        "cached_tokens",
        "Number of prompt tokens reused from the cache.",
    ),
    "prompt_seconds": ("requests", "prefill_s", "Prompt process time in seconds."),
    "tokens_predicted": ("tokens", "generated_tokens", "Number of generation tokens processed."),
    "tokens_predicted_seconds": ("requests", "generation_s", "Predict process time in seconds."),
    "n_decode": ("timing", "batches", "Total number of llama_decode() calls."),
    "spec_decode_num_drafts": ("speculation", "drafts", "Speculative verification steps."),
    "spec_decode_num_draft_tokens": (
        "speculation",
        "drafted_tokens",
        "Total draft tokens generated.",
    ),
    "spec_decode_num_accepted_tokens": (
        "speculation",
        "accepted_tokens",
        "Total draft tokens accepted.",
    ),
}

_OF_EMBEDDINGS = {"prompt_tokens": "embedded_tokens", "n_decode": "embedding_batches"}
"""llama-server's counters that include texts whose embeddings are computed."""


def render(replicas: Sequence[ReplicaStats], n_missing: int) -> bytes:
    """A model's metrics in Prometheus's text format, summed over the replicas that answered; `n_missing`
    did not."""
    registry = CollectorRegistry()
    registry.register(_Collector([replica.engine for replica in replicas], n_missing))
    written = bytes(generate_latest(registry))
    # A counter by llama-server's word, which ends as no counter's name may by the client's rules.
    return written.replace(b"n_tokens_max gauge", b"n_tokens_max counter")


class _Collector:
    def __init__(self, engines: Sequence[dict[str, Any]], n_missing: int) -> None:
        self._engines = engines
        self._n_missing = n_missing

    def collect(self) -> Iterator[Metric]:
        for name, (group, field, what) in _COUNTERS.items():
            embedding = (
                self._sum("embeddings", _OF_EMBEDDINGS[name]) if name in _OF_EMBEDDINGS else 0
            )
            yield _counter(name, what, self._sum(group, field) + embedding)
        yield _gauge("n_tokens_max", "Largest observed n_tokens.", self._largest())
        prompt_rate = _rate(
            self._sum("tokens", "prompt_tokens"), self._sum("requests", "prefill_s")
        )
        yield _gauge("prompt_tokens_seconds", "Average prompt throughput in tokens/s.", prompt_rate)
        rate = _rate(self._sum("tokens", "generated_tokens"), self._sum("requests", "generation_s"))
        yield _gauge("predicted_tokens_seconds", "Average generation throughput in tokens/s.", rate)
        running, waiting = self._sum("queue", "running"), self._sum("queue", "waiting")
        yield _gauge("requests_processing", "Number of requests processing.", running)
        yield _gauge("requests_deferred", "Number of requests deferred.", waiting)
        busy = _rate(self._sum("timing", "busy_slots"), self._sum("timing", "batches"))
        what = "Average number of busy slots per llama_decode() call."
        yield _gauge("n_busy_slots_per_decode", what, busy)
        what = "Replicas that run and are not in these numbers, as they did not answer in time."
        yield GaugeMetricFamily("corral_replicas_missing", what, value=self._n_missing)

    def _sum(self, group: str, field: str) -> float:
        return float(sum(engine[group][field] for engine in self._engines))

    def _largest(self) -> float:
        return float(max((engine["tokens"]["n_tokens_max"] for engine in self._engines), default=0))

    def describe(self) -> Iterable[Metric]:
        return ()


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"llamacpp:{name}", what, value=value)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"llamacpp:{name}", what, value=value)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0

"""Prometheus's counters of usage by API key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.base import metrics

MOST_KEYS = 100
"""The keys that have a time series of their own. All others together are `other`."""
_COUNTERS = {
    "requests": ("key_requests", "Requests that an engine accepted, by API key."),
    "prompt_tokens": ("key_prompt_tokens", "Prompt tokens of requests, by API key, in tokens."),
    "completion_tokens": ("key_generated_tokens", "Generated tokens, by API key, in tokens."),
    "compute_s": ("key_compute_seconds", "Compute: the decoder's time by API key, in seconds."),
}


class KeyMetrics:
    """The counters of one ingress, made when the first key is used. Used in its event loop, once for all
    that was counted in a quarter of a second."""

    def __init__(self) -> None:
        self._counters: dict[str, metrics.Counter] = {}
        self._keys: set[str] = set()

    def add(self, key: str, model: str, counts: Mapping[str, float]) -> None:
        if not self._counters:
            labels: Sequence[str] = ("model", "key")
            self._counters = {
                count: metrics.counter(name, what, labels)
                for count, (name, what) in _COUNTERS.items()
            }
        if key not in self._keys and len(self._keys) < MOST_KEYS:
            self._keys.add(key)
        tags = {"model": model, "key": key if key in self._keys else "other"}
        for count, counter in self._counters.items():
            if counts[count] > 0:
                counter.inc(counts[count], tags)

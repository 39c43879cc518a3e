"""Metrics for Prometheus. Ray exports those of its processes; those of a local server are in a folder.

Names are the same on both ways: `ray_corral_` and the metric's own. A metric with the label `model` counts
for the model that it is made for, or that `tags` name. A counter is exported as 0 from the start,
if its labels are known then. Prometheus leaves out the value that a series begins with.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

Tags = Mapping[str, str]


class Counter(Protocol):
    def inc(self, value: float = 1.0, tags: Any = None) -> None:
        """Count so many more. With 0, a series begins."""


class Gauge(Protocol):
    def set(self, value: Any, tags: Any = None) -> None: ...


class Histogram(Protocol):
    def observe(self, value: float, tags: Any = None) -> None: ...


def observe_all(histogram: Histogram, n: int, seconds: float) -> None:
    """Observe `n` times of a histogram without tags of its own, which are in one bucket and take so many
    seconds together. Ray's take them one by one, in a microsecond each; prometheus_client's would take
    seven."""
    if n and isinstance(histogram, PrometheusMetric):
        histogram.add(n, seconds)
        return
    for _ in range(n):
        histogram.observe(seconds / n)


FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder, for this process and those that it starts."""


def keep_in(folder: Path) -> None:
    """Keep the metrics of this process, and of those that it starts, in a folder instead of Ray's exporter.
    Call it once, at the start of a process."""
    os.environ[FOLDER] = str(folder)  # prometheus_client reads it when it is imported


def exposition() -> bytes:
    """The metrics of all processes that share the folder, in Prometheus's text format; nothing with Ray."""
    if FOLDER not in os.environ:
        return b""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return bytes(generate_latest(registry))


def counter(name: str, what: str, labels: Sequence[str] = ("model",), tags: Tags = {}) -> Counter:  # noqa: B006
    made: Counter = _make("Counter", name, what, labels, tags)
    if set(labels) == set(tags):
        made.inc(0.0)
    return made


def gauge(name: str, what: str, labels: Sequence[str] = ("model",), tags: Tags = {}) -> Gauge:  # noqa: B006
    made: Gauge = _make("Gauge", name, what, labels, tags, multiprocess_mode="mostrecent")
    return made


def histogram(
    name: str,
    what: str,
    ends: Sequence[float],
    labels: Sequence[str] = ("model",),
    tags: Tags = {},  # noqa: B006
) -> Histogram:
    """A histogram whose buckets have these upper ends."""
    made: Histogram = _make("Histogram", name, what, labels, tags, ends)
    return made


Maker = Callable[[str, str, str, Sequence[float] | None, Sequence[str], Tags], Any]
"""Makes a metric, from its kind (`Counter`, `Gauge` or `Histogram`), name, text, ends, labels, and tags."""
_maker: Maker | None = None


def make_with(maker: Maker | None) -> None:
    """Have another exporter make the metrics of this process from now on; None for prometheus_client."""
    global _maker
    _maker = maker


def _make(
    kind: str,
    name: str,
    what: str,
    labels: Sequence[str],
    tags: Tags,
    ends: Sequence[float] | None = None,
    **options: Any,
) -> Any:
    if _maker is not None and FOLDER not in os.environ:
        return _maker(kind, f"corral_{name}", what, ends, labels, tags)
    if ends is not None:
        options["buckets"] = tuple(ends)
    return PrometheusMetric(_prometheus_metric(kind, name, what, tuple(labels), **options), tags)


@cache
def _prometheus_metric(
    kind: str, name: str, what: str, labels: tuple[str, ...], **options: Any
) -> Any:
    """The only object of a metric: prometheus_client keeps each for the life of the process."""
    import prometheus_client

    of_kind = getattr(prometheus_client, kind)
    return of_kind(f"ray_corral_{name}", what, labels, registry=None, **options)


class PrometheusMetric:
    """A metric of prometheus_client with the methods of Ray's."""

    def __init__(self, metric: Any, tags: Tags) -> None:
        self._metric, self._tags = metric, tags

    def inc(self, value: float = 1.0, tags: Tags | None = None) -> None:
        self._with(tags).inc(value)

    def set(self, value: float, tags: Tags | None = None) -> None:
        self._with(tags).set(value)

    def observe(self, value: float, tags: Tags | None = None) -> None:
        self._with(tags).observe(value)

    def add(self, n: int, seconds: float) -> None:
        """Observe `n` times of so many seconds together, as prometheus_client's `observe` does one."""
        child = self._with(None)
        child._sum.inc(seconds)
        child._buckets[bisect_left(child._upper_bounds, seconds / n)].inc(n)

    def _with(self, tags: Tags | None) -> Any:
        labels = {**self._tags, **(tags or {})}
        return self._metric.labels(**labels) if labels else self._metric

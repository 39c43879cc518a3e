"""What is observed when a request ends."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import Any

import prometheus_client
import pytest

from serve_app.base import metrics
from serve_app.base.values.answers import (
    GAP_BOUNDARIES_S,
    FinishReason,
    SequenceEnd,
    Timings,
    Usage,
)
from serve_app.cluster.process import use_rays_exporter
from serve_app.engine.metrics.stats import CacheStats, EngineStats, PictureStats, QueueStats
from serve_app.engine.metrics.trace import Trace
from serve_app.run.replica import reporting
from serve_app.run.replica.reporting import ReplicaMetrics

STATS = EngineStats(n_slots=2, n_ctx_slot=100, n_ctx=200)


class Clock:
    """Time that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("serve_app.engine.metrics.trace.time", made)
    return made


def traced(clock: Clock, *steps: tuple[float, int]) -> Timings:
    """The times of a sequence that got so many tokens after so many seconds, each time."""
    trace = Trace()
    trace.admit()
    for seconds, n_tokens in steps:
        clock.now += seconds
        trace.tokens(n_tokens)
    return trace.end()


def test_gaps_are_counted_by_length(clock: Clock) -> None:
    spent = traced(clock, (3.0, 1), (0.04, 1), (0.045, 1), (0.7, 3), (60.0, 1))
    assert len(spent.gaps) == len(GAP_BOUNDARIES_S) + 1
    found = {i: gap for i, gap in enumerate(spent.gaps) if gap[0]}
    assert found == {
        0: (2, 0.0),  # two of the three that came together
        bisect_left(GAP_BOUNDARIES_S, 0.05): (2, pytest.approx(0.085)),
        bisect_left(GAP_BOUNDARIES_S, 1.0): (1, pytest.approx(0.7)),
        len(GAP_BOUNDARIES_S): (1, pytest.approx(60.0)),
    }
    assert sum(seconds for _, seconds in spent.gaps) == pytest.approx(spent.decode_s)


def test_one_token_has_no_gap(clock: Clock) -> None:
    assert not any(n for n, _ in traced(clock, (3.0, 1)).gaps)
    assert not any(n for n, _ in traced(clock).gaps)


def test_every_gap_is_observed_in_its_bucket(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundaries are those that Ray's histogram gets, and its sum is the time between the tokens."""
    observed: list[float] = []
    use_rays_exporter()
    made = ReplicaMetrics("m")
    metrics.make_with(None)
    of_ray: Any = made._itl
    assert of_ray.info["boundaries"] == list(GAP_BOUNDARIES_S)
    monkeypatch.setattr(made._itl, "observe", observed.append)
    gaps = [0.004, 0.0045, 0.19, 0.019, 0.019, 40.0]
    spent = traced(clock, (1.0, 1), *((gap, 1) for gap in gaps))
    made.on_end(SequenceEnd(FinishReason.STOP, Usage(3, len(gaps) + 1, 0), spent))
    buckets = [bisect_left(GAP_BOUNDARIES_S, value) for value in sorted(observed)]
    assert buckets == [bisect_left(GAP_BOUNDARIES_S, gap) for gap in sorted(gaps)]
    assert sum(observed) == pytest.approx(sum(gaps))


def test_boundaries_are_as_ray_takes_them() -> None:
    for ends in (GAP_BOUNDARIES_S, reporting._SECONDS):
        assert all(end > 0 for end in ends)
        assert list(ends) == sorted(set(ends))


def test_time_for_pictures_is_counted_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[float] = []
    made = ReplicaMetrics("m")
    monkeypatch.setattr(made._encoding, "inc", lambda more, _: counted.append(more))
    for seconds in (0.5, 0.5, 0.75):
        made.update(replace(STATS, pictures=PictureStats(encode_s=seconds)))
    assert counted == [0.5, 0.25]


def test_a_model_that_is_unloaded_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, float] = {}
    made = ReplicaMetrics("m")
    for name, gauge in made._gauges.items():
        monkeypatch.setattr(gauge, "set", partial(told.__setitem__, name))
    queue = QueueStats(running=1, waiting=2, backlog_s=4.0)
    made.update(replace(STATS, queue=queue, cache=CacheStats(stored_bytes=3)))
    assert told == {
        "slots_busy": 1,
        "requests_waiting": 2,
        "kv_cache_used_ratio": 0.0,
        "memory_tier_bytes": 3,
        "backlog_seconds": 4.0,
    }
    made.rest()
    assert told == dict.fromkeys(told, 0.0)


def test_only_new_throttling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's count goes on; another model may have been loaded in this process before."""
    counted: list[float] = []
    monkeypatch.setattr(reporting, "throttled_s", lambda: 2.0)
    made = ReplicaMetrics("m")
    monkeypatch.setattr(made._throttled, "inc", lambda more, _: counted.append(more))
    for seconds in (2.0, 2.5):
        monkeypatch.setattr(reporting, "throttled_s", lambda seconds=seconds: seconds)
        made.update(STATS)
    assert counted == [0.5]


def test_many_gaps_at_once_are_as_many_one_by_one() -> None:
    at_once, singly = (
        prometheus_client.Histogram("gap", "A gap.", registry=None, buckets=GAP_BOUNDARIES_S)
        for _ in range(2)
    )
    histogram = metrics.PrometheusMetric(at_once, {})
    for n, seconds in ((3, 0.12), (1, 0.05), (2, 1e6), (4, 0.0), (0, 0.0)):
        metrics.observe_all(histogram, n, seconds)
        for _ in range(n):
            singly.observe(seconds / n)
    (found,), (expected,) = at_once.collect(), singly.collect()
    for sample, other in zip(found.samples, expected.samples, strict=True):
        if sample.name != "gap_created":
            assert sample.labels == other.labels
            assert sample.value == pytest.approx(other.value)

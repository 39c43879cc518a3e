"""When a decoder thread counts as hanging, and when not."""

from __future__ import annotations

import time

import pytest

from serve_app.engine import EngineFailedError
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.health import HangWatch, Progress, RunningBatch, is_overdue
from tests.unit.engine.harness import PATIENCE_S, WatchedBackend, request, running, start, until

PERIOD_S = 10.0
"""Serve asks as often as that."""


@pytest.mark.parametrize(
    ("ran_s", "forecast_s", "overdue"),
    [
        (0, 0.05, False),
        (59, 0.05, False),  # a decode on a machine that does something else
        (61, 0.05, True),
        (60, 3.0, False),
        (61, 3.1, False),  # a long chunk of a large model's prompt
        (63, 3.1, True),
        (1999, 100, False),
        (2001, 100, True),
        (61, 0, False),  # nothing was measured
        (599, 0, False),
        (601, 0, True),
    ],
)
def test_what_is_overdue(ran_s: float, forecast_s: float, overdue: bool) -> None:
    assert is_overdue(ran_s, forecast_s) is overdue


def test_a_batch_that_runs_on_hangs() -> None:
    watch, batch = HangWatch(), RunningBatch(1000.0, lambda: 0.05)
    told = [watch.hangs(batch, 1000.0 + PERIOD_S * i) for i in range(9)]
    assert told == [False] * 7 + [True] * 2


def test_every_batch_counts_for_itself() -> None:
    watch = HangWatch()
    assert not any(
        watch.hangs(RunningBatch(PERIOD_S * i, lambda: 0.05), PERIOD_S * (i + 1)) for i in range(50)
    )


def test_nothing_hangs_while_there_is_nothing_to_do() -> None:
    watch, batch = HangWatch(), RunningBatch(0.0, lambda: 0.05)
    assert not any(watch.hangs(None, PERIOD_S * i) for i in range(50))
    assert not watch.hangs(batch, 1.0)
    assert not watch.hangs(None, 2.0)


def test_a_process_that_was_stopped_does_not_hang() -> None:
    """All of it stood still for an hour, the look and the batch alike."""
    watch, batch = HangWatch(), RunningBatch(0.0, lambda: 0.05)
    assert not watch.hangs(batch, 1.0)
    assert not watch.hangs(batch, 3600.0)
    assert not watch.hangs(batch, 3601.0)
    assert any(watch.hangs(batch, 3601.0 + PERIOD_S * i) for i in range(9))


def test_a_batch_is_there_as_long_as_it_is_computed() -> None:
    progress = Progress()
    with progress.computing(lambda: 0.5):
        batch = progress.batch
    assert batch is not None
    assert batch.forecast_s() == 0.5
    assert batch.began <= time.monotonic()
    assert progress.batch is None


def test_a_batch_that_fails_is_over() -> None:
    progress = Progress()
    with pytest.raises(KeyError), progress.computing(lambda: 0.5):
        raise KeyError
    assert progress.batch is None


def measured(seconds: float) -> Profile:
    return Profile(decode_s={1: seconds}, prefill_s={16: seconds})


@pytest.mark.parametrize("work", ["text", "embedding"])
def test_an_engine_that_hangs_is_not_healthy(work: str) -> None:
    backend = WatchedBackend(n_slots=1)
    backend.profile = measured(0.05)
    with running(backend) as engine:
        backend.hold()
        if work == "text":
            start(engine, request("a"))
        else:
            engine.embed([(1, 2)])
        until(lambda: engine.progress.batch is not None)
        began = time.monotonic()
        for i in range(6):
            engine.check_health(began + PERIOD_S * i)
        engine.check_health(began + 59)
        with pytest.raises(EngineFailedError, match=r"hangs: a batch with a forecast of 0\.\d\d s"):
            engine.check_health(began + 69)


def test_an_engine_that_goes_on_is_healthy_again() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.profile = measured(0.05)
    with running(backend) as engine:
        backend.hold()
        (inbox,) = start(engine, request("a"))
        until(lambda: engine.progress.batch is not None)
        engine.check_health()
        backend.resume()
        inbox.wait()
        until(lambda: engine.progress.batch is None)
        for i in range(9):
            engine.check_health(time.monotonic() + PATIENCE_S * i)


def test_what_is_forecast_to_be_slow_may_be() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.profile = measured(30.0)
    with running(backend) as engine:
        backend.hold()
        start(engine, request("a"))
        until(lambda: engine.progress.batch is not None)
        began = time.monotonic()
        for i in range(59):
            engine.check_health(began + PERIOD_S * i)

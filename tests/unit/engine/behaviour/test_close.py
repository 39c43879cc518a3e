"""Draining."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from serve_app.engine import Engine, EngineClosedError, EngineFailedError, FinishReason
from serve_app.engine.costs.cost_model import Profile
from tests.unit.engine.harness import (
    PATIENCE_S,
    SteppedBackend,
    WatchedBackend,
    ask,
    continuation,
    options,
    request,
    running,
    start,
    until,
)


def test_close_finishes_what_was_accepted_and_refuses_the_rest(
    after: Callable[[str], threading.Event],
) -> None:
    drained = after("drain")
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        inboxes = start(engine, request("a"), request("b"))
        backend.wait_for_batch()
        closing = threading.Thread(target=engine.close, args=(PATIENCE_S,))
        closing.start()
        assert drained.wait(PATIENCE_S)
        with pytest.raises(EngineClosedError):
            start(engine, request("c"))
        backend.resume()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert [inbox.end.reason for inbox in inboxes] == [FinishReason.LENGTH] * 2
        assert backend.closed
        with pytest.raises(EngineClosedError):
            start(engine, request("d"))


def test_close_past_its_deadline_ends_the_rest_with_an_error() -> None:
    """It does not wait for the batch, which would never end."""
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend) as engine:
        inboxes = start(engine, request("a"), request("b"))
        until(lambda: backend.n_waiting == 1)
        engine.close(0.0)
        assert all(isinstance(inbox.end.error, EngineClosedError) for inbox in inboxes)
    assert [len(inbox.token_ids) for inbox in inboxes] == [0, 0]


async def test_piled_up_text_is_read_after_close() -> None:
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1))
    stream = engine.submit(request("a", "abc", max_tokens=5))
    engine.close()
    (delta,) = [delta async for delta in stream]
    assert delta.token_ids == tuple(continuation(b"abc", 5))
    assert delta.text == bytes(continuation(b"abc", 5)).decode()
    assert delta.end is not None
    assert delta.end.reason is FinishReason.LENGTH


def test_close_of_an_idle_engine_twice() -> None:
    backend = WatchedBackend(n_slots=1)
    engine = Engine(lambda: backend, options(1))
    engine.close()
    engine.close()
    assert backend.closed
    assert backend.batches == []
    with pytest.raises(EngineClosedError):
        start(engine, request("a"))


def test_close_of_a_failed_engine() -> None:
    with running(WatchedBackend(n_slots=1, break_after=0)) as engine:
        ask(engine, request("a"))
        engine.close()
        with pytest.raises(EngineFailedError):
            start(engine, request("b"))


def test_closed_engine_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1))
    ask(engine, request("a"))
    engine.close()
    with pytest.raises(EngineClosedError):
        start(engine, request("b"))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("step_s", "is_kept"), [(30.0, True), (10.0, False)])
def test_what_was_learned_in_some_time_is_kept_for_the_next_start(
    step_s: float, is_kept: bool
) -> None:
    """A profile that was made beside other programs, and batches that take no time."""
    backend = WatchedBackend(n_slots=1)
    backend.profile = Profile({1: 1.0}, {1: 1.0}, share=0.3)
    with running(backend) as engine:
        ask(engine, request("a"))
        engine.core.counts.step_s = step_s
    assert (backend.profile.share == 1.0) == is_kept
    assert (backend.profile.decode_s[1] < 1.0) == is_kept

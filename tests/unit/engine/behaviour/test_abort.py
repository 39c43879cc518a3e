"""Requests that are ended from outside."""

from __future__ import annotations

import pytest

from serve_app.engine import FinishReason
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.policy.forecast import Forecast
from serve_app.engine.policy.policy import SlotPolicy
from tests.unit.engine.harness import (
    Inbox,
    SteppedBackend,
    WatchedBackend,
    are_accepted,
    ask,
    continuation,
    options,
    request,
    running,
    start,
    until,
)


@pytest.mark.parametrize(
    ("n_steps", "n_generated"),
    [
        pytest.param(0, 0, id="first prompt chunk"),
        pytest.param(1, 0, id="second prompt chunk"),
        pytest.param(2, 0, id="last prompt chunk"),
        pytest.param(3, 1, id="first decode"),
        pytest.param(5, 3, id="later"),
    ],
)
def test_abort_while_running(n_steps: int, n_generated: int) -> None:
    """The prompt takes three steps; the batch that waits when the abort comes is left."""
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, n_batch=4)) as engine:
        (inbox,) = start(engine, request("a", "abcdefghijkl", max_tokens=None))
        backend.wait_for_batch()
        for _ in range(n_steps):
            backend.step()
        engine.abort("a")
        engine.abort("a")
        backend.resume()
        end = inbox.wait()
        assert end.reason is FinishReason.ABORT
        assert end.error is None
        assert end.usage.completion_tokens == n_generated
        assert len(backend.batches) == n_steps + 1, "it ran on"
        assert engine.stats().slots[0].state == "idle"
    assert inbox.token_ids == continuation(b"abcdefghijkl", n_generated)


def test_abort_while_waiting() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend, options(1, max_waiting=1)) as engine:
        first, second = start(engine, request("a"), request("b"))
        engine.abort("b")
        backend.resume()
        assert second.wait().reason is FinishReason.ABORT
        assert second.end.usage.completion_tokens == 0
        assert first.wait().reason is FinishReason.LENGTH
    assert len(backend.tenancies) == 1, "compute was spent on it"


def test_a_batch_that_nobody_wants_is_left() -> None:
    """It would never end, as it is held. What was fed by then is dropped again, and charged."""
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend) as engine:
        (inbox,) = start(engine, request("a", "abcdefgh"))
        until(lambda: backend.n_waiting == 1)
        engine.abort("a")
        assert inbox.wait().reason is FinishReason.ABORT
        backend.resume()
        assert ask(engine, request("b", "abcdefgh")).token_ids == continuation(b"abcdefgh", 4)
    assert backend.tenancies[1].n_cached == 0


def test_a_batch_is_computed_for_whoever_still_wants_it() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend) as engine:
        both = start(engine, request("a", "abc", max_tokens=9), request("b", "xyz", max_tokens=9))
        backend.wait_for_batch()
        while len({row[2] for row in backend.batches[-1]} if backend.batches else ()) < 2:
            backend.step()
        engine.abort("a")
        backend.resume()
        ends = [inbox.wait().reason for inbox in both]
    assert ends == [FinishReason.ABORT, FinishReason.LENGTH]
    assert both[1].token_ids == continuation(b"xyz", 9)


def test_abort_shows_the_text_that_was_held() -> None:
    letters = continuation(b"q", 1)
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        held = bytes(letters).decode()
        (inbox,) = start(engine, request("a", "q", max_tokens=None, stop=(held + "\0",)))
        backend.wait_for_batch()
        backend.step()
        engine.abort("a")
        backend.resume()
        inbox.wait()
    assert [delta.text for delta in inbox.deltas] == ["", held]


def test_abort_after_the_end_and_of_nobody() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        ended = ask(engine, request("a"))
        engine.abort("a")
        engine.abort("nobody")
        assert ask(engine, request("a")).end.reason is FinishReason.LENGTH
        assert ended.end.reason is FinishReason.LENGTH


FORECAST = Forecast(n_slots=1, prompt_token_s=0, token_s=0, n_generated=1)


def test_a_batch_is_left_when_all_that_it_is_for_are_aborted() -> None:
    command_queue, said = CommandQueue(SlotPolicy(options(3))), list[bool]()
    command_queue.cancel_with(said.append)
    a, b, c, d = sequences = [EngineSequence(request(name), Inbox()) for name in "abcd"]
    assert are_accepted(command_queue.submit(sequences[:3], FORECAST))
    command_queue.take(0.0)
    with command_queue.computing([a, b]):
        command_queue.abort("a")
        assert not any(said), "b still wants it"
        command_queue.abort("b")
        assert said.pop()
    with command_queue.computing([c, b]):
        assert not said.pop(), "the next one is another"
        command_queue.abort("c")
        assert said.pop()
    with command_queue.computing([b, c]):
        assert said.pop(), "they were aborted since the step began"
    command_queue.cancel()
    with command_queue.computing([d]):
        assert said.pop(), "the engine is being closed"


def test_late_abort_does_not_hit_the_next_request_of_that_id() -> None:
    command_queue = CommandQueue(SlotPolicy(options(1, max_waiting=0)))
    first, second = (EngineSequence(request("a"), Inbox()) for _ in range(2))
    assert are_accepted(command_queue.submit([first], FORECAST))
    command_queue.take(0.0)
    command_queue.abort("a")
    command_queue.forget("a")
    assert are_accepted(command_queue.submit([second], FORECAST))
    pending = command_queue.take(0.0)
    assert pending.submitted == [second]
    assert not pending.aborted


async def test_leaving_a_stream_aborts_it() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        async with engine.submit(request("a", max_tokens=None)) as stream:
            backend.wait_for_batch()
            backend.step()
            async for _ in stream:
                break
        backend.resume()
        ask(engine, request("b"))
        assert engine.stats().requests.ended == {"abort": 1, "length": 1}

"""Those who read streams, and callbacks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from serve_app.engine import (
    FinishReason,
    TokenDelta,
    TokenStream,
)
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    SteppedBackend,
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    continuation,
    options,
    read,
    request,
    running,
    start,
)


def test_callback_that_raises_aborts_its_request_only(
    after: Callable[[str], threading.Event],
) -> None:
    aborted = after("abort")
    backend = SteppedBackend(n_slots=2)
    calls: list[TokenDelta] = []

    def fail(delta: TokenDelta) -> None:
        calls.append(delta)
        raise ValueError("scripted")

    with running(backend) as engine:
        engine.submit_callback(request("bad", max_tokens=None), fail)
        backend.wait_for_batch()
        backend.step()
        assert aborted.wait(PATIENCE_S)
        (neighbour,) = start(engine, request("good", "abc"))
        backend.resume()
        assert neighbour.wait().reason is FinishReason.LENGTH
        assert engine.stats().requests.ended == {"abort": 1, "length": 1}
    assert len(calls) == 1


async def test_an_engine_without_callbacks_has_no_thread_for_them() -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "corral-callbacks"]

    with running(WatchedBackend(n_slots=2)) as engine:
        assert (await read(engine.submit(request("a")))).end.reason is FinishReason.LENGTH
        assert threads() == []
        (inbox,) = start(engine, request("b"))
        inbox.wait()
        assert threads() == ["corral-callbacks"]
    assert threads() == []


async def test_slow_callback_holds_up_no_stream() -> None:
    go_on = threading.Event()
    called = threading.Event()
    slow = Inbox()

    def wait(delta: TokenDelta) -> None:
        called.set()
        assert go_on.wait(PATIENCE_S)
        slow(delta)

    with running(WatchedBackend(n_slots=2)) as engine:
        engine.submit_callback(request("slow"), wait)
        assert called.wait(PATIENCE_S)
        fast = await read(engine.submit(request("fast")))
        assert fast.end.reason is FinishReason.LENGTH
        assert slow.deltas == []
        go_on.set()
        slow.wait()
    assert slow.token_ids == fast.token_ids


def test_stream_of_a_closed_event_loop_is_aborted_and_harms_nobody() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend) as engine:

        async def leave() -> None:
            engine.submit(request("left", max_tokens=None))

        asyncio.run(leave())
        backend.wait_for_batch()
        backend.resume()
        assert ask(engine, request("stays", "abc")).token_ids == continuation(b"abc", 4)
        engine.check_health()
        assert engine.stats().requests.ended == {"abort": 1, "length": 1}


async def test_many_streams_at_once_say_what_they_would_say_alone() -> None:
    backend = WatchedBackend(n_slots=4)
    prompts = [f"{'common ' * (i % 3)}{i}" for i in range(20)]
    with running(backend, options(4, n_batch=7)) as engine:
        outcomes = engine.submit_many(
            [request(str(i), prompt, max_tokens=3 + i % 5) for i, prompt in enumerate(prompts)]
        )
        streams = [outcome for outcome in outcomes if isinstance(outcome, TokenStream)]
        inboxes = await asyncio.gather(*map(read, streams))
    assert len(inboxes) == len(prompts)
    for i, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        assert inbox.token_ids == continuation(prompt.encode(), 3 + i % 5)
    assert_only_own_tokens_were_fed(backend)

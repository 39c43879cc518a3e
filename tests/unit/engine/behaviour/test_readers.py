"""Those who read streams."""

from __future__ import annotations

import asyncio

from serve_app.engine import TokenStream
from tests.unit.engine.harness import (
    SteppedBackend,
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    continuation,
    options,
    read,
    request,
    running,
)


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

"""A request's answer begins when all of its sequences are accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from serve_app.base.errors import QueueFullError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.server.answering import streaming
from serve_app.server.model_registry import ServedModel
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer

REQUESTS = [GenerationRequest(f"r.{i}", (1,)) for i in range(3)]


class Engine:
    """Accepts each request, or refuses it, when it is told to; then says HELLO."""

    def __init__(self) -> None:
        self.decided: dict[str, asyncio.Future[None]] = {}
        self.n_open = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.n_open += 1
        try:
            self.decided[request.id] = asyncio.get_running_loop().create_future()
            await self.decided[request.id]
            yield Accepted()
            for delta in HELLO:
                yield delta
        finally:
            self.n_open -= 1


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def started(engine: Engine) -> asyncio.Task[streaming.Deltas]:
    model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)  # type: ignore[arg-type]
    task = asyncio.create_task(streaming.start(model, REQUESTS))
    await settle()
    assert list(engine.decided) == ["r.0", "r.1", "r.2"]
    return task


async def test_it_waits_for_every_sequence_and_loses_nothing_of_the_early_ones() -> None:
    engine = Engine()
    starting = await started(engine)
    for request in REQUESTS:
        assert not starting.done()
        engine.decided[request.id].set_result(None)
        await settle()
    assert starting.done()
    sequences: list[list[TokenDelta]] = [[] for _ in REQUESTS]
    async for index, delta in await starting:
        sequences[index].append(delta)
    assert sequences == [HELLO] * 3
    assert engine.n_open == 0


async def test_one_refusal_refuses_all() -> None:
    engine = Engine()
    starting = await started(engine)
    engine.decided["r.0"].set_result(None)
    await settle()
    engine.decided["r.2"].set_exception(QueueFullError("full", 7))
    with pytest.raises(QueueFullError):
        await starting
    assert engine.n_open == 0


async def test_who_leaves_before_that_ends_all() -> None:
    engine = Engine()
    starting = await started(engine)
    engine.decided["r.1"].set_result(None)
    await settle()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.n_open == 0


async def test_others_have_their_turns_between_early_deltas() -> None:
    """A thousand deltas may have come before the last of 32 answers was accepted."""
    engine, turns = Engine(), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    starting = await started(engine)
    for request in REQUESTS:
        engine.decided[request.id].set_result(None)
    deltas = await starting
    await settle()
    n_early, turning = len(deltas._early), asyncio.create_task(other())
    assert n_early
    for n in range(n_early):
        await anext(deltas)
        assert turns > n
    turning.cancel()
    await deltas.aclose()

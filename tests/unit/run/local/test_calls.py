"""Calls between two processes of a local server, over a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from serve_app.base.errors import EngineFailedError, QueueFullError
from serve_app.base.values.replicas import (
    Asleep,
    ReplicaRecords,
    ReplicaStats,
    RequestRecord,
    SlotAction,
)
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel.protocol import Address, frame_body
from serve_app.config.sources import AdapterConfig, ModelSource
from serve_app.run.local.calls import Connection, pack_value, unpack_value

PATIENCE_S = 10.0
VALUES = [
    GenerationRequest("r", (1, 2, -1), client="c"),
    Address("node", "path", "", 0, "secret"),
    AdapterConfig(id="a", source=ModelSource(path=Path("/a.gguf")), scale=0.5),
    ReplicaStats("r", "n", {"costs": {1: 2.5}}, (0, 1), latencies={"ttft_s": {0.1: 3}}),
    ReplicaRecords("r", (RequestRecord("r", "h", "c", "waiting"),)),
    SlotAction(1, 2, 3, 4.0),
    Asleep("r"),
    ((1, 2), (3,)),
    "text",
    b"key",
    None,
    True,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_as_it_was_sent(value: object) -> None:
    assert unpack_value(*pack_value(value)) == value


def test_vectors_come_as_they_were_sent() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(unpack_value(*pack_value(vectors)), vectors)


class Replica:
    """It is called."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def stats(self) -> ReplicaStats:
        return ReplicaStats("r", "n", {})

    async def embed(self, *arguments: Any) -> Any:
        return QueueFullError("full", 3)

    async def explain(self, _: str) -> None:
        raise ValueError("inside")

    async def generate(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


Pair = tuple[Connection, Connection, Replica]


@pytest.fixture
async def pair() -> AsyncIterator[Callable[[], Any]]:
    """A client's end, a replica's end, and the replica."""
    made: list[Connection] = []

    async def connect() -> Pair:
        loop, replica = asyncio.get_running_loop(), Replica()

        def method(name: str) -> Any:
            return {one: getattr(replica, one) for one in vars(Replica) if one[0] != "_"}[name]

        for end in socket.socketpair():
            _, connection = await loop.create_unix_connection(
                lambda: Connection(method, lambda: None), sock=end
            )
            made.append(connection)
        return made[0], made[1], replica

    yield connect
    for connection in made:
        connection.close()


async def test_answers_and_errors_come_back(pair: Callable[[], Any]) -> None:
    client, _, _ = await pair()
    assert await client.call("stats") == ReplicaStats("r", "n", {})
    refusal = await client.call("embed", ((1,),), "c", b"key", False)
    assert isinstance(refusal, QueueFullError)
    assert refusal.args == ("full", 3)
    assert isinstance(await client.call("explain", "r"), EngineFailedError)


async def test_a_call_that_is_cancelled_is_cancelled_there(pair: Callable[[], Any]) -> None:
    client, _, replica = await pair()
    call = asyncio.create_task(client.call("generate"))
    await client.call("stats")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(PATIENCE_S):
        await replica.cancelled.wait()


async def test_calls_fail_when_the_process_is_lost(pair: Callable[[], Any]) -> None:
    client, server, replica = await pair()
    call = asyncio.create_task(client.call("generate"))
    await client.call("stats")
    server.close()
    with pytest.raises(EngineFailedError, match="lost"):
        await call
    async with asyncio.timeout(PATIENCE_S):
        await replica.cancelled.wait()
    with pytest.raises(EngineFailedError, match="lost"):
        await client.call("stats")
    assert client.n_calls == 0


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode([0, "no_such_method", []])])
async def test_what_is_no_message_ends_the_connection(body: bytes, pair: Callable[[], Any]) -> None:
    client, server, _ = await pair()
    client._transport.write(frame_body(body))
    async with asyncio.timeout(PATIENCE_S):
        while not server._transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0)

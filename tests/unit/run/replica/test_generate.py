"""What a replica's stream tells of one request, over a scripted backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.base.errors import (
    ChannelBrokenError,
    CorralError,
    EngineClosedError,
    InvalidRequestError,
    ModelReplacedError,
    PromptTooLongError,
)
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.adapters import Adapters
from serve_app.base.values.answers import Accepted, FinishReason, SequenceEnd, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel.listener import IncomingCall
from serve_app.channel.sender import Channels
from serve_app.engine import Engine
from serve_app.run.replica.batching import Batcher
from serve_app.run.replica.loaded_model import LoadedModel
from tests.unit.channel.harness import HERE, listening, read, settle
from tests.unit.engine.harness import PATIENCE_S, SteppedBackend, request, running

KEY = b"vocabulary"
N_TOKENS = 4


class Metrics:
    """What was counted."""

    def __init__(self) -> None:
        self.ends: list[SequenceEnd] = []

    def on_end(self, end: SequenceEnd) -> None:
        self.ends.append(end)


class NoAdapters:
    """None are loaded."""

    async def have(self, adapters: Adapters) -> None:
        assert not adapters


class Replica(LoadedModel):
    """One without Serve, whose engine is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocabulary_key = KEY
        self._metrics = Metrics()  # type: ignore[assignment]
        self._adapters = NoAdapters()  # type: ignore[assignment]
        self._channels = Channels(HERE, "r")
        self._entries = Batcher(engine.submit_to, 16)
        engine.on_delivered(self._channels.flush)


@dataclass
class Asked:
    """A request as an ingress asks for it."""

    call: IncomingCall
    answer: asyncio.Task[CorralError | None]


@pytest.fixture
def backend() -> SteppedBackend:
    return SteppedBackend(n_slots=1)


@pytest.fixture
async def replica(backend: SteppedBackend) -> AsyncIterator[Any]:
    with running(backend) as engine:
        one = Replica(engine)
        yield one
        backend.resume()
        one._channels.close()


@pytest.fixture
async def ask(replica: Any) -> AsyncIterator[Callable[..., Asked]]:
    async with listening() as (listener, address):
        with ExitStack() as stack:

            def asked(wanted: GenerationRequest, key: bytes = KEY) -> Asked:
                call = stack.enter_context(listener.call())
                generating = replica.generate(wanted, key, address, call.number)
                return Asked(call, asyncio.create_task(generating))

            yield asked


async def test_acceptance_comes_before_any_prefill_and_costs_one_item(
    ask: Callable[..., Asked], replica: Any, backend: SteppedBackend
) -> None:
    asked = ask(request("r", max_tokens=N_TOKENS))
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(asked.call) == Accepted()
    await asyncio.to_thread(backend.wait_for_batch)
    assert [tenancy.fed for tenancy in backend.tenancies] == [[]]
    deltas: list[Accepted | TokenDelta] = []
    for _ in range(N_TOKENS - 1):
        await asyncio.to_thread(backend.step)
        deltas.append(await anext(asked.call))
    backend.resume()
    deltas.append(await anext(asked.call))
    found = [delta for delta in deltas if isinstance(delta, TokenDelta)]
    assert [len(delta.token_ids) for delta in found] == [1] * N_TOKENS
    assert found[-1].end is not None
    assert found[-1].end.reason == FinishReason.LENGTH
    assert [item async for item in asked.call] == []
    assert await asked.answer is None
    assert replica._metrics.ends == [found[-1].end]


@pytest.mark.parametrize(
    ("asked", "key", "refusal"),
    [
        (request("r"), b"another", ModelReplacedError),
        (request("r", "x" * 64), KEY, PromptTooLongError),
        (GenerationRequest("r", (1,), SamplingParams(grammar="none")), KEY, InvalidRequestError),
    ],
)
async def test_what_is_refused_is_not_accepted(
    ask: Callable[..., Asked], asked: GenerationRequest, key: bytes, refusal: type[Exception]
) -> None:
    one = ask(asked, key)
    assert isinstance(await one.answer, refusal)
    await settle()
    assert one.call.channel is None


async def test_leaving_frees_the_slot(
    ask: Callable[..., Asked], replica: Any, backend: SteppedBackend
) -> None:
    asked = ask(request("r", max_tokens=None))
    assert await anext(asked.call) == Accepted()
    await asyncio.to_thread(backend.wait_for_batch)
    asked.answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked.answer
    after = ask(request("after"))
    backend.resume()
    assert len((await read(after.call)).text) == N_TOKENS  # over the same connection
    assert await after.answer is None
    assert not asked.call.has_ended  # or who is left would take it for the whole answer
    (channel,) = replica._channels._channels.values()
    assert not channel._calls


async def test_a_break_ends_the_request_and_is_told(
    ask: Callable[..., Asked], replica: Any, backend: SteppedBackend
) -> None:
    asked = ask(request("r", max_tokens=None))
    assert await anext(asked.call) == Accepted()
    await asyncio.to_thread(backend.wait_for_batch)
    (channel,) = replica._channels._channels.values()
    channel.close()
    assert isinstance(await asked.answer, ChannelBrokenError)
    assert isinstance((await read(asked.call)).error, ChannelBrokenError)
    after = ask(request("after"))  # over a new connection, when the slot is free
    backend.resume()
    assert len((await read(after.call)).text) == N_TOKENS
    assert await after.answer is None


async def test_an_error_that_ends_it_comes_behind_its_text(
    ask: Callable[..., Asked], replica: Any, backend: SteppedBackend
) -> None:
    """And not as the answer, which might be faster."""
    asked = ask(request("r", max_tokens=None))
    assert await anext(asked.call) == Accepted()
    await asyncio.to_thread(backend.wait_for_batch)
    closing = asyncio.create_task(asyncio.to_thread(replica._engine.close, 0))
    backend.resume()
    seen = await read(asked.call)
    assert isinstance(seen.error, EngineClosedError)
    assert await asked.answer is None
    await closing
    assert [end.reason for end in replica._metrics.ends] == [FinishReason.ERROR]

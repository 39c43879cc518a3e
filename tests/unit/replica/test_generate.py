"""What a replica's stream tells of one request, over a scripted backend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.engine import Engine, TokenStream
from serve_app.errors import (
    CorralError,
    InvalidRequestError,
    ModelReplacedError,
    PromptTooLongError,
)
from serve_app.replica.deployment import EngineReplica
from serve_app.sampling import SamplingParams
from serve_app.types import Accepted, FinishReason, GenerationRequest, TokenDelta
from tests.unit.engine.harness import PATIENCE_S, SteppedBackend, request, running

KEY = b"vocabulary"
N_TOKENS = 4


class Metrics:
    """Nobody looks at them."""

    def ended(self, end: object) -> None: ...


class Replica(EngineReplica.func_or_class):  # type: ignore[misc, name-defined]
    """One without Serve, whose engine is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocabulary_key = KEY
        self._metrics = Metrics()

    async def _enter(self, asked: GenerationRequest) -> TokenStream | CorralError:
        """Without Serve's batching."""
        (outcome,) = self._engine.submit_many([asked])
        return outcome

    def __del__(self) -> None:
        """Whoever gave the engine closes it."""


@pytest.fixture
def backend() -> SteppedBackend:
    return SteppedBackend(n_slots=1)


@pytest.fixture
def replica(backend: SteppedBackend) -> Iterator[Any]:
    with running(backend) as engine:
        yield Replica(engine)


async def test_acceptance_comes_before_any_prefill_and_costs_one_item(
    replica: Any, backend: SteppedBackend
) -> None:
    stream = replica.generate(request("r", max_tokens=N_TOKENS), KEY)
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(stream) == Accepted()
    await asyncio.to_thread(backend.wait_for_batch)
    assert [tenancy.fed for tenancy in backend.tenancies] == [[]]
    deltas: list[TokenDelta] = []
    for _ in range(N_TOKENS - 1):
        await asyncio.to_thread(backend.step)
        deltas.append(await anext(stream))
    backend.resume()
    deltas.append(await anext(stream))
    assert [len(delta.token_ids) for delta in deltas] == [1] * N_TOKENS
    assert deltas[-1].end is not None
    assert deltas[-1].end.reason == FinishReason.LENGTH
    assert [item async for item in stream] == []


@pytest.mark.parametrize(
    ("asked", "key", "refusal"),
    [
        (request("r"), b"another", ModelReplacedError),
        (request("r", "x" * 64), KEY, PromptTooLongError),
        (GenerationRequest("r", (1,), SamplingParams(grammar="none")), KEY, InvalidRequestError),
    ],
)
async def test_what_is_refused_is_not_accepted(
    replica: Any, asked: GenerationRequest, key: bytes, refusal: type[Exception]
) -> None:
    (item,) = [item async for item in replica.generate(asked, key)]
    assert isinstance(item, refusal)

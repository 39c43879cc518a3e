"""What goes wrong behind a Serve handle, in Corral's terms."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serve_app.errors import (
    CorralError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
)
from serve_app.ingress import deployment
from serve_app.ingress.deployment import HandleClient
from serve_app.routing.broadcast import note_running
from serve_app.sampling import SamplingParams
from serve_app.types import (
    GenerationRequest,
    ReplicaRecords,
    ReplicaStats,
    RequestRecord,
    SlotAction,
    TokenDelta,
)
from tests.unit.routing import replicas

REQUEST = GenerationRequest("r", (1, 2), SamplingParams())


class Call:
    """A response as Serve 2.60 gives it: where no replica took the call, `cancel` raises once more what
    that failed with (`_DeploymentResponseBase.cancel`)."""

    def __init__(self, failure: BaseException | None) -> None:
        self.failure = failure
        self.n_left = 0

    async def __aiter__(self) -> AsyncGenerator[TokenDelta]:
        yield TokenDelta("a", (1,))
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(60)

    def cancel(self) -> None:
        self.n_left += 1
        if isinstance(self.failure, Exception):
            raise self.failure


class Handle:
    """Each call fails in its own way."""

    def __init__(self, *failures: BaseException | None) -> None:
        self.calls = [Call(failure) for failure in failures]
        self._left = list(self.calls)
        self.generate = self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *_: Any) -> Call:
        return self._left.pop(0)

    @property
    def n_calls(self) -> int:
        """How many were made."""
        return len(self.calls) - len(self._left)


async def tokens(handle: Handle) -> list[int]:
    """What came until all calls had failed."""
    found: list[int] = []
    async for delta in HandleClient(handle, b"")._attempt(REQUEST):  # type: ignore[arg-type]
        assert isinstance(delta, TokenDelta)
        found += delta.token_ids
    return found


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ActorUnavailableError("gone", None), EngineFailedError),
        (RayError("owner died"), EngineFailedError),
        (RuntimeError("inside Serve"), EngineFailedError),
        (asyncio.CancelledError(), EngineFailedError),
        (BackPressureError(num_queued_requests=3, max_queued_requests=3), QueueFullError),
        (DeploymentUnavailableError(None), EngineUnavailableError),  # type: ignore[arg-type]
        (QueueFullError("full", 3), QueueFullError),
    ],
)
async def test_every_failure_is_told_and_the_call_is_left(
    failure: BaseException, told: type[CorralError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_LEAVING_S", 0.0)
    handle = Handle(failure)
    with pytest.raises(told):
        await tokens(handle)
    assert [call.n_left for call in handle.calls] == [1]


async def test_a_reader_that_is_cancelled_is_cancelled() -> None:
    handle = Handle(None)
    reader = asyncio.create_task(tokens(handle))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [call.n_left for call in handle.calls] == [1]


async def test_nobody_else_is_asked_for_a_client_that_has_left() -> None:
    """Serve cancels the call first, and its reader a moment later."""
    handle = Handle(asyncio.CancelledError(), None)
    stream = HandleClient(handle, b"").generate(REQUEST)  # type: ignore[arg-type]
    await anext(stream)
    reader = asyncio.ensure_future(anext(stream))
    for _ in range(20):  # more than it would take to ask another
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert handle.n_calls == 1


async def test_a_stream_goes_on_after_a_failure_of_any_kind() -> None:
    handle = Handle(RuntimeError("inside Serve"), ActorUnavailableError("gone", None), None)
    stream = HandleClient(handle, b"").generate(REQUEST)  # type: ignore[arg-type]
    found = [await anext(stream) for _ in handle.calls]
    await stream.aclose()
    assert found == [TokenDelta("a", (1,))] * 3
    assert [call.n_left for call in handle.calls] == [1, 1, 1]


# -- what is asked of all replicas ----------------------------------------------------------------


def asking(*answers: Any) -> tuple[HandleClient, replicas.Handle]:
    """A client of three replicas, and its handle."""
    handle = replicas.Handle(list(answers))
    note_running(handle.app_name, handle.deployment_name, ["r1", "r2", "r3"])
    return HandleClient(handle, b""), handle  # type: ignore[arg-type]


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for what never comes."""
    monkeypatch.setattr(deployment, "_STATS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(deployment, "_SLOT_TIMEOUT_S", 0.05)


@pytest.mark.usefixtures("_soon")
async def test_stats_of_those_that_answer() -> None:
    stats = ReplicaStats("r2", "n", {})
    client, _ = asking(asyncio.Event(), stats, ActorUnavailableError("gone", None))
    found = await client.stats()
    assert (found.found, found.missing) == ((stats,), ("r1", "r3"))


@pytest.mark.parametrize("after", [["r2", "r3", "r4"], ["r2", "r3"]])
async def test_who_comes_or_goes_meanwhile_is_not_missing(after: list[str]) -> None:
    late = asyncio.Event()
    client, handle = asking(ReplicaStats("r2", "n", {}), ReplicaStats("r3", "n", {}), late)
    asked = asyncio.create_task(client.stats())
    while not handle.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    note_running(handle.app_name, handle.deployment_name, after)
    handle.calls[2].fail(ActorUnavailableError("gone", None))
    assert (await asked).missing == ()


@pytest.mark.usefixtures("_soon")
async def test_records_of_those_that_answer() -> None:
    record = RequestRecord("a", "", "", "waiting")
    told = ReplicaRecords("r1", (record,)), ReplicaRecords("r3", ())
    client, handle = asking(*told, asyncio.Event())
    found = await client.explain("a")
    assert (found.found, found.missing) == ((record,), ("r2",))
    assert handle.asked == [("explain", "a")]


async def test_many_askers_are_one_question() -> None:
    client, handle = asking(*(ReplicaStats(f"r{i}", "n", {}) for i in (1, 2, 3)))
    found = await asyncio.gather(*(client.stats() for _ in range(100)))
    assert {one.missing for one in found} == {()}
    assert handle.asked == [("stats",)]


@pytest.mark.usefixtures("_soon")
async def test_slots_are_acted_on_without_the_others() -> None:
    done = SlotAction(0, 1, 2, 3.0)
    client, _ = asking(asyncio.Event(), ActorUnavailableError("gone", None), None, done)
    assert await client.act_on_slot("r2", "save", 0, "name") == done
    client, _ = asking(None, QueueFullError("full", 3), asyncio.Event())
    with pytest.raises(QueueFullError):
        await client.act_on_slot("r2", "save", 0, "name")
    client, _ = asking(None, asyncio.Event())
    with pytest.raises(EngineUnavailableError, match="r2 does not answer"):
        await client.act_on_slot("r2", "save", 0, "name")


@pytest.mark.usefixtures("_soon")
async def test_a_late_controller_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, n_asked = threading.Event(), 0

    def status() -> Any:
        nonlocal n_asked
        n_asked += 1
        assert may_answer.wait(30)
        raise RayError("away")

    monkeypatch.setattr("serve_app.ingress.deployment.serve.status", status)
    client, _ = asking()
    try:
        assert [await client.replica_states() for _ in range(3)] == [{}] * 3
        assert n_asked == 1  # or threads would pile up
    finally:
        may_answer.set()
    assert await client.replica_states() == {}

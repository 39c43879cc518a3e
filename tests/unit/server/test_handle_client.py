"""A client of engines behind a Serve handle: what is asked of it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Generator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    DecodeError,
    EngineFailedError,
    EngineUnavailableError,
    ModelLoadingError,
    QueueFullError,
)
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.replicas import (
    Asleep,
    ReplicaRecords,
    ReplicaStats,
    RequestRecord,
    SlotAction,
)
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel import routing_reports as reports
from serve_app.channel.listener import Listener
from serve_app.channel.protocol import Address
from serve_app.channel.sender import Channels
from serve_app.cluster import serve_handle
from serve_app.cluster.serve_handle import ServeHandle, note_running
from serve_app.server import handle_client
from serve_app.server.handle_client import HandleClient
from tests.unit.channel.harness import HERE, PATIENCE_S, delta, failed, last, listening, settle
from tests.unit.cluster import replicas

REQUEST = GenerationRequest("r", (1, 2), SamplingParams())


class Call:
    """A response as Serve 2.60 gives it (`_DeploymentResponseBase`): where no replica took the call,
    `cancel` raises once more what that failed with. The second time, it does nothing."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.n_left = 0
        self._replica_result_future = asyncio.get_running_loop().create_future()
        self._may_answer = asyncio.Event()

    def answer(self) -> None:
        """Whatever it was to answer."""
        self._may_answer.set()

    def __await__(self) -> Generator[Any, None, CorralError | None]:
        yield from self._may_answer.wait().__await__()
        if isinstance(self._answer, BaseException) and not isinstance(self._answer, CorralError):
            raise self._answer
        assert self._answer is None or isinstance(self._answer, CorralError)
        return self._answer

    def cancel(self) -> None:
        if self.n_left:
            return
        self.n_left += 1
        if isinstance(self._answer, Exception):
            raise self._answer


LASTS = object()
"""What is answered by one that never ends."""


class Handle:
    """Each call brings one token over a channel, but for those that are refused; then it ends in its own
    way: None comes after the end of its answer."""

    app_name, deployment_name = "corral", "engine-handle"

    def __init__(self, *answers: object) -> None:
        self.calls = [Call(answer) for answer in answers]
        self._left = list(self.calls)
        self.generate = self
        self.channels = Channels(HERE, "r")
        self.listener: Listener
        self.error: CorralError | None = None
        """What the answers end with, if they come to their end."""

    def remote(self, _: GenerationRequest, __: bytes, address: Address, number: int) -> Call:
        call = self._left.pop(0)
        self._sending = asyncio.ensure_future(self._send(call, address, number))
        return call

    async def _send(self, call: Call, address: Address, number: int) -> None:
        channel = await self.channels.to(address)
        if not isinstance(call._answer, CorralError):
            channel.push(number, delta("a"))
        if call._answer is None:
            channel.push(number, last() if self.error is None else failed(self.error))
        channel.flush()
        if not isinstance(call._answer, CorralError):
            await self._has_come(number)
        if call._answer is not LASTS:
            call.answer()

    async def _has_come(self, number: int) -> None:
        while (  # noqa: ASYNC110
            (call := self.listener._calls.get(number)) and call.channel is None
        ):
            await asyncio.sleep(0)

    @property
    def n_calls(self) -> int:
        """How many were made."""
        return len(self.calls) - len(self._left)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as (one, _):
        yield one


def client(handle: Handle, listener: Listener) -> HandleClient:
    handle.listener = listener
    return HandleClient(ServeHandle(handle), b"", listener, "m", None)  # type: ignore[arg-type]


async def tokens(handle: Handle, listener: Listener) -> list[int]:
    """What came until all calls had failed."""
    found: list[int] = []
    async for item in client(handle, listener)._attempt(REQUEST):
        if isinstance(item, TokenDelta):
            found += item.token_ids
    return found


FAILURES = pytest.mark.parametrize(
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


@FAILURES
async def test_every_failure_is_told_and_the_call_is_left(
    failure: BaseException,
    told: type[CorralError],
    monkeypatch: pytest.MonkeyPatch,
    listener: Listener,
) -> None:
    monkeypatch.setattr(serve_handle, "_LEAVING_S", 0.0)
    handle = Handle(failure)
    with pytest.raises(told):
        await tokens(handle, listener)
    assert [call.n_left for call in handle.calls] == [1]
    assert not listener._calls


async def test_a_call_that_ends_by_itself_is_not_cancelled(listener: Listener) -> None:
    """Serve would count it as one that was, and its replica might not have written its log."""
    handle = Handle(None)
    assert await tokens(handle, listener) == list(delta("a").token_ids)
    await settle()
    assert [call.n_left for call in handle.calls] == [0]
    assert not listener._calls


async def test_nor_is_one_whose_end_is_an_error(listener: Listener) -> None:
    handle = Handle(None)
    handle.error = DecodeError("No.")
    with pytest.raises(DecodeError):
        await tokens(handle, listener)
    await settle()
    assert [call.n_left for call in handle.calls] == [0]


async def test_an_end_that_never_comes_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setattr(handle_client, "_LATE_S", 0.0)
    handle = Handle(LASTS)
    handle.calls[0]._answer = None
    handle.calls[0].answer()
    handle.channels.to = Mute().to  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineFailedError, match="without an end"):
        await tokens(handle, listener)


class Mute:
    """A replica's channels over which nothing comes."""

    async def to(self, _: Address) -> Mute:
        return self

    def push(self, *_: object) -> None: ...

    def flush(self) -> None: ...


@pytest.mark.parametrize("n_turns", range(6))
async def test_a_reader_that_is_cancelled_is_cancelled(n_turns: int, listener: Listener) -> None:
    """At any moment: from before its call is followed."""
    handle = Handle(LASTS)
    reader = asyncio.create_task(tokens(handle, listener))
    async with asyncio.timeout(PATIENCE_S):
        while not handle.n_calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for _ in range(n_turns):
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [call.n_left for call in handle.calls] == [1]
    await handle._sending


async def test_so_is_one_that_is_cancelled_at_each_wait(listener: Listener) -> None:
    """As Starlette's streams are, whose task groups cancel until all have left."""
    handle = Handle(LASTS)
    reader = asyncio.create_task(tokens(handle, listener))
    async with asyncio.timeout(PATIENCE_S):
        while not handle.n_calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        while not reader.done():
            reader.cancel()
            await asyncio.sleep(0)
    assert [call.n_left for call in handle.calls] == [1]
    await handle._sending


async def test_who_waits_for_a_call_and_is_cancelled_cancels_it(listener: Listener) -> None:
    """Whatever was called: Serve does so for requests that come by its proxies."""
    call = Call(LASTS)
    waiting = asyncio.ensure_future(serve_handle.ServeCall(call)._outcome())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.n_left == 1


async def test_nobody_else_is_asked_for_a_client_that_has_left(listener: Listener) -> None:
    """Serve cancels the call first, and its reader a moment later."""
    handle = Handle(asyncio.CancelledError(), None)
    stream = client(handle, listener).generate(REQUEST)
    found = [await anext(stream), await anext(stream)]
    assert found == [Accepted(), delta("a")]
    reader = asyncio.ensure_future(anext(stream))
    for _ in range(20):  # more than it would take to ask another
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert handle.n_calls == 1


async def test_a_stream_goes_on_after_a_failure_of_any_kind(listener: Listener) -> None:
    handle = Handle(RuntimeError("inside Serve"), ActorUnavailableError("gone", None), LASTS)
    stream = client(handle, listener).generate(REQUEST)
    assert await anext(stream) == Accepted()
    found = [await anext(stream) for _ in handle.calls]
    await stream.aclose()
    assert found == [delta("a")] * 3
    assert [call.n_left for call in handle.calls] == [1, 1, 1]


async def test_a_stream_goes_on_when_its_connection_breaks(listener: Listener) -> None:
    handle = Handle(LASTS, None)
    stream = client(handle, listener).generate(REQUEST)
    assert [await anext(stream), await anext(stream)] == [Accepted(), delta("a")]
    handle.channels.close()
    text = "".join([item.text async for item in stream if isinstance(item, TokenDelta)])
    assert text == "a"
    assert [call.n_left for call in handle.calls] == [1, 0]


class SilentHandle:
    """Its calls are never answered."""

    app_name, deployment_name = "corral", "engine-silent"

    def __init__(self) -> None:
        self.generate = self
        self.clients: list[str] = []

    def remote(self, asked: GenerationRequest, *_: object) -> asyncio.Future[None]:
        self.clients.append(asked.client)
        return asyncio.get_running_loop().create_future()


async def test_a_burst_of_one_client_leaves_room_for_another(listener: Listener) -> None:
    handle = SilentHandle()
    engines = HandleClient(ServeHandle(handle), b"", listener, "m", None)  # type: ignore[arg-type]

    def asks(client: str) -> asyncio.Future[object]:
        asked = dataclasses.replace(REQUEST, client=client)
        return asyncio.ensure_future(anext(engines.generate(asked)))

    burst = [asks("greedy") for _ in range(100)]
    async with asyncio.timeout(PATIENCE_S):
        while len(handle.clients) < handle_client._STARTING_EACH:  # noqa: ASYNC110
            await asyncio.sleep(0)
        burst.append(asks("other"))
        while "other" not in handle.clients:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert handle.clients.count("greedy") == handle_client._STARTING_EACH
    for one in burst:
        one.cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert handle.clients.count("greedy") == handle_client._STARTING_EACH


# -- what is asked of all replicas ----------------------------------------------------------------


def asking(*answers: Any) -> tuple[HandleClient, replicas.Handle]:
    """A client of three replicas, and its handle."""
    handle = replicas.Handle(list(answers))
    note_running(handle.app_name, handle.deployment_name, ["r1", "r2", "r3"])
    of_three: Any = ServeHandle(handle)  # type: ignore[arg-type]
    none: Any = None
    client = HandleClient(of_three, b"", Listener(HERE, "127.0.0.1"), "m", none)
    return client, handle


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for what never comes."""
    monkeypatch.setattr(handle_client, "_STATS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(handle_client, "_SLOT_TIMEOUT_S", 0.05)


@pytest.mark.usefixtures("_soon")
async def test_stats_of_those_that_answer() -> None:
    stats = ReplicaStats("r2", "n", {})
    client, _ = asking(asyncio.Event(), stats, ActorUnavailableError("gone", None))
    found = await client.stats()
    assert (found.found, found.missing) == ((stats,), ("r1", "r3"))


async def test_a_replica_whose_model_is_not_loaded_answers_and_has_no_stats() -> None:
    stats = ReplicaStats("r2", "n", {})
    client, _ = asking(Asleep("r1"), stats, Asleep("r3"))
    found = await client.stats()
    assert (found.found, found.missing) == ((stats,), ())


async def test_a_model_whose_process_stays_is_loaded_while_it_has_a_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: set[str] = set()
    handle, listener = replicas.Handle([]), Listener(HERE, "127.0.0.1")
    note_running(handle.app_name, handle.deployment_name, ["r1"])
    monkeypatch.setattr(reports, "HERE", SimpleNamespace(hears=heard.__contains__))
    found = [
        HandleClient(ServeHandle(handle), b"", listener, "m", None, is_on_demand=is_on_demand)  # type: ignore[arg-type]
        for is_on_demand in (True, False)
    ]
    assert [one.is_loaded for one in found] == [False, True]
    heard.add("r1")
    assert [one.is_loaded for one in found] == [True, True]


async def test_why_a_model_cannot_be_loaded_is_raised() -> None:
    async def refuse() -> CorralError:
        return ConfigError("It is damaged.")

    handle: Any = replicas.Handle([])
    handle.is_there = SimpleNamespace(remote=refuse)
    client = HandleClient(ServeHandle(handle), b"", Listener(HERE, "127.0.0.1"), "m", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="damaged"):
        await client.load()


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

    monkeypatch.setattr("serve_app.cluster.serve_handle.serve.status", status)
    client, _ = asking()
    try:
        assert [await client.replica_states() for _ in range(3)] == [{}] * 3
        assert n_asked == 1  # or threads would pile up
    finally:
        may_answer.set()
    assert await client.replica_states() == {}


async def test_a_model_that_takes_too_long_to_load_is_told_of(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_client, "MOST_LOAD_S", 0.01)
    handle = SilentHandle()
    note_running(handle.app_name, handle.deployment_name, [])
    engines = HandleClient(ServeHandle(handle), b"", listener, "m", None)  # type: ignore[arg-type]
    assert not engines.is_loaded
    with pytest.raises(ModelLoadingError) as refused:
        await anext(engines.generate(REQUEST))
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    note_running(handle.app_name, handle.deployment_name, ["r1"])
    assert engines.is_loaded

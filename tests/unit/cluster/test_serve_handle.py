"""Replicas that are late, or fail, cost nobody the others' answers."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorUnavailableError
from ray.serve._private.long_poll import LongPollClient
from ray.serve._private.router import (
    AsyncioRouter,
    CurrentLoopRouter,
    SharedRouterLongPollClient,
    SingletonThreadRouter,
)
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle, DeploymentResponse

from serve_app.cluster.serve_handle import ServeCall, ServeHandle, handle_for_now, note_running
from tests.unit.cluster.replicas import Call, Handle

SOON_S = 0.05
"""How long a test waits for one that never answers."""
LATER_S = 60.0
"""More than a test may take."""


async def test_all_that_answer_are_heard() -> None:
    handle: Any = Handle(["one", "two"])
    assert sorted(await ServeHandle(handle).ask_all("stats", 7, timeout_s=LATER_S)) == [
        "one",
        "two",
    ]
    assert handle.asked == [("stats", 7)]
    assert not any(call.left for call in handle.calls)


async def test_a_late_one_is_left_and_the_others_are_heard() -> None:
    handle: Any = Handle([asyncio.Event(), "two", asyncio.Event(), "four"])
    assert sorted(await ServeHandle(handle).ask_all("stats", timeout_s=SOON_S)) == ["four", "two"]
    assert [call.left for call in handle.calls] == [True, False, True, False]


@pytest.mark.parametrize(
    "failure", [ActorUnavailableError("gone", None), RuntimeError("any"), asyncio.CancelledError()]
)
async def test_one_that_fails_is_left_out(failure: BaseException) -> None:
    handle: Any = Handle([failure, "two"])
    assert await ServeHandle(handle).ask_all("stats", timeout_s=LATER_S) == ["two"]


@pytest.mark.parametrize(
    "instead",
    [
        DeploymentUnavailableError(None),  # type: ignore[arg-type]
        RuntimeError("inside Serve"),
        None,  # no replica has come up yet
        [],
    ],
    ids=repr,
)
async def test_nobody_answers_where_nobody_is(instead: Any) -> None:
    handle: Any = Handle(instead)
    assert await ServeHandle(handle).ask_all("stats", timeout_s=SOON_S) == []
    assert await ServeHandle(handle).ask_one("stats", timeout_s=SOON_S) is None


async def test_who_is_not_meant_is_not_waited_for() -> None:
    handle: Any = Handle([None, asyncio.Event(), RuntimeError("dead"), "mine"])
    assert await ServeHandle(handle).ask_one("act", timeout_s=LATER_S) == "mine"
    assert [call.left for call in handle.calls] == [False, True, False, False]


async def test_who_is_meant_may_be_late() -> None:
    handle: Any = Handle([None, asyncio.Event()])
    assert await ServeHandle(handle).ask_one("act", timeout_s=SOON_S) is None


async def test_an_asker_that_leaves_leaves_its_calls() -> None:
    handle: Any = Handle([asyncio.Event()])
    asking = asyncio.create_task(ServeHandle(handle).ask_all("stats", timeout_s=LATER_S))
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert handle.calls[0].left


async def test_a_replica_that_has_just_taken_a_call_is_left() -> None:
    """By a response of Serve's own that nobody has awaited, in the event loop of its router."""
    taken, replica = asyncio.get_running_loop().create_future(), Call(None)
    taken.set_result(replica)
    metadata: Any = SimpleNamespace(request_id="r")
    call = ServeCall(DeploymentResponse(taken, metadata, _is_router_running_in_separate_loop=False))
    call.cancel()
    assert replica.left


def test_the_router_tells_who_runs() -> None:
    handle: Any = Handle([])
    note_running("app", "engines", ["a", "b"])
    note_running("app", "others", ["c"])
    assert ServeHandle(handle).running() == {"a", "b"}
    note_running("app", "engines", [])
    assert ServeHandle(handle).running() == frozenset()


def test_serve_still_has_what_is_used_of_it() -> None:
    assert callable(DeploymentBroadcastResponse._fetch_replica_results_async)
    assert callable(LongPollClient.stop)
    assert callable(DeploymentHandle.shutdown_async)
    made = inspect.getsource(SharedRouterLongPollClient)
    assert "self.long_poll_client = LongPollClient(" in made
    assert list(inspect.signature(SharedRouterLongPollClient.get_or_create).parameters) == [
        "controller_handle",
        "event_loop",
    ]
    for source in (CurrentLoopRouter, SingletonThreadRouter):
        assert "self._asyncio_router = AsyncioRouter(" in inspect.getsource(source)
    assert "self.long_poll_client = LongPollClient(" in inspect.getsource(AsyncioRouter)


class Poll:
    """A client that polls Serve's controller."""

    def __init__(self) -> None:
        self.host_actor, self.event_loop = object(), object()
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False


class Subscribed(Handle):
    """A handle with its clients, as Serve 2.60 has them."""

    def __init__(self, shared: Poll) -> None:
        super().__init__([])
        self.own, self.shared = Poll(), shared
        self._router: Any = SimpleNamespace(
            _asyncio_router=SimpleNamespace(long_poll_client=self.own)
        )
        self.is_shut_down = False

    async def shutdown_async(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Subscribed:
    made = Subscribed(Poll())

    def get_or_create(host: object, loop: object) -> Any:
        assert (host, loop) == (made.own.host_actor, made.own.event_loop)
        return SimpleNamespace(long_poll_client=made.shared)

    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: made)
    monkeypatch.setattr(SharedRouterLongPollClient, "get_or_create", get_or_create)
    return made


async def test_a_handle_for_now_subscribes_to_nothing_afterwards(handle: Subscribed) -> None:
    async with handle_for_now("engines", "app") as used:
        assert id(used._handle) == id(handle)
        polling = [one.is_running for one in (handle.own, handle.shared)]
    assert polling == [True, True]
    assert [one.is_running for one in (handle.own, handle.shared)] == [False, False]
    assert handle.is_shut_down


async def test_so_it_is_where_it_fails(handle: Subscribed) -> None:
    with pytest.raises(RuntimeError, match="in use"):
        async with handle_for_now("engines", "app"):
            raise RuntimeError("in use")
    assert not handle.own.is_running


async def test_one_that_was_never_used_has_nothing_to_stop(handle: Subscribed) -> None:
    handle._router = None
    async with handle_for_now("engines", "app"):
        pass
    assert handle.is_shut_down


async def test_trouble_with_the_end_of_a_handle_is_only_logged(
    handle: Subscribed, caplog: pytest.LogCaptureFixture
) -> None:
    handle._router = object()
    async with handle_for_now("engines", "app"):
        pass
    assert "A handle to engines stays subscribed" in caplog.text

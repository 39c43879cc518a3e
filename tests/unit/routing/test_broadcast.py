"""Replicas that are late, or fail, cost nobody the others' answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from serve_app.routing.broadcast import ask_all, ask_one, note_running, running
from tests.unit.routing.replicas import Handle

SOON_S = 0.05
"""How long a test waits for one that never answers."""
LATER_S = 60.0
"""More than a test may take."""


async def test_all_that_answer_are_heard() -> None:
    handle: Any = Handle(["one", "two"])
    assert sorted(await ask_all(handle, "stats", 7, timeout_s=LATER_S)) == ["one", "two"]
    assert handle.asked == [("stats", 7)]
    assert not any(call.left for call in handle.calls)


async def test_a_late_one_is_left_and_the_others_are_heard() -> None:
    handle: Any = Handle([asyncio.Event(), "two", asyncio.Event(), "four"])
    assert sorted(await ask_all(handle, "stats", timeout_s=SOON_S)) == ["four", "two"]
    assert [call.left for call in handle.calls] == [True, False, True, False]


@pytest.mark.parametrize(
    "failure", [ActorUnavailableError("gone", None), RuntimeError("any"), asyncio.CancelledError()]
)
async def test_one_that_fails_is_left_out(failure: BaseException) -> None:
    handle: Any = Handle([failure, "two"])
    assert await ask_all(handle, "stats", timeout_s=LATER_S) == ["two"]


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
    assert await ask_all(handle, "stats", timeout_s=SOON_S) == []
    assert await ask_one(handle, "stats", timeout_s=SOON_S) is None


async def test_who_is_not_meant_is_not_waited_for() -> None:
    handle: Any = Handle([None, asyncio.Event(), RuntimeError("dead"), "mine"])
    assert await ask_one(handle, "act", timeout_s=LATER_S) == "mine"
    assert [call.left for call in handle.calls] == [False, True, False, False]


async def test_who_is_meant_may_be_late() -> None:
    handle: Any = Handle([None, asyncio.Event()])
    assert await ask_one(handle, "act", timeout_s=SOON_S) is None


async def test_an_asker_that_leaves_leaves_its_calls() -> None:
    handle: Any = Handle([asyncio.Event()])
    asking = asyncio.create_task(ask_all(handle, "stats", timeout_s=LATER_S))
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert handle.calls[0].left


def test_the_router_tells_who_runs() -> None:
    handle: Any = Handle([])
    note_running("app", "engines", ["a", "b"])
    note_running("app", "others", ["c"])
    assert running(handle) == {"a", "b"}
    note_running("app", "engines", [])
    assert running(handle) == frozenset()


def test_serve_still_has_what_is_used_of_it() -> None:
    assert callable(DeploymentBroadcastResponse._fetch_replica_results_async)

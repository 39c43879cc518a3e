"""Viewers share one look a second, which ends with the last of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest

from serve_app.apis.page.broadcaster import MAX_VIEWERS, N_FRAMES, Broadcaster
from serve_app.base.errors import EngineClosedError
from serve_app.base.values.replicas import ReplicaStats
from serve_app.server.model_registry import Answers, ServedModel
from tests.doubles.api import build_api
from tests.unit.apis.page.test_snapshot import merged, replica
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine


class Engine(ScriptedEngine):
    """Counts how often it is looked at; each time, it has generated one token more."""

    def __init__(self) -> None:
        super().__init__()
        self.n_looks = 0
        self.stopped = self.broken = False

    async def stats(self) -> Answers[ReplicaStats]:
        if self.broken:
            raise KeyError("Nobody knows.")
        self.n_looks += 1
        return Answers((replica(generated_tokens=self.n_looks),))

    async def replica_states(self) -> dict[str, int]:
        if self.stopped:
            raise EngineClosedError("Stopped.")
        return {"RUNNING": 1}


@pytest.fixture
def looked_at() -> Engine:
    return Engine()


@pytest.fixture
def models(looked_at: Engine) -> dict[str, ServedModel]:
    return {"m": ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=looked_at)}  # type: ignore[arg-type]


async def test_viewers_share_the_looks(looked_at: Engine, models: dict[str, ServedModel]) -> None:
    broadcaster = Broadcaster(models, period_s=0)
    async with aclosing(broadcaster.frames()) as one, aclosing(broadcaster.frames()) as other:
        first = await anext(one)
        assert first["replicas"]["r1"]["model"] == "m"
        n_before = looked_at.n_looks
        built = await anext(other)  # whole, too, although it came later
        assert built["replicas"]["r1"]["model"] == "m"
        for _ in range(5):
            frames: tuple[dict[str, Any], dict[str, Any]] = await asyncio.gather(
                anext(one), anext(other)
            )
            built = merged(built, frames[1])
        assert looked_at.n_looks - n_before == 6
    n_looks = looked_at.n_looks
    for _ in range(10):
        await asyncio.sleep(0)
    assert looked_at.n_looks == n_looks, "somebody still looks"


async def test_models_on_demand_say_whether_they_are_loaded(models: dict[str, ServedModel]) -> None:
    found = {
        name: replace(models["m"], id=name, is_on_demand=on_demand)
        for name, on_demand in (("asked", True), ("always", False))
    }
    assert Broadcaster(found)._load_states() == {"asked": {"loaded": True}}


async def test_of_too_many_viewers_the_first_of_who_has_most_is_told_no_more(
    models: dict[str, ServedModel],
) -> None:
    broadcaster = Broadcaster(models, period_s=0)
    async with AsyncExitStack() as stack:

        async def view(holder: str) -> AsyncGenerator[Any]:
            frames = await stack.enter_async_context(aclosing(broadcaster.frames(holder=holder)))
            assert (await anext(frames))["replicas"]
            return frames

        early = await view("ben")
        anas = [await view("ana") for _ in range(MAX_VIEWERS - 1)]
        late = await view("ben")
        with pytest.raises(StopAsyncIteration):
            await anext(anas[0])
        for one in (early, *anas[1:], late):
            assert await anext(one)


async def test_who_comes_back_soon_finds_the_events(
    looked_at: Engine, models: dict[str, ServedModel]
) -> None:
    broadcaster = Broadcaster(models, period_s=0)
    for n_frames in (3, 1):
        async with aclosing(broadcaster.frames()) as frames:
            for _ in range(n_frames):
                frame = await anext(frames)
    assert (
        frame["replicas"]["r1"]["generated_per_s"] > 0
    )  # so it is not a board that has just begun


async def test_who_comes_at_once_after_the_last_is_looked_for_alone(
    looked_at: Engine, models: dict[str, ServedModel]
) -> None:
    """The looks of before have not noticed yet that they are over."""
    broadcaster = Broadcaster(models, period_s=0)
    for _ in range(3):
        async with aclosing(broadcaster.frames()) as frames:
            await anext(frames)
    for _ in range(10):
        await asyncio.sleep(0)
    n_looks = looked_at.n_looks
    for _ in range(10):
        await asyncio.sleep(0)
    assert looked_at.n_looks == n_looks, "somebody still looks"


async def test_what_breaks_ends_the_frames(
    looked_at: Engine, models: dict[str, ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    broadcaster = Broadcaster(models, period_s=0)
    looked_at.broken = True
    assert [frame async for frame in broadcaster.frames()] == []
    assert "cannot be broadcast" in caplog.text
    looked_at.broken = False
    async with aclosing(broadcaster.frames()) as frames:
        assert "replicas" in await anext(frames)


async def test_frames_end_after_a_while(models: dict[str, ServedModel]) -> None:
    """Or an ingress replica with a viewer could not be stopped."""
    broadcaster = Broadcaster(models, period_s=0)
    assert len([frame async for frame in broadcaster.frames()]) == N_FRAMES


async def test_the_end_of_the_application_ends_the_frames(
    looked_at: Engine, models: dict[str, ServedModel]
) -> None:
    broadcaster = Broadcaster(models, period_s=0)
    looked_at.stopped = True
    assert [frame async for frame in broadcaster.frames()] == []
    looked_at.stopped = False
    async with aclosing(broadcaster.frames()) as frames:
        assert "replicas" in await anext(frames)


async def test_the_route(looked_at: Engine, models: dict[str, ServedModel]) -> None:
    """Over ASGI, as httpx would wait for the end."""
    app, got = build_api(models), list[dict[str, Any]]()
    arrived, left = asyncio.Event(), asyncio.Event()

    coming = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not coming:
            await left.wait()
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)
        if message.get("body"):
            arrived.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "path": "/v1/live",
        "raw_path": b"/v1/live",
        "query_string": b"",
        "headers": [],
        "server": ("127.0.0.1", 80),
    }
    serving = asyncio.create_task(app(scope, receive, send))
    await arrived.wait()
    left.set()
    await serving
    start, event, *_ = got
    headers = {name.lower(): value for name, value in start["headers"]}
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert event["body"].startswith(b'data: {"')
    n_looks = looked_at.n_looks
    await asyncio.sleep(0)
    assert looked_at.n_looks == n_looks

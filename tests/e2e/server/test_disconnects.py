"""Clients that leave, and requests that find the house full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral, sse, wait_until

SMALL = 1  # its index among the models
LONG = {
    "model": "small",
    "prompt": "x",
    "max_tokens": 200_000,
    "ignore_eos": True,
    "context_shift": True,
}


@pytest.fixture
async def http(corral: Corral) -> AsyncIterator[httpx.AsyncClient]:
    wait_until(lambda: corral.stats(SMALL)["queue"]["running"] == 0, 30, "idle")
    async with httpx.AsyncClient(base_url=corral.url, timeout=60) as client:
        yield client


async def until(corral: Corral, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, lambda: condition(corral.stats(SMALL)), 30, what)


def aborted(corral: Corral) -> int:
    count: int = corral.stats(SMALL)["requests"]["ended"].get("abort", 0)
    return count


async def test_a_client_that_leaves_mid_stream_frees_its_slot(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    before = aborted(corral)
    async with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.aiter_lines()  # kept: without it, httpx would leave
        async for line in lines:
            if line and sse(line)["choices"][0]["text"]:
                break
        await until(corral, lambda stats: stats["queue"]["running"] == 1, "running")
    await until(corral, lambda stats: stats["queue"]["running"] == 0, "slot free")
    stats = corral.stats(SMALL)
    assert aborted(corral) == before + 1
    assert [slot["state"] for slot in stats["slots"]] == ["idle"]
    assert stats["slots"][0]["n_past"] < 1900  # it ended because nobody listened


async def test_a_client_that_leaves_while_it_waits_for_the_whole_answer(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    before = aborted(corral)
    request = asyncio.create_task(http.post("/v1/completions", json=LONG))
    await until(corral, lambda stats: stats["queue"]["running"] == 1, "running")
    request.cancel()
    await until(corral, lambda stats: stats["queue"]["running"] == 0, "slot free")
    assert aborted(corral) == before + 1


async def test_full_queue(corral: Corral, http: httpx.AsyncClient) -> None:
    before = aborted(corral)
    running = asyncio.create_task(http.post("/v1/completions", json=LONG))
    await until(corral, lambda stats: stats["queue"]["running"] == 1, "running")
    waiting = asyncio.create_task(http.post("/v1/completions", json=LONG))
    await until(corral, lambda stats: stats["queue"]["waiting"] == 1, "waiting")
    for stream in (False, True):
        refused = await http.post("/v1/completions", json=LONG | {"stream": stream})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
    # Who gives up while waiting leaves the queue, and the running one does not notice.
    waiting.cancel()
    await until(corral, lambda stats: stats["queue"]["waiting"] == 0, "left the queue")
    assert aborted(corral) == before + 1
    assert corral.stats(SMALL)["queue"]["running"] == 1
    running.cancel()
    await until(corral, lambda stats: stats["queue"]["running"] == 0, "slot free")


async def test_the_neighbour_of_a_leaver_gets_its_whole_answer(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    body = {"model": "big", "prompt": "A neighbour", "max_tokens": 200, "temperature": 0}
    alone = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    neighbour = asyncio.create_task(http.post("/v1/completions", json=body))
    async with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        await anext(response.aiter_lines())
    assert (await neighbour).json()["choices"][0]["text"] == alone

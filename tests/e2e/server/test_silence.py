"""Streams that wait for long: their headers come at once, and pings until there is a token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.conftest import Corral
from tests.e2e.server.test_disconnects import LONG, until

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
OFTEN = {"sse_ping_interval": 1}


@pytest.fixture
async def http(corral: Corral) -> AsyncIterator[httpx.AsyncClient]:
    await until(corral, lambda stats: stats["queue"]["running"] == 0, "idle")
    async with httpx.AsyncClient(base_url=corral.url, timeout=60) as client:
        yield client


@asynccontextmanager
async def full_engine(corral: Corral, http: httpx.AsyncClient) -> AsyncIterator[httpx.Response]:
    """Its only slot is taken as long as the response is open."""
    body = LONG | {"stream": True, "max_tokens": 200_000, "context_shift": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        await until(corral, lambda stats: stats["queue"]["running"] == 1, "running")
        yield response


async def test_headers_at_once_and_pings_until_the_first_token(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    """Unit tests have the pings of the other protocols, and those below real clients."""
    asked = OFTEN | {"model": "small", "prompt": "x", "stream": True, "max_tokens": 4}
    async with (
        full_engine(corral, http) as first,
        http.stream("POST", "/v1/completions", json=asked) as second,
    ):
        assert second.status_code == 200
        assert second.headers["content-type"].startswith("text/event-stream")
        await until(corral, lambda stats: stats["queue"]["waiting"] == 1, "the second waits")
        lines = second.aiter_lines()
        n_pings = 0
        while n_pings < 2:
            line = await anext(lines)
            n_pings += line.startswith("data: {") and not json.loads(line[6:])["choices"][0]["text"]
        assert corral.stats(1)["queue"]["waiting"] == 1
        await first.aclose()
        rest = [line async for line in lines]
    events = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert events
    assert not any("error" in event for event in events)


async def test_headers_come_before_any_event(corral: Corral, http: httpx.AsyncClient) -> None:
    asked = {"model": "small", "prompt": "x", "stream": True, "sse_ping_interval": -1}
    async with (
        full_engine(corral, http),
        http.stream("POST", "/v1/completions", json=asked) as second,
    ):
        assert second.status_code == 200
        assert corral.stats(1)["queue"]["waiting"] == 1


class Pings:
    """Counts the pings in a response's body, which somebody else reads."""

    def __init__(self, response: Any) -> None:
        self.n_seen = 0
        self._read = response.aiter_bytes
        response.aiter_bytes = self._counted

    async def _counted(self) -> AsyncIterator[bytes]:
        async for read in self._read():
            self.n_seen += read.count(b": ping\n") + read.count(b'"delta":{}')
            yield read


async def read_when_it_has_pinged(corral: Corral, stream: Any, first: httpx.Response) -> list[Any]:
    """The stream's events; the slot is free once there were two pings."""
    pings = Pings(stream.response)

    async def read() -> list[Any]:
        return [event async for event in stream]

    reading = asyncio.create_task(read())
    await until(corral, lambda _: pings.n_seen >= 2, "two pings")
    await first.aclose()
    return await reading


async def test_openais_client_reads_a_stream_with_pings(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client,
        full_engine(corral, http) as first,
    ):
        stream = await client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=4, stream=True, extra_body=OFTEN
        )
        chunks = await read_when_it_has_pinged(corral, stream, first)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_anthropics_client_reads_a_stream_with_pings(
    corral: Corral, http: httpx.AsyncClient
) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=corral.url, api_key="none", max_retries=0) as client,
        full_engine(corral, http) as first,
    ):
        stream = await client.messages.create(
            model="small", messages=MESSAGES, max_tokens=4, stream=True, extra_body=OFTEN
        )
        events = await read_when_it_has_pinged(corral, stream, first)
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"

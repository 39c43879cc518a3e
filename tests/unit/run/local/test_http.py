"""HTTP of a server without a proxy, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from serve_app.run.local import http
from serve_app.run.local.http import BoundedHttp

BODY = "HTTP/1.1 is\r\nnot: a header\r\n\r\nhere"
PATIENCE_S = 30


Serve = Callable[[FastAPI], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves an application; gives the port."""
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def started(app: FastAPI) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, log_level="error"))
        running.append((server, asyncio.create_task(server.serve([listener]))))
        port: int = listener.getsockname()[1]
        return port

    yield started
    for server, serving in running:
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE_S)


async def connected(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def test_names_have_capitals_and_bodies_stay_as_they_are(serve: Serve) -> None:
    app = FastAPI()

    @app.get("/")
    def root() -> PlainTextResponse:
        return PlainTextResponse(BODY, headers={"process-start-time-unix": "a-b: c"})

    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reader, writer = await connected(await serve(app), head)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    head_text, _, body = answer.decode().partition("\r\n\r\n")
    names = [line.partition(":")[0] for line in head_text.split("\r\n")[1:]]
    assert {"Process-Start-Time-Unix", "Content-Type", "Content-Length"} <= set(names)
    assert all(name == name.title() for name in names)
    assert "Process-Start-Time-Unix: a-b: c" in head_text
    assert body == BODY


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server ends the connection without an answer."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    return True


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"])
async def test_a_head_that_does_not_end_is_not_waited_for(
    data: bytes, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.05)
    reader, writer = await connected(await serve(FastAPI()), data)
    assert await closed(reader)
    writer.close()


async def test_a_head_that_is_too_long_ends_its_connection(serve: Serve) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"name: value\r\n" * 10_000
    reader, writer = await connected(await serve(FastAPI()), head)
    assert await closed(reader)
    writer.close()


async def test_the_oldest_connection_without_a_head_ends_for_one_that_is_too_many(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "most_connections", lambda: 2)
    port = await serve(FastAPI())
    oldest, others = await connected(port, b"GET"), [await connected(port, b"GET")]
    others.append(await connected(port, b"GET /none HTTP/1.1\r\nHost: a\r\n\r\n"))
    assert await closed(oldest[0])
    assert (await asyncio.wait_for(others[1][0].readline(), PATIENCE_S)).endswith(b"Not Found\r\n")
    for _, writer in (oldest, *others):
        writer.close()


@pytest.mark.parametrize("n_bytes", [0, 300_000])
async def test_the_request_of_a_client_that_leaves_is_cancelled(n_bytes: int, serve: Serve) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()
    app = FastAPI()

    @app.post("/")
    async def root(request: Request) -> None:
        assert len(await request.body()) == n_bytes
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    head = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {n_bytes}\r\n\r\n"
    _, writer = await connected(await serve(app), head.encode() + b"x" * n_bytes)
    await asyncio.wait_for(began.wait(), PATIENCE_S)
    writer.close()
    await asyncio.wait_for(cancelled.wait(), PATIENCE_S)

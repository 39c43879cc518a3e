"""Header names of the bare server, over a real connection."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from loadtests.compare.capitals import CapitalHeaders

BODY = "HTTP/1.1 is\r\nnot: a header\r\n\r\nhere"


async def asked(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_names_have_capitals_and_bodies_stay_as_they_are() -> None:
    app = FastAPI()

    @app.get("/")
    def root() -> PlainTextResponse:
        return PlainTextResponse(BODY, headers={"process-start-time-unix": "a-b: c"})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=CapitalHeaders, log_level="error"))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        answer = await asyncio.wait_for(asked(listener.getsockname()[1]), 30)
    finally:
        server.should_exit = True
        await serving
    head, _, body = answer.decode().partition("\r\n\r\n")
    names = [line.partition(":")[0] for line in head.split("\r\n")[1:]]
    assert {"Process-Start-Time-Unix", "Content-Type", "Content-Length"} <= set(names)
    assert all(name == name.title() for name in names)
    assert "Process-Start-Time-Unix: a-b: c" in head
    assert body == BODY

"""The end of a server: what runs goes on, what comes is told so, and what is given up has an error."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from serve_app.base.values.answers import TokenDelta
from serve_app.config.schema import IngressConfig
from serve_app.run.local.http import BoundedHttp, DrainingServer
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.model_registry import ServedModel
from tests.doubles.api import build_api
from tests.unit.run.local.conftest import PATIENCE_S
from tests.unit.server.harness import HELLO, N_CTX_SLOT, ByteTokenizer, ScriptedEngine

STOPS = "The server is being stopped."


class Ending:
    """A server of one model, whose answers stop in the middle until `go_on`."""

    def __init__(self, limit_s: float) -> None:
        self.go_on, self.drains = asyncio.Event(), asyncio.Event()
        self._n_begun = asyncio.Semaphore(0)
        engine, self._open = ScriptedEngine(), OpenRequests(100)
        engine.script = [TokenDelta("Hel", (1,)), self.go_on, *HELLO[1:]]
        models = {"m": ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=engine)}  # type: ignore[arg-type]
        api = build_api(models, IngressConfig(), breaks=True, open_requests=self._open)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def look(message: Message) -> None:
                await send(message)
                if b"Hel" in message.get("body", b""):
                    self._n_begun.release()

            await api(scope, receive, look)

        config = uvicorn.Config(
            counted,
            http=BoundedHttp,
            lifespan="off",
            log_level="error",
            timeout_graceful_shutdown=5,
        )
        self.server = DrainingServer(config, api.state.streams, self._drain, limit_s)
        self.engine, self.listener = engine, socket.create_server(("127.0.0.1", 0))
        # Not `serve`, which raises the signals again at its end.
        self.serving = asyncio.create_task(self.server._serve([self.listener]))
        self.address = self.listener.getsockname()

    def _drain(self) -> None:
        self._open.is_draining = True
        self.drains.set()

    async def ask(self, *, stream: bool) -> asyncio.Task[bytes]:
        """A request that runs: all of its answer's bytes."""
        n_asked = len(self.engine.requests)
        asking = asyncio.create_task(self.answer(stream=stream))
        if stream:
            await asyncio.wait_for(self._n_begun.acquire(), PATIENCE_S)
        while len(self.engine.requests) == n_asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return asking

    async def answer(self, *, stream: bool) -> bytes:
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        return await self.request("POST /v1/completions", "Content-Type: application/json", body)

    async def request(self, line: str, header: str, body: bytes = b"") -> bytes:
        """All bytes of an answer, until the connection ends."""
        reader, writer = await asyncio.open_connection(*self.address)
        head = f"{line} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        finally:
            writer.close()

    async def end(self, *signals: signal.Signals) -> None:
        """Send signals, and wait until the server drains."""
        for number in signals:
            self.server.handle_exit(number, None)
        await asyncio.wait_for(self.drains.wait(), PATIENCE_S)


@pytest.fixture
async def ending() -> AsyncIterator[Any]:
    started: list[Ending] = []

    async def start(limit_s: float = 600.0) -> Ending:
        started.append(Ending(limit_s))
        while not started[-1].server.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return started[-1]

    yield start
    for one in started:
        await asyncio.wait_for(one.serving, PATIENCE_S)


def check_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    fields = {line.lower() for line in head.split(b"\r\n")}
    assert {b"retry-after: 1", b"connection: close", b"content-type: application/json"} <= fields
    assert json.loads(body)["error"]["code"] == "engine_closed"


async def test_streams_go_on_and_new_requests_are_told_while_a_server_ends(ending: Any) -> None:
    server = await ending()
    streaming = await server.ask(stream=True)
    await server.end(signal.SIGTERM, signal.SIGINT)  # of systemd, and of `corral serve`
    for stream in (True, False):
        check_refused(await server.answer(stream=stream))
    check_refused(await server.request("GET /health", "Connection: close"))
    alive = await server.request("GET /livez", "Connection: close")
    assert alive.startswith(b"HTTP/1.1 200")
    server.go_on.set()
    answer = await streaming
    assert b'"text":"lo"' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("signals", "limit_s"), [((signal.SIGTERM,) * 2, 600.0), ((signal.SIGTERM,), 0.0)]
)
async def test_what_is_given_up_has_an_error(
    signals: tuple[signal.Signals, ...], limit_s: float, ending: Any
) -> None:
    """By the same signal again, or as it takes too long."""
    server = await ending(limit_s)
    streaming, waiting = await server.ask(stream=True), await server.ask(stream=False)
    await server.end(*signals)
    check_refused(await waiting)
    answer = await streaming
    last = answer.splitlines()[-3]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == STOPS
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_an_idle_server_ends_at_once(ending: Any) -> None:
    server = await ending()
    await server.end(signal.SIGINT)
    await asyncio.wait_for(server.serving, PATIENCE_S)


async def test_a_server_whose_port_others_have_loses_nobody(ending: Any) -> None:
    server = await ending()
    streaming = await server.ask(stream=True)
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    first = await asyncio.wait_for(reader.readuntil(b"}"), PATIENCE_S)
    assert b"connection: close" not in first.lower()
    fresh = socket.create_connection(server.address)  # nobody has accepted it
    ending_task = asyncio.create_task(server.server.hand_over([server.listener]))
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)
    fresh_reader, fresh_writer = await asyncio.open_connection(sock=fresh)
    for one in (fresh_writer, writer):
        one.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for answers in (fresh_reader, reader):  # to the end of the connection
        answer = await asyncio.wait_for(answers.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
    assert not server.drains.is_set()
    server.go_on.set()
    assert (await streaming).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await ending_task
    for one in (writer, fresh_writer):
        one.close()

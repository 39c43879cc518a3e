"""A server without a proxy, on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import ASGIApp

from serve_app.run.local.http import BoundedHttp

PATIENCE_S = 30


class Serve:
    """Serves applications while a test runs."""

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def __call__(self, app: ASGIApp) -> int:
        """Serve an application. Returns the port."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        self._running.append((server, asyncio.create_task(server.serve([listener]))))
        port: int = listener.getsockname()[1]
        return port

    def connections(self) -> list[BoundedHttp]:
        """All that are open."""
        return [
            connection
            for server, _ in self._running
            for connection in server.server_state.connections
            if isinstance(connection, BoundedHttp)
        ]

    async def stop(self) -> None:
        for server, serving in self._running:
            server.should_exit = True
            await asyncio.wait_for(serving, PATIENCE_S)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    serving = Serve()
    yield serving
    await serving.stop()

"""HTTP without a proxy: uvicorn's protocol, with bounds on connections, heads and slow readers."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""The longest time that the head of a request may take, from its connection or its first byte on."""
MOST_HEAD_BYTES = 64 * 2**10
STALLED_S = 600.0
"""The longest time that a client may take nothing of its answer."""
MOST_CONNECTIONS = 4096
_OTHER_FILES = 256


def most_connections() -> int:
    """The connections that this process may have open: as many as it may have files, within a bound."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_OTHER_FILES, min(MOST_CONNECTIONS, most_files - _OTHER_FILES))


class BoundedHttp(HttpToolsProtocol):
    """A client's connection. The request of a client that leaves is cancelled, as Serve does it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bound the time of the first head; refuse a connection that is too many."""
        super().connection_made(transport)
        self._answering: asyncio.Task[Any] | None = None
        self._n_head_bytes = 0
        self._bound: asyncio.TimerHandle | None = None
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._limit(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request of a client that has left."""
        self._unlimit()
        super().connection_lost(exc)
        if self._answering is not None and self.cycle is not None and self.cycle.disconnected:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, and bound its head."""
        self._n_head_bytes += len(data)
        super().data_received(data)
        if self._n_head_bytes > MOST_HEAD_BYTES and self._bound is not None:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        super().on_message_begin()
        if self._bound is None:
            self._n_head_bytes = 0
            self._limit(HEAD_S)

    def on_headers_complete(self) -> None:
        """The head of a request is here."""
        self._unlimit()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Bound the time in which the client takes nothing."""
        super().pause_writing()
        self._limit(STALLED_S)

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        super().resume_writing()
        self._unlimit()

    def _limit(self, seconds: float) -> None:
        self._unlimit()
        self._bound = self.loop.call_later(seconds, self.transport.abort)

    def _unlimit(self) -> None:
        if self._bound is not None:
            self._bound.cancel()
            self._bound = None

    def _start_asgi_task(self, cycle: Any, app: ASGIApp) -> None:  # type: ignore[override]
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            self._answering = asyncio.current_task()
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not cycle.disconnected:
                    raise

        super()._start_asgi_task(cycle, answer)  # type: ignore[arg-type]

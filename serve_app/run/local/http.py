"""HTTP without a proxy: uvicorn's protocol, with bounds on connections, heads and slow readers.

Each request has an id, its client's or a new one, and the answer tells it, as with Serve's proxy. Header
names have capitals, as llama-server writes them: some of its clients compare them by letter.
"""

from __future__ import annotations

import asyncio
import re
import resource
import uuid
from functools import cache
from typing import Any, ClassVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""The longest time that the head of a request may take, from its connection or its first byte on."""
MOST_HEAD_BYTES = 64 * 2**10
STALLED_S = 600.0
"""The longest time that a client may take nothing of its answer."""
MOST_CONNECTIONS = 4096
_OTHER_FILES = 256
_BEGINNING = b"HTTP/1.1 "
_NAME = re.compile(rb"(?<=\r\n)[a-z-]+(?=: )")


@cache
def most_connections() -> int:
    """The connections that this process may have open: as many as it may have files, within a bound."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(most_files // 2, min(MOST_CONNECTIONS, most_files - _OTHER_FILES))


class BoundedHttp(HttpToolsProtocol):
    """A client's connection. The request of a client that leaves is cancelled, as Serve does it."""

    _headless: ClassVar[dict[BoundedHttp, None]] = {}
    """The connections that wait for the head of a request. The oldest ends for one that is too many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bound the time of the first head, and the connections."""
        super().connection_made(_CapitalNames(transport))  # type: ignore[arg-type]
        self._answering: tuple[Any, asyncio.Task[Any] | None] | None = None
        """The request that is answered now, and its task."""
        self._n_head_bytes = 0
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._begin_head()
        if len(self.connections) > most_connections():
            oldest = next(iter(self._headless))
            oldest._end_head()
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request of a client that has left."""
        self._end_head()
        self.resume_writing()
        super().connection_lost(exc)
        if self._answering is not None:
            cycle, task = self._answering
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            if task is not None and cycle.disconnected:
                task.cancel()

    def _begin_head(self) -> None:
        if self._head is None:
            self._n_head_bytes = 0
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)
            self._headless[self] = None

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
            self._headless.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, and bound its head."""
        self._n_head_bytes += len(data)
        super().data_received(data)
        if self._head is not None and self._n_head_bytes > MOST_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """The first byte of a request is here."""
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        """The head of a request is here."""
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Read on, or nobody would notice that the client leaves."""
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Bound the time in which the client takes nothing."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _start_asgi_task(self, cycle: Any, app: ASGIApp) -> None:  # type: ignore[override]
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            self._answering = cycle, asyncio.current_task()
            request_id = Headers(scope=scope).get("x-request-id")
            if request_id is None:
                request_id = str(uuid.uuid4())
                scope["headers"] = [*scope["headers"], (b"x-request-id", request_id.encode())]

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                await send(message)

            try:
                await app(scope, receive, send_with_id)
            except asyncio.CancelledError:
                if not cycle.disconnected:
                    raise

        super()._start_asgi_task(cycle, answer)  # type: ignore[arg-type]


class _CapitalNames:
    """A transport that changes the heads of answers, each of which uvicorn writes alone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if data.startswith(_BEGINNING) and data.endswith(b"\r\n\r\n"):
            data = _NAME.sub(lambda name: name[0].title(), data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""HTTP without a proxy: uvicorn's protocol, with bounds on connections, heads and slow readers.

Each request has an id, its client's or a new one, and the answer tells it, as with Serve's proxy. Header
names have capitals, as llama-server writes them: some of its clients compare them by letter.

A connection waits for its client, or its client waits for it. At the limit, those that wait for their
clients end for newcomers: those that have waited for long, and first those that read no answer. The address
that has most of them pays.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import resource
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import IntEnum
from functools import cache, partial
from types import FrameType
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import Server

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    HeadTooLargeError,
    InvalidRequestError,
    RateLimitError,
)
from serve_app.config.addresses import network_of
from serve_app.server.http.errors import openai_error_body, retry_headers
from serve_app.server.http.sse import StreamSend, encode_json, fail_all

HEAD_S = 20.0
"""The longest time that the head of a request may take, from its connection or its first byte on. The rest
of a body whose request was answered before may take as long."""
MOST_HEAD_BYTES = 64 * 2**10
"""The longest head, and the longest trailers."""
_MOST_FRAMING = 16
"""The bytes of a chunk's length for each of a body's bytes, beyond so many as a head may have."""
MOST_PIPELINED = 32
"""The most requests of a connection that wait for the answer before theirs. The last one ends it."""
STALLED_S = 600.0
"""The longest time that a client may take nothing of its answer."""
_LINGER_S = 2.0
"""The time in which a client can read why it is refused, while what it sends is dropped."""
_SOON_S = 5.0
"""The seconds in which what a connection waits for may be on its way."""
_UNSENT_BYTES = 64 * 2**10
"""The most bytes of an answer that the kernel keeps, beyond those on their way. By itself, it keeps some
megabytes for a client that reads nothing. Source: ip-sysctl.rst of Linux, `tcp_notsent_lowat`."""
MOST_CONNECTIONS = 4096
BACKLOG = 2048
"""The connections that the kernel keeps until the server takes them."""
_MOST_REFUSED = 64
"""The most connections beyond the limit, which only read why they are refused."""
_OTHER_FILES = 256
GIVEN_UP_S = 5.0
"""The longest time that clients may take to read the last of answers that were given up."""
_STOPS = "The server is being stopped."
_BEGINNING = b"HTTP/1.1 "
_NAME = re.compile(rb"(?<=\r\n)[a-z-]+(?=: )")


@cache
def most_connections() -> int:
    """The connections that this process may have open: as many as it may have files, within a bound."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(most_files // 2, most_files - _OTHER_FILES))


class _Part(IntEnum):
    """The part of a request that comes next."""

    NONE = 0
    HEAD = 1
    BODY = 2


class _Wait(IntEnum):
    """The thing that a connection waits for. Those that have waited for long end in this order."""

    READER = 0
    REQUEST = 1
    BODY = 2
    ANSWER = 3


class _Client:
    """An address's connections, by what they wait for, those that have waited for longest first."""

    def __init__(self) -> None:
        self._by_wait: list[dict[BoundedHttp, float]] = [{} for _ in _Wait]

    def add(self, connection: BoundedHttp, wait: _Wait, now: float) -> None:
        """Note that it waits for this from now on."""
        self._by_wait[wait][connection] = now

    def remove(self, connection: BoundedHttp, wait: _Wait) -> None:
        """Forget it, if it waits for this."""
        self._by_wait[wait].pop(connection, None)

    @property
    def n_waiting(self) -> int:
        """The connections that wait for their clients."""
        return sum(map(len, self._by_wait[: _Wait.ANSWER]))

    @property
    def n_busy(self) -> int:
        """The connections whose clients wait."""
        return len(self._by_wait[_Wait.ANSWER])

    def least_missed(self, now: float) -> BoundedHttp:
        """The one to end of those that wait for their clients, of which there is one at least."""
        firsts: list[tuple[bool, int, float, BoundedHttp]] = []
        for wait, connections in enumerate(self._by_wait[: _Wait.ANSWER]):
            for connection, since in itertools.islice(connections.items(), 1):
                is_soon = now - since < _SOON_S
                firsts.append((is_soon, 0 if is_soon else wait, since, connection))
        return min(firsts, key=lambda first: first[:3])[3]

    def newest_busy(self) -> BoundedHttp:
        """The one whose client has waited for the shortest time, of which there is one at least."""
        return next(reversed(self._by_wait[_Wait.ANSWER]))


class BoundedHttp(HttpToolsProtocol):
    """A client's connection. The request of a client that leaves is cancelled, as Serve does it."""

    _clients: ClassVar[defaultdict[str, _Client]] = defaultdict(_Client)
    """All connections but those that were refused at once, by their addresses."""
    _refused: ClassVar[dict[BoundedHttp, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bound the time of the first head, and the connections."""
        super().connection_made(_CapitalNames(transport))  # type: ignore[arg-type]
        self.address = "" if self.client is None else network_of(self.client[0])
        self._answering: tuple[Any, asyncio.Task[Any] | None] | None = None
        """The request that is answered now, and its task."""
        self._part = _Part.HEAD
        self._n_fields = self._n_framing = self._n_body = self._n_begun = 0
        """Bytes so far: of the head's or the trailers' fields, of all but the body, of the body. Last are
        the requests that began in the newest data."""
        self._pieces: list[bytes] = []
        """Parts of the body in the newest data, which may be one byte each."""
        self._is_refused = self._is_too_large = self._is_lost = False
        self._due: asyncio.TimerHandle | None = None
        """Ends the connection, unless what the client owes comes before."""
        self._stalled: asyncio.TimerHandle | None = None
        self._wait = _Wait.REQUEST
        wire: socket.socket = transport.get_extra_info("socket")
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._expect(HEAD_S)
        if self._has_room():
            self._clients[self.address].add(self, self._wait, self.loop.time())
        else:
            self._refused[self] = None
            if len(self._refused) > _MOST_REFUSED:
                next(iter(self._refused))._end()
            n = most_connections()
            self._refuse(RateLimitError(f"This server has {n} connections, which is the limit.", 1))

    def _has_room(self) -> bool:
        """Whether the server may have one more connection. It ends one that waits for its client. Without
        any, it ends the newest of an address that has more than this one."""
        if len(self.connections) - len(self._refused) <= most_connections():
            return True
        client = max(self._clients.values(), key=lambda client: client.n_waiting)
        if client.n_waiting > 0:
            client.least_missed(self.loop.time())._end()
            return True
        client = max(self._clients.values(), key=lambda client: client.n_busy)
        if client.n_busy <= self._clients[self.address].n_busy + 1:
            return False
        client.newest_busy()._end()
        return True

    def _end(self) -> None:
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self._is_lost = True
        self._refused.pop(self, None)
        client = self._clients[self.address]
        client.remove(self, self._wait)
        if client.n_waiting + client.n_busy == 0:
            del self._clients[self.address]

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request of a client that has left."""
        self._leave()
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._answering is not None:
            cycle, task = self._answering
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            if task is not None and cycle.disconnected:
                task.cancel()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self, seconds: float | None) -> None:
        """End the connection in so many seconds, unless this is called again; None: never."""
        if self._due is not None:
            self._due.cancel()
        self._due = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _sort(self) -> None:
        """Note whether the connection waits for its client now."""
        if self._is_lost:
            return
        if not self._is_answering:
            wait = _Wait.REQUEST
        elif self.flow.write_paused:
            wait = _Wait.READER
        else:
            wait = _Wait.BODY if self._part is _Part.BODY else _Wait.ANSWER
        if wait is not self._wait:
            client = self._clients[self.address]
            client.remove(self, self._wait)
            client.add(self, wait, self.loop.time())
            self._wait = wait

    # -- requests ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests. Refuse those that are none, or whose heads, trailers or chunks' lengths
        are too long, however they come."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._part is _Part.NONE and not self._is_answering:
            self._begin_head()  # blank lines may come before it, and count
        begins, n_body = self._part is not _Part.BODY, self._n_body
        self._n_begun = 0
        try:
            self._parse(data)
        except HttpParserError:
            self._refuse(
                HeadTooLargeError(f"A request's headers have {MOST_HEAD_BYTES} bytes at most.")
                if self._is_too_large
                else InvalidRequestError("The bytes are no HTTP request.")
            )
            return
        if self._n_begun == 0:
            self._n_framing += len(data) - (self._n_body - n_body)
        elif self._n_begun == 1 and begins:
            self._n_framing += len(data) - self._n_body
        most = MOST_HEAD_BYTES
        if self._part is not _Part.HEAD:
            most += MOST_HEAD_BYTES + _MOST_FRAMING * self._n_body
        if self._n_framing > most:
            self._refuse(HeadTooLargeError(f"A request has {most} bytes at most besides its body."))
        elif self._part is _Part.NONE:
            self._n_framing = 0

    def _parse(self, data: bytes) -> None:
        """Have the parser take it. Behind an offer to upgrade the connection, the parser expects another
        protocol. So it is given the head again without the offer, which a server may ignore. Source: RFC
        9110, section 7.8."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                self._pass_on()
                return
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise HttpParserError from None
                version = self.parser.get_http_version().encode()
                lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
                lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
                self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _begin_head(self) -> None:
        self._part = _Part.HEAD
        self._expect(HEAD_S)

    def on_message_begin(self) -> None:
        """The first byte of a request is here. One too many is not read, and all before it are answered."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self._is_refused = True
            self.pipeline[0][0].keep_alive = False  # the newest
            raise ValueError  # which the parser raises as another error
        super().on_message_begin()
        self._n_begun += 1
        self._n_fields = self._n_framing = self._n_body = 0
        if self._part is not _Part.HEAD:
            self._begin_head()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's address, and bound it."""
        self._count_field(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and bound all. Trailers are no headers: nobody has checked them."""
        self._count_field(len(name) + len(value) + 4)
        if self._part is _Part.HEAD:
            super().on_header(name, value)

    def _count_field(self, n_bytes: int) -> None:
        self._n_fields += n_bytes
        if self._n_fields > MOST_HEAD_BYTES:
            self._is_too_large = True
            raise ValueError  # which the parser raises as another error

    def on_headers_complete(self) -> None:
        """The head of a request is here."""
        if self.parser.should_upgrade():
            return  # it comes again
        super().on_headers_complete()
        self._part = _Part.BODY
        self._n_fields = 0
        self._expect(None)
        self._sort()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._n_body += len(body)
        self._pieces.append(body)

    def _pass_on(self) -> None:
        """Give the request the parts of its body that are here."""
        if self._pieces:
            super().on_body(b"".join(self._pieces))
            self._pieces.clear()

    def on_message_complete(self) -> None:
        """Read on, or nobody would notice that the client leaves."""
        if self.parser.should_upgrade():
            return
        self._pass_on()
        self._part = _Part.NONE
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()
        if not self._is_answering:  # it was answered before its body was here
            self._expect(self.timeout_keep_alive)
        self._sort()

    # -- answers ----------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """An answer is sent: the client owes the rest of its body, or the next request."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `_expect` has its place
        if self.transport.is_closing():
            self._expect(STALLED_S)
        elif not self._is_answering and self._part is not _Part.HEAD:
            self._expect(HEAD_S if self._part is _Part.BODY else self.timeout_keep_alive)
        self._sort()

    def pause_writing(self) -> None:
        """Bound the time in which the client takes nothing."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)
        self._sort()

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
            self._sort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request."""
        self._refuse(InvalidRequestError(msg))

    def give_up(self) -> None:
        """Answer no request any more: one that waits gets an error, and an answer that was begun breaks."""
        if self._is_answering and not self._is_refused:
            self._refuse(EngineClosedError(_STOPS))
        else:
            self.transport.close()

    def _refuse(self, error: CorralError) -> None:
        """Answer with this error, and read no more. What is on its way is dropped for a moment, or the
        client could not read why. An answer that was begun, or that another request waits for, breaks."""
        if self._is_refused:
            return
        cycle, is_own = self.cycle, self._part is _Part.BODY
        if self._is_answering:
            if self.pipeline or cycle.response_started:
                self.transport.close()
                self._expect(_LINGER_S)
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if self._answering is not None and self._answering[1] is not None:
                self._answering[1].cancel()
        elif is_own:
            self.transport.abort()
            return
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
        ]
        fields += [(k.encode(), v.encode()) for k, v in retry_headers(error).items()]
        body = encode_json(openai_error_body(error))
        fields.append((b"content-length", b"%d" % len(body)))
        lines = [b"%b: %b\r\n" % field for field in fields]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n"]))
        self.transport.write(body)
        self._is_refused = True
        self._expect(_LINGER_S)
        self.transport.write_eof()

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
                    # Nobody can tell whether a client that was not told to go on sends its body.
                    cycle.keep_alive = cycle.keep_alive and not cycle.waiting_for_100_continue
                await send(message)

            try:
                await app(scope, receive, send_with_id)
            except asyncio.CancelledError:
                if not cycle.disconnected:
                    raise
            if cycle.response_started and not cycle.response_complete:
                cycle.disconnected = True  # its end would say that all was sent
                self.transport.close()
                self._expect(STALLED_S)

        super()._start_asgi_task(cycle, answer)  # type: ignore[arg-type]


def settings_of(app: ASGIApp, host: str, port: int, keep_alive_s: float, **others: Any) -> Config:
    """uvicorn's settings for clients that come without a proxy, and these others."""
    return Config(
        app,
        host,
        port,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(keep_alive_s),
        **others,
    )


class DrainingServer(Server):
    """A server that answers on while it ends, until what ran has ended, or for so long at most."""

    def __init__(
        self,
        config: Config,
        streams: Collection[StreamSend],
        drain: Callable[[], None],
        limit_s: float,
    ) -> None:
        """`streams` are those that run. `drain` has new requests refused."""
        super().__init__(config)
        self._streams, self._drain, self._limit_s = streams, drain, limit_s
        self._running: set[asyncio.Task[None]] = set()
        """The requests that ran when it was asked to end."""
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal, for the next tick."""
        self._captured_signals.append(sig)

    async def on_tick(self, counter: int) -> bool:
        """Whether it may end now. The same signal again gives up what runs. systemd and `corral serve` may
        each send one of their own."""
        signals, now = self._captured_signals, asyncio.get_running_loop().time()
        if signals and self._until is None:
            self.drain()
        if self._until is not None:
            if now >= self._until or len(set(signals)) < len(signals):
                await self._give_up()
                self.should_exit = True
            elif all(task.done() for task in self._running):
                self.should_exit = True
        return await super().on_tick(counter)

    def drain(self) -> None:
        """Refuse new requests, and end when what runs has ended."""
        self._until = asyncio.get_running_loop().time() + self._limit_s
        self._running = set(self.server_state.tasks)
        self._drain()

    async def hand_over(self, sockets: list[socket.socket]) -> None:
        """End without a drain, where other processes listen at the same addresses. Connections that the
        kernel has for this one are taken, or it would reset them. Kept ones end with their next answers,
        within a moment."""
        wires: list[socket.socket] = []
        for server, listener in zip(self.servers, sockets, strict=True):
            with suppress(OSError):  # there is no other
                while True:
                    wires.append(listener.accept()[0])
            server.close()
            listener.close()
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers.append(close)
        kind: Any = self.config.http_protocol_class
        state, app_state = self.server_state, self.lifespan.state
        make = partial(kind, config=self.config, server_state=state, app_state=app_state)
        loop = asyncio.get_running_loop()
        for wire in wires:
            await loop.connect_accepted_socket(make, wire)
        await asyncio.sleep(_LINGER_S)
        self.should_exit = True

    async def _give_up(self) -> None:
        await fail_all(list(self._streams), EngineClosedError(_STOPS), GIVEN_UP_S)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, BoundedHttp)
            connection.give_up()


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

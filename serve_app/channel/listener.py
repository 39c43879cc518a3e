"""An ingress's side of channels: it listens for engine replicas, and hands each call its deltas."""

from __future__ import annotations

import asyncio
import errno
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, cast

import msgspec

from serve_app.base.errors import ChannelBrokenError, CorralError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.channel import protocol
from serve_app.channel.protocol import CONNECT_S, Address, keep_alive, server_tls

logger = logging.getLogger("corral.ingress")

_MOST_STRANGERS = 64
"""Connections that have not said who they are: the oldest one ends for one more."""
_NOTHING = TokenDelta("", ())


class IncomingCall:
    """The items that arrive for one call: an async iterator for one reader. Event loop only.

    The acceptance is first, then deltas. Deltas that have piled up come as one. It ends with the delta
    that carries `end`. If the call fails or the request ends in an error, that is raised, after what came
    before.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.channel: object | None = None
        """The connection that it is answered over; None before the first item."""
        self._accepted: Accepted | None = None
        self._was_told = False
        self._delta: TokenDelta | None = None
        self._error: CorralError | None = None
        self.has_ended = False
        """Whether its end has come, read or not."""
        self._is_over = False
        self._reader: asyncio.Future[None] | None = None

    def push(self, item: TokenDelta | Accepted) -> None:
        """The engine has taken the request, or more of its answer."""
        if self._error is not None:
            return
        if isinstance(item, Accepted):
            self._accepted = item
        else:
            self._accepted = self._accepted or Accepted()
            self._add(item)
        self._wake()

    def _add(self, delta: TokenDelta) -> None:
        if delta.end is not None:
            self.has_ended = True
            if delta.end.error is not None:
                self._error, delta = delta.end.error, replace(delta, end=None)
        if delta != _NOTHING:
            self._delta = delta if self._delta is None else self._delta.then(delta)

    def fail(self, error: CorralError) -> None:
        """End it with this error, unless it is complete: nothing comes any more."""
        if self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> IncomingCall:
        return self

    async def __anext__(self) -> Accepted | TokenDelta:
        if self._is_over:
            raise StopAsyncIteration
        while True:
            if self._accepted is not None and not self._was_told:
                self._was_told = True
                return self._accepted
            if self._delta is not None:
                delta, self._delta = self._delta, None
                self._is_over = delta.end is not None
                return delta
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader


class ReportReceiver(Protocol):
    """Hears what one engine replica says of itself over one connection. Event loop only."""

    def take(self, report: bytes) -> None:
        """A report. Raises msgspec.MsgspecError if it is none."""

    def end(self) -> None:
        """The connection is gone."""


class Listener:
    """Receives for one ingress replica what engine replicas send. Event loop only.

    It has a Unix socket for those on its own node, and a port for all others. A connection must
    know the secret, which crosses Serve's handle with each request, and nothing else.
    """

    def __init__(
        self, node_id: str, host: str, receiver_of: Callable[[str], ReportReceiver] | None = None
    ) -> None:
        """`node_id` and `host` are Ray's id and address of this node; no address if all replicas are on it.
        `receiver_of` finds who hears a replica."""
        self._receiver_of = receiver_of
        self._node_id = node_id
        self._host = host
        self._secret = secrets.token_urlsafe(32)
        self._calls: dict[int, IncomingCall] = {}
        self._numbers = itertools.count()
        self._servers: list[asyncio.Server] = []
        self._starting = asyncio.Lock()
        self._address: Address | None = None
        self._strangers: dict[_Connection, None] = {}
        self._connections: set[_Connection] = set()

    async def address(self) -> Address:
        """The address where it listens, from now on at the latest. Raises OSError."""
        async with self._starting:
            if self._address is None:
                self._address = await self._start()
        return self._address

    async def _start(self) -> Address:
        loop, path = asyncio.get_running_loop(), f"corral-{secrets.token_hex(16)}"
        port = 0
        if self._host:
            self._servers.append(await self._start_remote())
            port = self._servers[0].sockets[0].getsockname()[1]
        try:
            local = await loop.create_unix_server(lambda: _Connection(self), "\0" + path)
        except BaseException:
            self.close()
            raise
        self._servers.append(local)
        return Address(self._node_id, path, self._host, port, self._secret)

    async def _start_remote(self) -> asyncio.Server:
        try:
            return await self._start_at(self._host)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, None):  # Python 3.13 has none for it
                raise
            logger.warning(
                "No interface has the address %s, so tokens may arrive over any interface.",
                self._host,
            )
        return await self._start_at("::" if ":" in self._host else "0.0.0.0")

    async def _start_at(self, host: str) -> asyncio.Server:
        tls = server_tls()
        return await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            host,
            0,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else CONNECT_S,
            backlog=1024,
        )

    @contextmanager
    def call(self) -> Iterator[IncomingCall]:
        call = IncomingCall(next(self._numbers))
        self._calls[call.number] = call
        try:
            yield call
        finally:
            del self._calls[call.number]

    def on_connection(self, connection: _Connection) -> None:
        self._strangers[connection] = None
        if len(self._strangers) > _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # it leaves a moment later, and more may come before
            oldest.end()

    def believes(self, connection: _Connection, body: bytes) -> bool:
        """Whether this first frame is of one who may connect."""
        try:
            hello = protocol.hello(body)
        except msgspec.MsgspecError:
            return False
        known = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        if known:
            self._strangers.pop(connection, None)
            self._connections.add(connection)
            if self._receiver_of is not None:
                connection.receiver = self._receiver_of(hello.replica_id)
        return known

    def take(self, connection: _Connection, body: bytes) -> None:
        """A frame. Raises msgspec.MsgspecError if it is none.

        If Serve believes a replica lost, it may send the same call to another one, while the first works.
        Who answers first is heard, and nobody else."""
        report = protocol.report(body)
        if report is not None:
            if connection.receiver is not None:
                connection.receiver.take(report)
            return
        for number, delta in protocol.items(body):
            call = self._calls.get(number)
            if call is not None and call.channel in (None, connection):
                call.channel = connection
                call.push(delta)

    def on_leave(self, connection: _Connection) -> None:
        """A connection is gone: what it was to bring does not come."""
        self._strangers.pop(connection, None)
        self._connections.discard(connection)
        if connection.receiver is not None:
            connection.receiver.end()
        for call in self._calls.values():
            if call.channel is connection:
                call.fail(ChannelBrokenError("The connection to the engine replica broke."))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in (*self._connections, *self._strangers):
            connection.end()


class _Connection(asyncio.Protocol):
    """An engine replica's connection, or a stranger's until its first frame."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._buffer = protocol.FrameBuffer()
        self._is_known = False
        self.receiver: ReportReceiver | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            keep_alive(connection)
        self._timer = asyncio.get_running_loop().call_later(CONNECT_S, self._doubt)
        self._listener.on_connection(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._buffer.add(data):
                if self._is_known:
                    self._listener.take(self, body)
                elif self._listener.believes(self, body):
                    self._is_known = True
                    self._transport.write(protocol.WELCOME)
                else:
                    self.end()
                    return
        except msgspec.MsgspecError:
            logger.exception("An engine replica sent something that is not a frame")
            self.end()
        if not self._is_known and self._buffer.n_bytes > protocol.MOST_HELLO_BYTES:
            self.end()

    def connection_lost(self, _: Exception | None) -> None:
        self._timer.cancel()
        self._listener.on_leave(self)

    def _doubt(self) -> None:
        if not self._is_known:
            self.end()

    def end(self) -> None:
        """Close it now. Idempotent."""
        self._transport.abort()

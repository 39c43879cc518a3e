"""Listeners and channels over real sockets of this host, and what a reader saw."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from serve_app.base.errors import CorralError
from serve_app.base.values.answers import (
    Accepted,
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)
from serve_app.channel import protocol
from serve_app.channel.listener import IncomingCall, Listener
from serve_app.channel.protocol import Address, FrameBuffer, Item
from serve_app.channel.sender import Channel, Channels

PATIENCE_S = 30.0
"""How long a test waits for what must happen at once, before it fails."""
HERE, ELSEWHERE = "here", "elsewhere"
"""Nodes: channels from here come over a Unix socket, those from elsewhere over TCP."""


def delta(text: str) -> TokenDelta:
    """A token for each character."""
    return TokenDelta(text, tuple(map(ord, text)))


def last(
    text: str = "", reason: FinishReason = FinishReason.STOP, error: CorralError | None = None
) -> TokenDelta:
    """The same, with the end."""
    end = SequenceEnd(reason, Usage(1, 2, 0), Timings(0.0, 0.5, 1.0), error=error)
    return TokenDelta(text, tuple(map(ord, text)), end)


def failed(error: CorralError) -> TokenDelta:
    """An end that is an error."""
    return last("", FinishReason.ERROR, error)


@dataclass
class Seen:
    """What came for a call."""

    items: list[Accepted | TokenDelta] = field(default_factory=list)
    error: CorralError | None = None

    @property
    def deltas(self) -> list[TokenDelta]:
        """All but the acceptance, which is first."""
        assert self.items[:1] in ([], [Accepted()])
        found = [item for item in self.items if isinstance(item, TokenDelta)]
        assert len(found) == max(0, len(self.items) - 1)
        return found

    @property
    def text(self) -> str:
        text = "".join(one.text for one in self.deltas)
        assert text == "".join(chr(token) for one in self.deltas for token in one.token_ids)
        return text


async def read(call: IncomingCall) -> Seen:
    """All that comes for a call."""
    seen = Seen()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for item in call:
                seen.items.append(item)
    except CorralError as error:
        seen.error = error
    return seen


@asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[tuple[Listener, Address]]:
    """An ingress's side."""
    listener = Listener(HERE, host)
    address = await listener.address()
    try:
        yield listener, address
    finally:
        listener.close()
        await settle()


@asynccontextmanager
async def connected(
    node: str = HERE, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Listener, Channel]]:
    """An ingress's side, and a replica's on that node."""
    async with AsyncExitStack() as stack:
        listener, address = await stack.enter_async_context(listening(host))
        channels = Channels(node, "r")
        stack.callback(channels.close)
        yield listener, await channels.to(address)


async def settle() -> None:
    """Let what is about to happen in this loop happen."""
    for _ in range(5):
        await asyncio.sleep(0)


class Wire:
    """A channel, the other end of its socket, and how often it was lost."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.peer.setblocking(False)
        self.n_lost = 0
        self.channel = Channel(ours, self._lost)
        self._buffer = FrameBuffer()

    def _lost(self, channel: Channel) -> None:
        assert channel is self.channel
        self.n_lost += 1

    def fill(self) -> TokenDelta:
        """Send to call 0 until the socket is full; returns all of it."""
        sent = TokenDelta("", ())
        while not self.channel._is_blocked:
            more = delta("x" * 10_000)
            sent = sent.then(more)
            self.channel.push(0, more)
            self.channel.flush()
        return sent

    def receive(self, n_bytes: int = 1 << 20) -> list[list[Item]]:
        """The frames that have come and were not read yet."""
        try:
            data = self.peer.recv(n_bytes)
        except BlockingIOError:
            return []
        return [protocol.items(body) for body in self._buffer.add(data)]

    async def receive_all(self) -> list[list[Item]]:
        """The frames that come until nothing is left to send."""
        found: list[list[Item]] = []
        async with asyncio.timeout(PATIENCE_S):
            while self.channel._unsent or self.channel._pending:
                found += self.receive()
                await asyncio.sleep(0)
        return found + self.receive()

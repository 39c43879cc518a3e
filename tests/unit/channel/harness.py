"""Listeners and channels over real sockets of this host, and what a reader saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from serve_app.channel.address import Address
from serve_app.channel.listener import Call, Listener
from serve_app.channel.sender import Channel, Channels
from serve_app.errors import CorralError
from serve_app.types import Accepted, FinishReason, SequenceEnd, Timings, TokenDelta, Usage

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


async def read(call: Call) -> Seen:
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

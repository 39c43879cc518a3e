"""Whatever the order of pushes, reads and breaks, a reader sees a prefix of what was pushed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import ChannelBrokenError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.channel.listener import IncomingCall, Listener, _Connection
from serve_app.channel.protocol import WELCOME, Hello, frame
from serve_app.channel.sender import Channel
from tests.unit.channel.harness import PATIENCE_S, delta, last, read

N_CALLS = 3

calls = st.integers(0, N_CALLS - 1)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), calls),
        st.tuples(st.just("push"), calls, st.text("ab👍", max_size=3)),
        st.tuples(st.just("bulk"), calls, st.just("x" * 3000)),
        st.tuples(st.just("end"), calls, st.text("z", max_size=2)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("carry"), st.integers(1, 5000)),
        st.tuples(st.just("read"), calls),
        st.tuples(st.just("turn")),
    ),
    max_size=60,
)


@dataclass
class Story:
    """One call: what was pushed for it, and what its reader has seen."""

    call: IncomingCall
    pushed: str = ""
    ended: bool = False
    seen: list[Accepted | TokenDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.seen if isinstance(one, TokenDelta))


class Link:
    """A channel to a listener through a wire that carries as many bytes at a time as the test says."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        ours, self._from_replica = socket.socketpair()
        self._to_ingress, self._theirs = socket.socketpair()
        for one in (ours, self._from_replica, self._to_ingress):
            one.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self._carried = b""
        self.channel = Channel(ours, lambda _: None)

    async def open(self) -> None:
        """Have the listener take its end, as one that it believes."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: _Connection(self.listener), self._theirs)
        self._to_ingress.send(frame(Hello(self.listener._secret, "r")))
        await loop.sock_recv(self._to_ingress, len(WELCOME))

    def carry(self, n_bytes: int) -> int:
        """Move so many bytes, if there are and the ingress has room; returns how many."""
        with suppress(BlockingIOError):
            self._carried += self._from_replica.recv(n_bytes)
        n_sent = 0
        with suppress(BlockingIOError):
            n_sent = self._to_ingress.send(self._carried) if self._carried else 0
        self._carried = self._carried[n_sent:]
        return n_sent

    async def carry_all(self) -> None:
        """Move all that is left to send, and have it read."""
        async with asyncio.timeout(PATIENCE_S):
            while (  # noqa: ASYNC110
                self.carry(1 << 16)
                or self._carried
                or self.channel._unsent
                or self.channel._accepted
                or self.channel._pending
            ):
                await asyncio.sleep(0)

    def cut(self) -> None:
        """The end of both sides."""
        self._from_replica.close()
        self._to_ingress.close()


async def play(schedule: list[tuple[object, ...]], breaks: bool) -> None:
    listener = Listener("n", "127.0.0.1")
    link = Link(listener)
    await link.open()
    opened = [listener.call() for _ in range(N_CALLS)]
    stories = [Story(one.__enter__()) for one in opened]
    for turn in schedule:
        match turn:
            case ("accept", int(n)):
                link.channel.accept(stories[n].call.number, Accepted())
            case ("push" | "bulk", int(n), str(text)) if not stories[n].ended:
                stories[n].pushed += text
                link.channel.push(stories[n].call.number, delta(text))
            case ("end", int(n), str(text)) if not stories[n].ended:
                stories[n].pushed += text
                stories[n].ended = True
                link.channel.push(stories[n].call.number, last(text))
            case ("flush",):
                link.channel.flush()
            case ("carry", int(n)):
                link.carry(n)
            case ("read", int(n)):
                story = stories[n]
                if story.call._delta is not None or (
                    story.call._accepted is not None and not story.call._was_told
                ):
                    story.seen.append(await anext(story.call))
            case _:
                await asyncio.sleep(0)
    if breaks:
        link.cut()
    else:
        for story in stories:
            if not story.ended:
                story.ended = True
                link.channel.push(story.call.number, last())
        link.channel.flush()
        await link.carry_all()
    for story in stories:
        if breaks and story.call.channel is None:
            story.call.fail(ChannelBrokenError("As its request's answer says."))
        seen = await read(story.call)
        story.seen += seen.items
        assert story.seen.count(Accepted()) <= 1
        assert story.seen[:1] in ([], [Accepted()])
        assert story.pushed.startswith(story.text)
        complete = any(isinstance(one, TokenDelta) and one.end for one in story.seen)
        assert complete == (seen.error is None)
        if complete:
            assert story.text == story.pushed
        assert breaks or complete
    link.cut()
    link.channel.close()
    listener.close()
    for one in opened:
        one.__exit__(None, None, None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@settings(max_examples=60, deadline=None)
@given(turns, st.booleans())
def test_what_is_read_is_what_was_pushed(schedule: list[tuple[object, ...]], breaks: bool) -> None:
    asyncio.run(play(schedule, breaks))

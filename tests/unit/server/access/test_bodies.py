"""Bodies that come slowly, or too many at once. The tests' clock is the event loop's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from starlette.datastructures import Headers

from serve_app.base.errors import BodyEndedError, RequestTooLargeError, SlowRequestError
from serve_app.server.access.bodies import BODY_TIMEOUT_S, BodyLimits, BodyReader, replay
from serve_app.server.workers.worker import MAX_BODY_BYTES

Task = asyncio.Task[list[bytes] | None]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    return clock


class Sender:
    """A client, and the task that reads its body."""

    def __init__(self, reader: BodyReader, client: str, **headers: str) -> None:
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.body: Task = asyncio.create_task(reader.read(client, Headers(names), self._sent.get))
        self.body.add_done_callback(lambda body: body.cancelled() or body.exception())  # was seen

    async def send(self, piece: bytes, *, last: bool = False) -> None:
        """Until the reader has it, and those whom it ends have ended."""
        self._sent.put_nowait({"type": "http.request", "body": piece, "more_body": not last})
        await settled()

    async def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})
        await settled()

    @property
    def is_ended(self) -> bool:
        return self.body.done() and isinstance(self.body.exception(), BodyEndedError)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def opened(reader: BodyReader, client: str) -> Sender:
    sender = Sender(reader, client)
    await settled()
    return sender


async def test_a_whole_body(clock: Clock) -> None:
    sender = await opened(BodyReader(BodyLimits()), "ana")
    await sender.send(b"one, ")
    await sender.send(b"two", last=True)
    assert await sender.body == [b"one, two"]


async def test_large_pieces_stay_as_they_came_and_small_ones_are_joined(clock: Clock) -> None:
    sender, large = await opened(BodyReader(BodyLimits()), "ana"), bytes(2**16)
    for _ in range(2):
        await sender.send(large)
    for _ in range(3):
        await sender.send(b"x" * 2**15)
    await sender.send(b"end", last=True)
    pieces = await sender.body
    assert pieces is not None
    assert pieces[0] is large
    assert list(map(len, pieces)) == [2**16, 2**16, 2**16, 2**15 + 3]


async def test_a_client_that_leaves(clock: Clock) -> None:
    sender = await opened(BodyReader(BodyLimits(max_open=1)), "ana")
    await sender.send(b"one, ")
    await sender.leave()
    assert await sender.body is None


async def test_the_slowest_of_who_has_most_is_ended_and_not_the_newcomer(clock: Clock) -> None:
    reader = BodyReader(BodyLimits(max_open=4))
    early = await opened(reader, "ben")
    clock.now += 1
    anas = []
    for _ in range(3):
        anas.append(await opened(reader, "ana"))
        clock.now += 1
    newcomer = await opened(reader, "ben")
    await settled()
    assert [one.is_ended for one in (early, *anas, newcomer)] == [False, True, False, False, False]
    refusal = anas[0].body.exception()
    assert isinstance(refusal, BodyEndedError)
    assert (refusal.status, refusal.retry_after_s) == (429, 1)
    assert "4 bodies" in refusal.message
    for one in (early, *anas[1:], newcomer):
        await one.send(b"x", last=True)
        assert await one.body == [b"x"]


async def test_among_its_own_a_newcomer_comes_in_too(clock: Clock) -> None:
    """As on one machine without keys: whoever sends at once is never refused for those who do not."""
    reader = BodyReader(BodyLimits(max_open=3))
    slow = []
    for _ in range(20):
        slow.append(await opened(reader, "127.0.0.1"))
        clock.now += 0.01
        honest = await opened(reader, "127.0.0.1")
        await honest.send(b"x", last=True)
        assert await honest.body == [b"x"]
    assert [one.is_ended for one in slow] == [True] * 18 + [False] * 2


async def test_slow_is_not_long(clock: Clock) -> None:
    reader = BodyReader(BodyLimits(max_open=2))
    long = await opened(reader, "ana")
    clock.now += 4
    await long.send(b"x" * 10**6)
    slow = await opened(reader, "ana")
    clock.now += 1
    await long.send(b"x" * 10**6)
    await opened(reader, "ana")
    await settled()
    assert (long.is_ended, slow.is_ended) == (False, True)


async def test_the_largest_of_who_has_most_bytes_is_ended(clock: Clock) -> None:
    reader = BodyReader(BodyLimits(max_open_bytes=100))
    large, small = await opened(reader, "ana"), await opened(reader, "ana")
    other = await opened(reader, "ben")
    await large.send(b"x" * 50)
    await small.send(b"x" * 10)
    await other.send(b"x" * 40)
    assert not any(one.is_ended for one in (large, small, other))
    await other.send(b"x", last=True)
    assert [one.is_ended for one in (large, small)] == [True, False]
    assert await other.body == [b"x" * 41]
    await small.send(b"x" * 90)  # what the others had is free again
    assert not small.is_ended
    await small.send(b"x")
    assert small.is_ended, "the only one is the largest"


async def test_nothing_is_left_of_those_that_were_ended(clock: Clock) -> None:
    reader = BodyReader(BodyLimits(max_open=2, max_open_bytes=100))
    for _ in range(50):
        for _ in range(3):
            await (await opened(reader, "ana")).send(b"x" * 60)
        clock.now += 1
        clock.now += BODY_TIMEOUT_S
        await settled()
    for _ in range(2):
        last = await opened(reader, "ben")
        await last.send(b"x" * 100, last=True)
        assert await last.body == [b"x" * 100]


async def test_one_that_is_just_being_ended_for_its_slowness_hurts_no_newcomer(
    clock: Clock,
) -> None:
    reader = BodyReader(BodyLimits(max_open=1))
    slow = await opened(reader, "ana")
    clock.now += 6
    await asyncio.sleep(0)
    newcomer = Sender(reader, "ana")  # comes between the timer and what that ends
    await newcomer.send(b"x", last=True)
    assert await newcomer.body == [b"x"]
    assert isinstance(slow.body.exception(), SlowRequestError | BodyEndedError)


async def test_silence(clock: Clock) -> None:
    sender = await opened(BodyReader(BodyLimits()), "ana")
    clock.now += 4.9
    await settled()
    assert not sender.body.done()
    clock.now += 0.2
    with pytest.raises(SlowRequestError, match="2500 bytes in each 5 seconds"):
        await sender.body


@pytest.mark.parametrize(("a_second", "lasts_s"), [(1, 5), (499, 5), (501, 60), (100_000, 60)])
async def test_a_trickle(clock: Clock, a_second: int, lasts_s: int) -> None:
    sender = await opened(BodyReader(BodyLimits()), "ana")
    began = clock.now
    while not sender.body.done():
        assert clock.now - began <= BODY_TIMEOUT_S
        clock.now += 1
        await sender.send(b"x" * a_second)
    assert clock.now - began == lasts_s
    with pytest.raises(SlowRequestError):
        await sender.body


async def test_what_is_too_large_is_not_read(clock: Clock) -> None:
    declared = Sender(BodyReader(BodyLimits()), "ana", content_length=str(MAX_BODY_BYTES + 1))
    with pytest.raises(RequestTooLargeError):
        await declared.body
    sent = await opened(BodyReader(BodyLimits()), "ana")
    await sent.send(b"x" * MAX_BODY_BYTES)
    assert not sent.body.done()
    await sent.send(b"x")
    with pytest.raises(RequestTooLargeError):
        await sent.body


async def test_after_the_body_only_the_end_is_told() -> None:
    messages = [
        {"type": "http.request", "body": b"more", "more_body": True},
        {"type": "http.request", "body": b"and more", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    replayed = replay([b"a", b"ll"], receive)
    assert await replayed() == {"type": "http.request", "body": b"a", "more_body": True}
    assert await replayed() == {"type": "http.request", "body": b"ll", "more_body": False}
    assert await replayed() == {"type": "http.disconnect"}


class Piece(bytearray):
    """One that can be referred to weakly."""


async def test_what_came_of_an_ended_body_is_freed_at_once() -> None:
    """Not when the garbage collector comes by: a hundred bodies may be hundreds of megabytes by then."""
    reader = BodyReader(BodyLimits(max_open_bytes=70_000))
    piece: Any = Piece(80_000)
    freed = weakref.ref(piece)
    sent: asyncio.Queue[Any] = asyncio.Queue()
    sent.put_nowait({"type": "http.request", "body": piece, "more_body": True})
    del piece
    gc.disable()
    try:
        with pytest.raises(BodyEndedError) as ended:
            await reader.read("a", Headers(), sent.get)
        del ended
        assert freed() is None
    finally:
        gc.enable()

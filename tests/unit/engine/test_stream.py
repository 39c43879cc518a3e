"""How deltas reach their readers: in order, whole, and at nobody else's cost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve_app.base.values.answers import TokenLogprobs
from serve_app.engine import DecodeError, FinishReason, SequenceEnd, Timings, TokenDelta, Usage
from serve_app.engine.stream import TokenStream


def text(char: str) -> TokenDelta:
    return TokenDelta(char, (ord(char),))


def end(reason: FinishReason = FinishReason.STOP, error: DecodeError | None = None) -> TokenDelta:
    return TokenDelta("", (), SequenceEnd(reason, Usage(1, 1, 0), Timings(0, 0, 0), None, error))


class Aborts:
    """Counts calls."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> None:
        self.n += 1


@pytest.fixture
def aborts() -> Aborts:
    return Aborts()


async def let_it_wait() -> None:
    """Give a reader the loop until it waits for deltas."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_reader_that_waits_gets_each_delta(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    for delta in (text("a"), text("b")):
        reader = asyncio.create_task(anext(stream))
        await let_it_wait()
        stream.push(delta)
        assert await reader == delta
    stream.push(end())
    assert await anext(stream) == end()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert aborts.n == 0


async def test_slow_reader_gets_all_at_once(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    for delta in (text("a"), text("b"), text("c"), end(FinishReason.LENGTH)):
        stream.push(delta)
    assert [delta async for delta in stream] == [
        TokenDelta("abc", tuple(b"abc"), end(FinishReason.LENGTH).end)
    ]


async def test_what_comes_at_once_has_every_tokens_log_probability(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    for i in range(3):
        found = TokenLogprobs(-float(i), ())
        stream.push(TokenDelta("x", (i,), None, (found,)))
    await asyncio.sleep(0)
    delta = await anext(stream)
    assert delta.token_ids == (0, 1, 2)
    assert [one.logprob for one in delta.logprobs] == [0, -1, -2]


async def test_reader_is_woken_once_more_after_each_pause(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    stream.push(text("a"))
    stream.push(text("b"))
    assert await anext(stream) == TokenDelta("ab", tuple(b"ab"))
    reader = asyncio.create_task(anext(stream))
    await let_it_wait()
    assert not reader.done()
    stream.push(text("c"))
    assert await reader == text("c")


async def test_error_is_raised_after_the_text_before_it(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    error = DecodeError("status 1")
    for delta in (text("a"), text("b"), end(FinishReason.ERROR, error)):
        stream.push(delta)
    assert await anext(stream) == TokenDelta("ab", tuple(b"ab"))
    with pytest.raises(DecodeError) as raised:
        await anext(stream)
    assert raised.value is error
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_abort_calls_until_the_end_was_read(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    stream.abort()
    assert aborts.n == 1
    stream.push(end(FinishReason.ABORT))
    await anext(stream)
    stream.abort()
    assert aborts.n == 1


async def test_leaving_the_context_aborts(aborts: Aborts) -> None:
    async with TokenStream(aborts) as stream:
        stream.push(text("a"))
        async for _ in stream:
            break
    assert aborts.n == 1


async def test_leaving_the_context_after_the_end_does_not_abort(aborts: Aborts) -> None:
    async with TokenStream(aborts) as stream:
        stream.push(end())
        async for _ in stream:
            pass
    assert aborts.n == 0


async def test_cancelled_reader_can_read_on(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    reader = asyncio.create_task(anext(stream))
    await let_it_wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    stream.push(text("a"))
    assert await anext(stream) == text("a")


def test_closed_loop_aborts_once_and_raises_nothing(aborts: Aborts) -> None:
    async def make() -> TokenStream:
        return TokenStream(aborts)

    stream = asyncio.run(make())
    for delta in (text("a"), text("b"), end(FinishReason.ABORT)):
        stream.push(delta)
    assert aborts.n == 1


async def test_nothing_is_lost_between_threads(aborts: Aborts) -> None:
    stream = TokenStream(aborts)
    n = 5000

    def produce() -> None:
        for i in range(n):
            stream.push(TokenDelta("x", (i,)))
        stream.push(end())

    producer = threading.Thread(target=produce)
    producer.start()
    deltas = [delta async for delta in stream]
    producer.join()
    assert [token for delta in deltas for token in delta.token_ids] == list(range(n))
    assert [delta.end is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_stream_needs_a_running_loop(aborts: Aborts) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        TokenStream(aborts)

"""How deltas reach their readers: in order, whole, and at nobody else's cost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from serve_app.engine import DecodeError, FinishReason, SequenceEnd, Timings, TokenDelta, Usage
from serve_app.engine.stream import CallbackRunner, TokenStream
from serve_app.types import TokenLogprobs

PATIENCE_S = 30.0


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


# -- async streams --------------------------------------------------------------------------------


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


# -- callbacks ------------------------------------------------------------------------------------


@pytest.fixture
def runner() -> Iterator[CallbackRunner]:
    made = CallbackRunner()
    yield made
    made.close()


def test_callbacks_keep_their_order_on_one_other_thread(
    runner: CallbackRunner, aborts: Aborts
) -> None:
    calls: list[tuple[str, str, threading.Thread]] = []

    def note(name: str) -> Callable[[TokenDelta], None]:
        return lambda delta: calls.append((name, delta.text, threading.current_thread()))

    first, second = runner.sink(note("1"), aborts), runner.sink(note("2"), aborts)
    for sink, char in ((first, "a"), (second, "b"), (first, "c")):
        sink(text(char))
    runner.close()
    assert [call[:2] for call in calls] == [("1", "a"), ("2", "b"), ("1", "c")]
    assert len({call[2] for call in calls}) == 1
    assert threading.current_thread() not in {call[2] for call in calls}


def test_callback_that_raises_is_logged_aborted_and_left_alone(
    runner: CallbackRunner, aborts: Aborts, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    neighbour: list[str] = []

    def fail(delta: TokenDelta) -> None:
        seen.append(delta.text)
        raise ValueError("scripted")

    bad = runner.sink(fail, aborts)
    good = runner.sink(lambda delta: neighbour.append(delta.text), Aborts())
    with caplog.at_level(logging.ERROR, "corral.engine"):
        for char in "ab":
            bad(text(char))
            good(text(char))
        runner.close()
    assert (seen, neighbour, aborts.n) == (["a"], ["a", "b"], 1)
    assert len(caplog.records) == 1


def test_slow_callback_does_not_hold_up_the_sink(runner: CallbackRunner, aborts: Aborts) -> None:
    go_on = threading.Event()
    seen: list[str] = []

    def slow(delta: TokenDelta) -> None:
        assert go_on.wait(PATIENCE_S)
        seen.append(delta.text)

    sink = runner.sink(slow, aborts)
    for char in "abc":
        sink(text(char))
    assert seen == []
    go_on.set()
    runner.close()
    assert seen == ["a", "b", "c"]


def test_close_twice(runner: CallbackRunner) -> None:
    runner.close()
    runner.close()


def callback_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "corral-callbacks"}


def test_a_runner_has_no_thread_before_its_first_sink(aborts: Aborts) -> None:
    before = callback_threads()
    runner = CallbackRunner()
    assert callback_threads() == before
    runner.close()  # nothing to wait for
    assert callback_threads() == before


def test_sinks_of_many_threads_share_one(aborts: Aborts) -> None:
    before, runner, n = callback_threads(), CallbackRunner(), 8
    together, seen = threading.Barrier(n), list[threading.Thread]()

    def submit() -> None:
        together.wait(PATIENCE_S)
        runner.sink(lambda _: seen.append(threading.current_thread()), aborts)(text("a"))

    callers = [threading.Thread(target=submit) for _ in range(n)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(callback_threads() - before) == 1
    runner.close()
    assert len(seen) == n
    assert len(set(seen)) == 1
    assert callback_threads() == before


def test_a_sink_of_a_closed_runner_leaves_no_thread(runner: CallbackRunner, aborts: Aborts) -> None:
    before = callback_threads()
    runner.close()
    runner.sink(lambda _: None, aborts)
    for thread in callback_threads() - before:
        thread.join(PATIENCE_S)
    assert callback_threads() == before

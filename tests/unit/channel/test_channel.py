"""Both sides of channels, over real sockets: what a replica pushes is what a call's reader sees."""

from __future__ import annotations

import asyncio
import os

import pytest

from serve_app.base.errors import ChannelBrokenError, DecodeError, QueueFullError
from serve_app.base.values.answers import Accepted
from serve_app.channel.listener import Listener
from serve_app.channel.sender import Channel, Channels
from tests.unit.channel.harness import (
    ELSEWHERE,
    HERE,
    PATIENCE_S,
    connected,
    delta,
    failed,
    last,
    listening,
    read,
    settle,
)

NODES = pytest.mark.parametrize("node", [HERE, ELSEWHERE])


@NODES
async def test_a_call_from_its_acceptance_to_its_end(node: str) -> None:
    async with connected(node) as (listener, channel), asyncio.timeout(PATIENCE_S):
        with listener.call() as call:
            channel.accept(call.number, Accepted())
            channel.flush()
            assert await anext(call) == Accepted()
            for one in (delta("a"), delta("👍"), last("c")):
                channel.push(call.number, one)
                channel.flush()
                assert await anext(call) == one
            assert [item async for item in call] == []


async def test_what_piles_up_is_one_delta() -> None:
    async with connected() as (listener, channel):
        with listener.call() as call, listener.call() as other:
            for text in "abc":
                channel.push(call.number, delta(text))
                channel.flush()
            channel.push(call.number, last("d"))
            channel.push(other.number, last())
            channel.flush()
            await read(other)  # all has come
            assert (await read(call)).items == [Accepted(), last("abcd")]


async def test_an_acceptance_that_comes_late_is_told_first_and_once() -> None:
    async with connected() as (listener, channel):
        with listener.call() as call:
            channel.push(call.number, delta("a"))
            channel.flush()
            channel.accept(call.number, Accepted())
            channel.flush()
            channel.push(call.number, last())
            channel.flush()
            assert (await read(call)).text == "a"


@pytest.mark.parametrize("apart", [True, False])
async def test_an_error_comes_after_the_text_before_it(apart: bool) -> None:
    async with connected() as (listener, channel):
        with listener.call() as call:
            channel.push(call.number, delta("before"))
            if apart:
                channel.flush()
            channel.push(call.number, failed(DecodeError("No.")))
            channel.flush()
            seen = await read(call)
    assert seen.deltas == [delta("before")]
    assert isinstance(seen.error, DecodeError)


async def test_an_error_may_be_all_that_comes() -> None:
    async with connected() as (listener, channel):
        with listener.call() as call:
            channel.push(call.number, failed(QueueFullError("full", 3)))
            channel.flush()
            seen = await read(call)
    assert seen.items == [Accepted()]
    assert isinstance(seen.error, QueueFullError)
    assert seen.error.retry_after_s == 3


async def test_a_refusal_does_not_hide_what_came_before_it_nor_an_end() -> None:
    async with connected() as (listener, channel):
        with listener.call() as cut, listener.call() as whole:
            channel.push(cut.number, delta("a"))
            channel.push(whole.number, last("a"))
            channel.flush()
            await anext(whole)
            for call in (cut, whole):
                call.fail(DecodeError("No."))
            channel.push(cut.number, delta("b"))
            channel.flush()
            seen = await read(cut)
            assert (seen.deltas, type(seen.error)) == ([delta("a")], DecodeError)
            assert [item async for item in whole] == [last("a")]


@NODES
async def test_many_calls_over_one_connection(node: str) -> None:
    n_calls, text = 200, "A text of some length. 👍"
    async with connected(node) as (listener, channel):

        async def answered(number: int) -> str:
            with listener.call() as call:
                reader = asyncio.create_task(read(call))
                for letter in text:
                    channel.push(call.number, delta(letter))
                    if number % 3:
                        channel.flush()
                    await asyncio.sleep(0)
                channel.push(call.number, last(str(number)))
                channel.flush()
                return (await reader).text

        found = await asyncio.gather(*map(answered, range(n_calls)))
        assert found == [text + str(number) for number in range(n_calls)]
        assert len(listener._connections) == 1
        assert not listener._calls


@NODES
async def test_steps_on_another_thread_while_the_reader_is_slow(node: str) -> None:
    n_calls, n_steps, text = 8, 150, "x" * 300

    async with connected(node) as (listener, channel):

        def decode(numbers: list[int]) -> None:
            for _ in range(n_steps):
                for number in numbers:
                    channel.push(number, delta(text))
                channel.flush()
            for number in numbers:
                channel.push(number, last())
            channel.flush()

        calls = [listener.call() for _ in range(n_calls)]
        opened = [call.__enter__() for call in calls]
        ends = [channel.open_call(call.number) for call in opened]
        for call in opened:
            channel.accept(call.number, Accepted())
        await asyncio.to_thread(decode, [call.number for call in opened])
        for seen in await asyncio.gather(*map(read, opened)):
            assert seen.text == text * n_steps
        assert [(await end) for end in ends] == [last().end] * n_calls


@NODES
@pytest.mark.parametrize("by", ["replica", "ingress"])
async def test_a_break_fails_the_calls_of_that_connection_only(node: str, by: str) -> None:
    async with listening() as (listener, address):
        replicas = [Channels(node, "r1"), Channels(node, "r2")]
        one, other = [await channels.to(address) for channels in replicas]
        with listener.call() as cut, listener.call() as ended, listener.call() as safe:
            open_here = one.open_call(cut.number)
            one.accept(cut.number, Accepted())
            for channel, call, item in (
                *((one, cut, delta("a")), (one, ended, last("b")), (other, safe, delta("c"))),
            ):
                channel.push(call.number, item)
                channel.flush()
                assert await anext(call) == Accepted()
            if by == "replica":
                one.close()
            else:
                cut.channel.end()  # type: ignore[attr-defined]
            seen = await read(cut)
            assert (seen.items, type(seen.error)) == ([delta("a")], ChannelBrokenError)
            assert (await read(ended)).items == [last("b")]
            with pytest.raises(ChannelBrokenError):
                await open_here
            other.push(safe.number, last("d"))
            other.flush()
            assert [item async for item in safe] in ([delta("c"), last("d")], [last("cd")])
        for channels in replicas:
            channels.close()


async def test_who_answers_first_is_heard_and_nobody_else() -> None:
    """Serve may send a call to a second replica while the first one is at it."""
    async with listening() as (listener, address):
        replicas = [Channels(HERE, "r1"), Channels(ELSEWHERE, "r2")]
        one, other = [await channels.to(address) for channels in replicas]
        with listener.call() as call, listener.call() as known:
            one.push(call.number, delta("a"))
            one.flush()
            assert await anext(call) == Accepted()
            other.push(call.number, last("no"))
            other.push(known.number, last())
            other.flush()
            await read(known)
            other.close()
            one.push(call.number, last("b"))
            one.flush()
            assert "".join([item.text async for item in call if item != Accepted()]) == "ab"  # type: ignore[union-attr]
        one.close()


async def test_what_comes_for_a_call_that_is_over_is_ignored() -> None:
    async with connected() as (listener, channel):
        with listener.call() as call:
            pass
        channel.push(call.number, delta("late"))
        channel.flush()
        with listener.call() as other:
            channel.push(other.number, last())
            channel.flush()
            assert (await read(other)).items == [Accepted(), last()]


@NODES
async def test_a_channel_that_was_lost_is_opened_anew(node: str) -> None:
    async with listening() as (listener, address):
        channels = Channels(node, "r")
        first = await channels.to(address)
        assert await channels.to(address) is first
        first.close()
        second = await channels.to(address)
        assert second is not first
        with listener.call() as call:
            second.push(call.number, last("a"))
            channels.flush()
            assert (await read(call)).text == "a"
        channels.close()


async def test_many_who_ask_at_once_share_one() -> None:
    async with listening() as (listener, address):
        channels = Channels(HERE, "r")
        found = await asyncio.gather(*(channels.to(address) for _ in range(20)))
        assert len(set(map(id, found))) == len(listener._connections) == 1
        channels.close()


async def test_one_who_leaves_meanwhile_does_not_take_it_from_the_others() -> None:
    async with listening() as (_, address):
        channels = Channels(ELSEWHERE, "r")
        leaving, staying = [asyncio.create_task(channels.to(address)) for _ in range(2)]
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await staying is await channels.to(address)
        channels.close()


@NODES
async def test_nobody_listens_any_more(node: str) -> None:
    async with listening() as (_, address):
        pass
    channels = Channels(node, "r")
    for _ in range(2):
        with pytest.raises(ChannelBrokenError):
            await channels.to(address)


@NODES
async def test_when_the_ingress_closes_all_calls_fail(node: str) -> None:
    async with connected(node) as (listener, channel):
        with listener.call() as call:
            channel.accept(call.number, Accepted())
            channel.flush()
            assert await anext(call) == Accepted()
            here = channel.open_call(call.number)
            listener.close()
            assert isinstance((await read(call)).error, ChannelBrokenError)
            with pytest.raises(ChannelBrokenError):
                await here


async def test_ipv6() -> None:
    async with connected(ELSEWHERE, "::1") as (listener, channel):
        with listener.call() as call:
            channel.push(call.number, last("a"))
            channel.flush()
            assert (await read(call)).text == "a"


@NODES
async def test_no_socket_is_inherited(node: str) -> None:
    async with connected(node) as (listener, channel):
        sockets = [one.fileno() for server in listener._servers for one in server.sockets]
        for connection in listener._connections:
            sockets.append(connection._transport.get_extra_info("socket").fileno())
        assert len(sockets) == 3
        assert not any(map(os.get_inheritable, [*sockets, channel._fd]))


def test_a_listener_waits_for_the_loop_that_it_serves() -> None:
    """Serve builds deployments where it likes."""
    listener = Listener(HERE, "127.0.0.1")

    async def answered() -> str:
        addresses = await asyncio.gather(*(listener.address() for _ in range(3)))
        assert len(set(addresses)) == 1
        channel: Channel = await Channels(HERE, "r").to(addresses[0])
        with listener.call() as call:
            channel.push(call.number, last("a"))
            channel.flush()
            text = (await read(call)).text
        channel.close()
        listener.close()
        await settle()
        return text

    assert asyncio.run(answered()) == "a"

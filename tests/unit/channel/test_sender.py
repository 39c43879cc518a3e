"""An engine replica's side alone: the other end of its socket is the test's."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from serve_app.base.errors import ChannelBrokenError, DecodeError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.channel import sender
from serve_app.channel.protocol import Item
from tests.unit.channel.harness import PATIENCE_S, Wire, delta, failed, last, settle


def merged(received: list[list[Item]]) -> dict[int, TokenDelta]:
    """All that came for each call."""
    found: dict[int, TokenDelta] = {}
    for number, one in (item for frame in received for item in frame):
        if isinstance(one, TokenDelta):
            found[number] = found[number].then(one) if number in found else one
    return found


async def test_a_step_is_one_frame(wire: Wire) -> None:
    for number in range(3):
        wire.channel.push(number, delta("a"))
    assert wire.receive() == []
    wire.channel.flush()
    assert wire.receive() == [[(number, delta("a")) for number in range(3)]]
    wire.channel.flush()
    assert wire.receive() == []


@pytest.mark.parametrize("n_early", [0, 1, 2])
async def test_the_acceptance_is_first_even_if_the_decoder_is_faster(
    wire: Wire, n_early: int
) -> None:
    accepted = Accepted(0.5, 2.0, True)
    wire.channel.open_call(1)
    for _ in range(n_early):
        wire.channel.push(1, delta("a"))
        wire.channel.flush()
    assert wire.receive() == []
    wire.channel.accept(1, accepted)
    wire.channel.push(1, delta("b"))
    wire.channel.flush()
    assert wire.receive() == [[(1, accepted), (1, delta("a" * n_early + "b"))]]
    wire.channel.close_call(1)


async def test_a_reader_that_does_not_read_holds_nobody_up(wire: Wire) -> None:
    sent = wire.fill()
    for _ in range(1000):
        for number in (1, 2):
            wire.channel.push(number, delta("yz"))
        wire.channel.flush()
    assert set(wire.channel._pending) - {0} == {1, 2}  # one delta for each call
    received = await wire.receive_all()
    assert merged(received) == {0: sent, 1: delta("yz" * 1000), 2: delta("yz" * 1000)}
    wire.channel.push(1, last())  # it goes on as before
    wire.channel.flush()
    assert wire.receive() == [[(1, last())]]


async def test_what_piled_up_comes_in_several_frames(wire: Wire) -> None:
    sent = wire.fill()
    n_calls = 3 * sender.MOST_TOKENS
    for number in range(1, n_calls + 1):
        wire.channel.push(number, delta("a"))
    wire.channel.push(n_calls + 1, delta("b" * 2 * sender.MOST_TOKENS))
    wire.channel.push(n_calls + 2, delta("c"))
    received = await wire.receive_all()
    assert [number for frame in received for number, _ in frame if number] == [
        *range(1, n_calls + 3)
    ]
    assert merged(received)[0] == sent
    assert max(map(len, received)) <= sender.MOST_TOKENS
    assert len(received[-2]) == 1 or received[-2][-1][0] == n_calls + 1  # and no more in its frame


async def test_text_before_an_error_stays_and_held_text_goes(wire: Wire) -> None:
    """Who goes on with the request elsewhere brings what was held back."""
    error = DecodeError("No.")
    wire.fill()
    wire.channel.push(1, delta("before"))
    end = failed(error).end
    wire.channel.push(1, TokenDelta("held", (), end))
    wire.channel.push(2, TokenDelta("held", (), end))
    found = merged(await wire.receive_all())
    assert (found[1].text, found[1].token_ids) == ("before", delta("before").token_ids)
    assert (found[2].text, found[2].token_ids) == ("", ())
    for one in (found[1], found[2]):
        assert one.end is not None
        assert one.end.error is not None
        assert one.end.error.args == error.args


async def test_a_call_has_its_end_when_it_is_pushed(wire: Wire) -> None:
    wire.fill()
    call = wire.channel.open_call(1)
    wire.channel.push(1, last("a"))
    await settle()
    assert call.result() == last("a").end


@pytest.mark.parametrize("how", ["the peer leaves", "it is closed", "a full peer leaves"])
async def test_a_break_fails_all_open_calls_once(wire: Wire, how: str) -> None:
    calls = [wire.channel.open_call(number) for number in range(3)]
    for number in range(3):
        wire.channel.accept(number, Accepted())
    wire.channel.push(2, last())
    wire.channel.flush()
    await settle()
    if how == "a full peer leaves":
        wire.fill()
    if how == "it is closed":
        wire.channel.close()
    else:
        wire.peer.close()
    async with asyncio.timeout(PATIENCE_S):
        for call in calls[:2]:
            with pytest.raises(ChannelBrokenError):
                await call
    assert calls[2].result() == last().end
    wire.channel.close()
    assert wire.n_lost == 1


async def test_a_write_finds_the_break_first(wire: Wire) -> None:
    call = wire.channel.open_call(1)
    wire.channel.accept(1, Accepted())
    wire.peer.close()
    wire.channel.push(1, delta("a"))
    wire.channel.flush()
    wire.channel.flush()
    late = wire.channel.open_call(2)
    for one in (call, late):
        with pytest.raises(ChannelBrokenError):
            await one
    assert wire.n_lost == 1


async def test_what_is_pushed_after_a_break_is_dropped(wire: Wire) -> None:
    wire.channel.close()
    call = wire.channel.open_call(1)
    wire.channel.push(1, delta("a"))
    wire.channel.push(1, last())
    wire.channel.flush()
    assert not wire.channel._pending
    with pytest.raises(ChannelBrokenError):
        await call


async def test_a_call_opened_while_it_breaks_fails(wire: Wire) -> None:
    wire.peer.close()
    wire.channel.push(0, delta("a"))
    await asyncio.to_thread(wire.channel.flush)  # as the decoder thread does
    with pytest.raises(ChannelBrokenError):
        await wire.channel.open_call(1)


async def test_the_socket_is_let_go_before_another_gets_its_number(wire: Wire) -> None:
    """It was full, and its loop had not heard of that, when it broke."""
    fd = wire.channel._fd
    wire.fill()
    wire.channel.close()
    left, right = socket.socketpair()
    with left, right:
        assert fd in (left.fileno(), right.fileno())
        await settle()
        loop = asyncio.get_running_loop()
        assert not loop.remove_writer(fd)
        assert not loop.remove_reader(fd)


async def test_what_cannot_be_encoded_breaks_the_channel_and_not_the_decoder(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    call = wire.channel.open_call(1)
    wire.channel.accept(1, Accepted())
    wire.channel.push(1, TokenDelta("a", (2**70,)))
    with caplog.at_level(logging.ERROR, "corral.replica"):
        wire.channel.flush()
    with pytest.raises(ChannelBrokenError):
        await call
    assert "Tokens cannot be sent" in caplog.text


async def test_calls_that_nobody_waits_for_are_forgotten(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        wire.channel.open_call(number)
    wire.channel.close_call(0)
    wire.channel.close_call(0)
    wire.channel.close()
    for number in (1, 2):
        wire.channel.close_call(number)
    assert not wire.channel._calls
    await settle()
    assert caplog.text == ""  # asyncio tells of exceptions that nobody asked for


def test_a_loop_that_is_closed_hears_of_nothing() -> None:
    async def open_one() -> Wire:
        return Wire()

    wire = asyncio.run(open_one())
    wire.channel.push(1, last())
    wire.channel.flush()
    assert wire.receive() == [[(1, last())]]
    wire.peer.close()
    wire.channel.push(1, delta("a"))
    wire.channel.flush()
    wire.channel._connection.close()

"""Who may connect, and where a listener listens."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import socket
from collections.abc import Callable

import pytest

from serve_app.base.errors import ChannelBrokenError
from serve_app.base.values.answers import Accepted
from serve_app.channel import listener, protocol
from serve_app.channel.listener import Listener
from serve_app.channel.protocol import Address
from serve_app.channel.sender import Channels
from tests.unit.channel.harness import ELSEWHERE, HERE, PATIENCE_S, last, listening, read, settle


async def stranger(address: Address) -> socket.socket:
    """One that has said nothing yet."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                connection.connect("\0" + address.path)
                return connection
            except BlockingIOError:  # so many wait already
                await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes through this loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def refused(connection: socket.socket) -> None:
    """Read until the listener has closed it."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            found = await asyncio.get_running_loop().sock_recv(connection, 1)
        except ConnectionResetError:
            found = b""
    assert found == b""
    connection.close()


async def answers(listener: Listener, address: Address) -> None:
    """It serves those that know the secret."""
    channels = Channels(ELSEWHERE, "r")
    channel = await channels.to(address)
    with listener.call() as call:
        channel.push(call.number, last("a"))
        channel.flush()
        assert (await read(call)).text == "a"
    channels.close()


@pytest.mark.parametrize("node", [HERE, ELSEWHERE])
@pytest.mark.parametrize("secret", ["", "wrong", "wröng"])
async def test_a_wrong_secret_is_refused(node: str, secret: str) -> None:
    async with listening() as (listener, address):
        with pytest.raises(ChannelBrokenError):
            await Channels(node, "r").to(dataclasses.replace(address, secret=secret))
        await until(lambda: not listener._strangers)
        await answers(listener, address)


async def test_the_secret_is_not_shown() -> None:
    async with listening() as (_, address):
        assert address.secret not in repr(address)


@pytest.mark.parametrize(
    "said",
    [
        b"\0\0\0\0",
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * protocol.MOST_HELLO_BYTES,
        protocol.frame([(0, Accepted())]),
        protocol.frame(protocol.Hello("wrong", "r")),
        b"\xff\xff\xff\xff" + b"x" * (protocol.MOST_HELLO_BYTES + 1),
    ],
)
async def test_garbage_is_refused(said: bytes) -> None:
    async with listening() as (listener, address):
        connection = await stranger(address)
        with listener.call() as call:
            connection.send(said)
            await refused(connection)
            assert call.channel is None
        assert not listener._strangers
        assert not listener._connections


async def test_who_was_refused_is_not_heard_again() -> None:
    async with listening() as (listener, address):
        connection = await stranger(address)
        hello = protocol.frame(protocol.Hello(address.secret, "r"))
        connection.send(protocol.frame(protocol.Hello("wrong", "r")) + hello)
        await refused(connection)
        assert not listener._connections


async def test_one_that_is_believed_and_sends_garbage_is_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (listener, address):
        connection = await stranger(address)
        connection.send(protocol.frame(protocol.Hello(address.secret, "r")))
        await until(lambda: bool(listener._connections))
        assert connection.recv(9) == protocol.WELCOME
        with caplog.at_level(logging.ERROR, "corral.ingress"):
            connection.send(b"\1\0\0\0\xc1")
            await refused(connection)
        assert "something that is not a frame" in caplog.text
        assert not listener._connections


async def test_a_silent_stranger_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECT_S", 0.01)
    async with listening() as (_, address):
        await refused(await stranger(address))


async def test_one_that_is_believed_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as (one, address):
        channels = Channels(HERE, "r")
        channel = await channels.to(address)
        (connection,) = one._connections
        connection._doubt()
        with one.call() as call:
            channel.push(call.number, last("a"))
            channel.flush()
            assert (await read(call)).text == "a"
        channels.close()


async def test_of_a_thousand_strangers_few_stay() -> None:
    async with listening() as (one, address):
        strangers = [await stranger(address) for _ in range(1000)]
        await answers(one, address)
        assert len(one._strangers) <= listener._MOST_STRANGERS
        for connection in strangers[: -listener._MOST_STRANGERS]:
            await refused(connection)
        for connection in strangers[-listener._MOST_STRANGERS :]:
            connection.close()
        await until(lambda: not one._strangers)


async def test_a_hundred_strangers_in_one_turn_of_the_loop() -> None:
    async with listening() as (one, address):
        strangers = [await stranger(address) for _ in range(listener._MOST_STRANGERS + 35)]
        await until(lambda: len(one._strangers) >= listener._MOST_STRANGERS)
        for connection in strangers[:35]:
            await refused(connection)
        for connection in strangers[35:]:
            connection.close()


async def test_a_port_that_cannot_be_had_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    create_server, failures = loop.create_server, [OSError(errno.EMFILE, "Too many open files")]

    async def create(*given: object, **options: object) -> asyncio.Server:
        if failures:
            raise failures.pop()
        return await create_server(*given, **options)  # type: ignore[call-overload, no-any-return]

    one = Listener(HERE, "127.0.0.1")
    monkeypatch.setattr(loop, "create_server", create)
    with pytest.raises(OSError, match="Too many"):
        await one.address()
    assert not one._servers
    address = await one.address()
    assert await one.address() is address
    assert len(one._servers) == 2
    await answers(one, address)
    one.close()
    await settle()


async def test_a_unix_socket_that_cannot_be_had_frees_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    create_server = loop.create_server

    async def create(*given: object, **options: object) -> asyncio.Server:
        servers.append(await create_server(*given, **options))  # type: ignore[call-overload]
        return servers[-1]

    async def create_unix(*_: object, **__: object) -> asyncio.Server:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loop, "create_server", create)
    monkeypatch.setattr(loop, "create_unix_server", create_unix)
    with pytest.raises(OSError, match="Too many"):
        await Listener(HERE, "127.0.0.1").address()
    assert [list(one.sockets) for one in servers] == [[]]


async def test_an_address_of_no_interface_is_listened_for_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As behind a gateway that translates addresses."""
    one = Listener(HERE, "192.0.2.1")
    address = await one.address()
    assert address.host == "192.0.2.1"
    assert "No interface has the address 192.0.2.1" in caplog.text
    await answers(one, dataclasses.replace(address, host="127.0.0.1"))
    one.close()
    await settle()

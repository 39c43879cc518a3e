"""Channels between nodes where Ray's cluster has TLS: real certificates, made for each test run."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest

from serve_app.base.errors import ChannelBrokenError
from serve_app.base.values.answers import Accepted
from serve_app.channel import listener as listening_side
from serve_app.channel import protocol as connecting_side
from serve_app.channel.sender import Channels
from tests.unit.channel.harness import (
    ELSEWHERE,
    HERE,
    PATIENCE_S,
    connected,
    delta,
    last,
    listening,
    read,
)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def _authority(folder: Path) -> Path:
    """A folder with an authority, and a key and certificate of a node."""
    folder.mkdir()
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", "-days", "2")
    _openssl(folder, *new, "-x509", *authority)
    _openssl(folder, *new, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=any-node")
    signed = ("-in", "node.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
    _openssl(folder, "x509", "-req", *signed, "-out", "node.crt", "-days", "2")
    return folder


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that do not know each other."""
    folder = tmp_path_factory.mktemp("tls")
    return _authority(folder / "ours"), _authority(folder / "theirs")


def use(monkeypatch: pytest.MonkeyPatch, node: Path, trusted: Path | None = None) -> None:
    """Be a node of a cluster with TLS."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(node / "node.crt"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(node / "node.key"))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str((trusted or node) / "ca.crt"))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch, authorities: tuple[Path, Path]) -> Path:
    use(monkeypatch, authorities[0])
    return authorities[0]


@pytest.mark.usefixtures("ours")
async def test_a_call_over_tls() -> None:
    async with connected(ELSEWHERE) as (listener, channel):
        (connection,) = listener._connections
        assert connection._transport.get_extra_info("peercert")["subject"] == (
            (("commonName", "any-node"),),
        )
        with listener.call() as call:
            channel.accept(call.number, Accepted())
            for one in (delta("a"), last("👍")):
                channel.push(call.number, one)
                channel.flush()
            seen = await read(call)
    assert seen.items[0] == Accepted()
    assert seen.text == "a👍"


@pytest.mark.usefixtures("ours")
async def test_a_slow_reader_over_tls() -> None:
    text = "x" * 10_000
    async with connected(ELSEWHERE) as (listener, channel):
        with listener.call() as call:
            n_pushed = 0
            while not channel._is_blocked:
                channel.push(call.number, delta(text))
                channel.flush()
                n_pushed += 1
            channel.push(call.number, last("end"))
            channel.flush()
            assert (await read(call)).text == text * n_pushed + "end"


@pytest.mark.usefixtures("ours")
async def test_steps_on_another_thread_over_tls() -> None:
    n_steps, text = 300, "x" * 500

    async with connected(ELSEWHERE) as (listener, channel):

        def decode(number: int) -> None:
            for _ in range(n_steps):
                channel.push(number, delta(text))
                channel.flush()
            channel.push(number, last())
            channel.flush()

        with listener.call() as call:
            decoding = asyncio.create_task(asyncio.to_thread(decode, call.number))
            while not decoding.done():
                channel._readable()  # as if the other side sent something all the time
                await asyncio.sleep(0)
            assert (await read(call)).text == text * n_steps


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("by", ["replica", "ingress"])
async def test_a_break_over_tls(by: str) -> None:
    async with connected(ELSEWHERE) as (listener, channel):
        with listener.call() as call:
            channel.push(call.number, delta("a"))
            channel.flush()
            assert await anext(call) == Accepted()
            here = channel.open_call(call.number)
            if by == "replica":
                channel.close()
            else:
                listener.close()
            assert isinstance((await read(call)).error, ChannelBrokenError)
            with pytest.raises(ChannelBrokenError):
                await here


@pytest.mark.parametrize("who", ["the listener's", "the replica's", "none"])
async def test_a_certificate_of_another_authority_is_refused(
    monkeypatch: pytest.MonkeyPatch, authorities: tuple[Path, Path], who: str
) -> None:
    ours, theirs = authorities
    use(monkeypatch, theirs if who == "the listener's" else ours, ours)
    async with listening() as (listener, address):
        await listener.address()
        use(monkeypatch, theirs if who == "the replica's" else ours, ours)
        if who == "none":
            monkeypatch.setenv("RAY_USE_TLS", "0")
        with pytest.raises(ChannelBrokenError):
            await Channels(ELSEWHERE, "r").to(address)
        assert not listener._connections


@pytest.mark.usefixtures("ours")
async def test_a_listener_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "0")
    monkeypatch.setattr(connecting_side, "CONNECT_S", 0.2)  # it never shakes hands
    async with listening() as (listener, address):
        monkeypatch.setenv("RAY_USE_TLS", "1")
        with pytest.raises(ChannelBrokenError):
            await Channels(ELSEWHERE, "r").to(address)
        assert not listener._connections


@pytest.mark.usefixtures("ours")
async def test_a_stranger_that_does_not_shake_hands_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening_side, "CONNECT_S", 0.01)
    async with listening() as (_, address), asyncio.timeout(PATIENCE_S):
        with socket.socket() as connection:
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (address.host, address.port))
            assert await loop.sock_recv(connection, 1) == b""


async def test_files_that_cannot_be_read_are_told(
    monkeypatch: pytest.MonkeyPatch, ours: Path
) -> None:
    async with listening() as (_, address):
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(ours / "none"))
        with pytest.raises(ChannelBrokenError):
            await Channels(ELSEWHERE, "r").to(address)
        channels = Channels(HERE, "r")
        await channels.to(address)  # nothing leaves the host
        channels.close()

"""What a replica says of itself goes beside the tokens, and never waits for a reader."""

from __future__ import annotations

import pytest

from serve_app.base.values.answers import TokenDelta
from serve_app.channel import protocol
from serve_app.channel.listener import Listener
from serve_app.channel.sender import Channels
from tests.unit.channel.harness import ELSEWHERE, HERE, Wire, delta, settle


def bodies(wire: Wire) -> list[bytes]:
    return list(protocol.FrameBuffer().add(wire.peer.recv(1 << 20)))


@pytest.mark.parametrize("n_bytes", [0, 1, 255, 256, 65_536])
def test_a_report_is_told_from_tokens(n_bytes: int) -> None:
    report = bytes(n_bytes)
    (body,) = protocol.FrameBuffer().add(protocol.frame(report))
    assert protocol.report(body) == report
    (body,) = protocol.FrameBuffer().add(protocol.frame([(n_bytes, delta("a"))]))
    assert protocol.report(body) is None


async def test_a_report_is_a_frame_of_its_own(wire: Wire) -> None:
    wire.channel.push(1, delta("a"))
    assert wire.channel.report(b"said")
    report, tokens = bodies(wire)
    assert protocol.report(report) == b"said"
    assert protocol.items(tokens) == [(1, delta("a"))]


async def test_none_is_kept_for_one_who_does_not_read(wire: Wire) -> None:
    sent = wire.fill()
    assert [wire.channel.report(b"said") for _ in range(3)] == [False] * 3
    received = await wire.receive_all()
    items = [one for frame in received for _, one in frame if isinstance(one, TokenDelta)]
    assert sum(len(one.text) for one in items) == len(sent.text)
    await settle()
    assert wire.channel.report(b"newer")
    assert [protocol.report(body) for body in bodies(wire)] == [b"newer"]


async def test_one_that_is_gone_is_told_nothing(wire: Wire) -> None:
    wire.channel.close()
    assert not wire.channel.report(b"said")


class Heard:
    """Who hears a replica."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.reports: list[bytes] = []
        self.n_ends = 0

    def take(self, report: bytes) -> None:
        self.reports.append(report)

    def end(self) -> None:
        self.n_ends += 1


@pytest.mark.parametrize("node", [HERE, ELSEWHERE])
async def test_an_ingress_hears_each_connection_apart(node: str) -> None:
    heard = list[Heard]()

    def hear(replica_id: str) -> Heard:
        heard.append(Heard(replica_id))
        return heard[-1]

    listener = Listener(HERE, "127.0.0.1", hear)
    address = await listener.address()
    for name in ("a", "b"):
        channels = Channels(node, name)
        channel = await channels.to(address)
        assert channel.report(b"1")
        assert channel.report(name.encode())
        while len(heard[-1].reports) < 2:
            await settle()
        assert [one.n_ends for one in heard[:-1]] == [1] * (len(heard) - 1)
        channels.close()
        while not heard[-1].n_ends:
            await settle()
    assert [(one.replica_id, one.reports) for one in heard] == [
        ("a", [b"1", b"a"]),
        ("b", [b"1", b"b"]),
    ]
    listener.close()
    await settle()
    assert [one.n_ends for one in heard] == [1, 1]

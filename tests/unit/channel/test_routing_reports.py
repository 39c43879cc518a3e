"""Reports of engine replicas: what they say, who hears them, and who is asked to report."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel import routing_reports as reports
from serve_app.channel.blocks import MAX_BLOCKS
from serve_app.channel.protocol import Address
from serve_app.channel.routing_reports import ReplicaAttachment, ReplicaConnection, Reports
from serve_app.channel.score import Report
from tests.unit.channel.harness import settle

HASHES = st.frozensets(st.integers(0, 2**32 - 1), max_size=9)
FIGURES = st.floats(0, 1e6)
REPORTS = st.builds(
    Report,
    st.integers(1, 64),
    st.integers(0, 999),
    *[FIGURES] * 5,
    blocks=HASHES,
    requests=HASHES,
    turns=HASHES,
)


encode = msgspec.msgpack.encode


def heard(body: bytes) -> Report | None:
    reports = Reports()
    reports.connection("r").take(body)
    return newest(reports)


@given(REPORTS)
def test_a_report_is_heard_as_it_was_said(report: Report) -> None:
    assert heard(encode(report)) == report


def test_the_longest_report_is_short() -> None:
    rng = random.Random(7)
    blocks = frozenset(rng.getrandbits(32) for _ in range(MAX_BLOCKS))
    assert len(encode(Report(blocks=blocks, requests=frozenset(range(256))))) < 12 * 2**10


def test_what_another_version_says_besides_is_left_out() -> None:
    assert heard(encode({"n_live": 3, "mood": 7, "jokes": []})) == Report(n_live=3)


@pytest.mark.parametrize("body", [b"", b"\xc1", encode({"n_live": "many"})])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        heard(body)


FIRST, SECOND = Report(n_live=1, blocks=frozenset([1])), Report(n_live=2, blocks=frozenset([2]))


def newest(reports: Reports) -> Report | None:
    entry = reports.newest("r")
    return None if entry is None else entry[0]


def test_the_newest_report_is_read() -> None:
    reports = Reports()
    assert not reports.hears("r")
    connection = reports.connection("r")
    assert reports.hears("r")
    assert newest(reports) is None
    connection.take(encode(FIRST))
    at = connection.newest[1] if connection.newest else None
    connection.take(encode(SECOND))
    assert newest(reports) == SECOND
    assert connection.newest is not None
    assert at is not None
    assert connection.newest[1] >= at
    assert reports.newest("s") is None


def test_who_leaves_is_heard_no_more() -> None:
    reports = Reports()
    connection = reports.connection("r")
    connection.take(encode(FIRST))
    connection.end()
    connection.end()
    assert not reports.hears("r")
    assert newest(reports) is None


def test_a_new_connection_begins_anew_and_the_end_of_the_old_one_means_nothing() -> None:
    reports = Reports()
    old = reports.connection("r")
    old.take(encode(FIRST))
    new = reports.connection("r")
    new.take(encode(SECOND))
    old.end()
    assert newest(reports) == SECOND


ADDRESS = Address("n", "l", "127.0.0.1", 1, "secret")


class Fleet:
    """Replicas, named as their ids, that attach themselves when they are asked, unless they fail."""

    def __init__(self, reports: Reports) -> None:
        self.reports = reports
        self.asked: list[str] = []
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.connections: dict[str, ReplicaConnection] = {}

    async def ask(self, replica: str, address: Address) -> None:
        assert address == ADDRESS
        self.asked.append(replica)
        if replica in self.hanging:
            await asyncio.Event().wait()
        if replica in self.failing:
            raise RuntimeError("lost")
        self.connections[replica] = self.reports.connection(replica)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pauses."""
    monkeypatch.setattr(reports, "_AGAIN_S", 0.0)
    monkeypatch.setattr(reports, "_ANSWER_S", 0.0)


@pytest.fixture
def fleet() -> Fleet:
    reports = Reports()
    reports.address = ADDRESS
    return Fleet(reports)


def members(*replicas: str) -> dict[str, str]:
    return {one: one for one in replicas}


async def until_asked(fleet: Fleet, n_times: int) -> None:
    async with asyncio.timeout(30):
        while len(fleet.asked) < n_times:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_each_replica_is_asked_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_ANSWER_S", 30.0)
    kept = ReplicaAttachment(fleet.reports, fleet.ask)
    kept.update(members("a", "b"))
    kept.update(members("a", "b"))
    await settle()
    kept.update(members("a", "b", "c"))
    await settle()
    assert sorted(fleet.asked) == ["a", "b", "c"]


async def test_who_is_attached_already_is_not_asked(fleet: Fleet) -> None:
    fleet.reports.connection("a")
    ReplicaAttachment(fleet.reports, fleet.ask).update(members("a"))
    await settle()
    assert fleet.asked == []


async def test_who_fails_or_hangs_is_asked_again(fleet: Fleet) -> None:
    fleet.failing, fleet.hanging = {"a"}, {"b"}
    ReplicaAttachment(fleet.reports, fleet.ask).update(members("a", "b"))
    await until_asked(fleet, 6)
    assert min(fleet.asked.count(one) for one in "ab") >= 2
    fleet.failing, fleet.hanging = set(), set()
    async with asyncio.timeout(30):
        while set(fleet.connections) != {"a", "b"}:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_broken_channel_is_asked_for_again(fleet: Fleet) -> None:
    ReplicaAttachment(fleet.reports, fleet.ask).update(members("a"))
    await until_asked(fleet, 1)
    fleet.connections["a"].end()
    await until_asked(fleet, 2)
    await settle()
    assert fleet.reports.hears("a")


async def test_who_is_no_member_any_more_is_not_asked(fleet: Fleet) -> None:
    fleet.failing = {"a"}
    kept = ReplicaAttachment(fleet.reports, fleet.ask)
    kept.update(members("a", "b"))
    await until_asked(fleet, 3)
    kept.update({})
    await settle()
    n_asked = len(fleet.asked)
    fleet.connections["b"].end()
    await settle()
    assert len(fleet.asked) == n_asked


async def test_where_no_ingress_listens_nobody_is_asked(fleet: Fleet) -> None:
    fleet.reports.address = None
    ReplicaAttachment(fleet.reports, fleet.ask).update(members("a"))
    await settle()
    assert fleet.asked == []

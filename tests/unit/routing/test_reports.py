"""Reports of engine replicas: their changes, who hears them, and who is asked to report."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel.protocol import Address
from serve_app.routing import reports
from serve_app.routing.blocks import MAX_BLOCKS
from serve_app.routing.reports import ReplicaAttachment, ReplicaConnection, Reports, applied, change
from serve_app.routing.score import Report
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


@given(st.lists(REPORTS, min_size=1))
def test_changes_add_up_to_what_was_said(said: list[Report]) -> None:
    before = heard = None
    for report in said:
        body = change(before, report)
        if body is not None:
            heard = applied(heard, body)
        assert heard == report
        before = report


@given(REPORTS)
def test_the_first_one_is_whole_whatever_the_reader_takes_for_given(report: Report) -> None:
    body = change(None, report)
    assert body is not None
    assert applied(Report(n_slots=99, work_s=9e9, token_s=9e9), body).n_slots == report.n_slots
    assert applied(None, body) == report


@given(REPORTS)
def test_what_is_the_same_is_not_said(report: Report) -> None:
    assert change(report, report) is None


def test_little_is_said_where_little_has_changed() -> None:
    rng = random.Random(7)
    held = [rng.getrandbits(32) for _ in range(MAX_BLOCKS)]
    before = Report(blocks=frozenset(held[1:]), requests=frozenset(range(256)))
    after = Report(n_live=1, blocks=frozenset(held[:-1]), requests=frozenset(range(1, 257)))
    whole, body = change(None, before), change(before, after)
    assert whole is not None
    assert body is not None
    assert 4 * (MAX_BLOCKS + 255) < len(whole) < 4 * (MAX_BLOCKS + 256) + 256
    assert len(body) < 128


def test_what_another_version_says_besides_is_left_out() -> None:
    said = {"figures": {"n_live": 3, "mood": 7}, "added": {"songs": b"abcd"}, "jokes": []}
    assert applied(None, msgspec.msgpack.encode(said)) == Report(n_live=3)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"figures": "many"})])
def test_what_is_no_change_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        applied(None, body)


FIRST, SECOND = Report(n_live=1, blocks=frozenset([1])), Report(n_live=2, blocks=frozenset([2]))


def say(connection: ReplicaConnection, before: Report | None, after: Report) -> None:
    body = change(before, after)
    assert body is not None
    connection.take(body)


def newest(reports: Reports) -> Report | None:
    heard = reports.newest("r")
    return None if heard is None else heard[0]


def test_the_newest_report_is_read() -> None:
    reports = Reports()
    assert not reports.hears("r")
    connection = reports.connection("r")
    assert reports.hears("r")
    assert newest(reports) is None
    say(connection, None, FIRST)
    at = connection.newest[1] if connection.newest else None
    say(connection, FIRST, SECOND)
    assert newest(reports) == SECOND
    assert connection.newest is not None
    assert at is not None
    assert connection.newest[1] >= at
    assert reports.newest("s") is None


def test_who_leaves_is_heard_no_more_and_watchers_are_told() -> None:
    reports, left = Reports(), list[str]()
    reports.watch(left.append)
    connection = reports.connection("r")
    say(connection, None, FIRST)
    connection.end()
    connection.end()
    assert not reports.hears("r")
    assert newest(reports) is None
    assert left == ["r"]


def test_a_new_connection_begins_anew_and_the_end_of_the_old_one_means_nothing() -> None:
    reports, left = Reports(), list[str]()
    reports.watch(left.append)
    old = reports.connection("r")
    say(old, None, FIRST)
    new = reports.connection("r")
    say(new, None, SECOND)
    old.end()
    assert newest(reports) == SECOND
    assert left == []


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


async def test_one_that_breaks_in_another_thread_is_asked_for_again(fleet: Fleet) -> None:
    ReplicaAttachment(fleet.reports, fleet.ask).update(members("a"))
    await until_asked(fleet, 1)
    await asyncio.to_thread(fleet.connections["a"].end)
    await until_asked(fleet, 2)


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

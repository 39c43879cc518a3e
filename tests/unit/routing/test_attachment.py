"""Replicas are asked until they are attached, and again when they are not any more."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.channel.address import Address
from serve_app.routing import attachment
from serve_app.routing.attachment import ReplicaAttachment
from serve_app.routing.reports import ReplicaConnection, Reports
from tests.unit.channel.harness import settle

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
    monkeypatch.setattr(attachment, "_AGAIN_S", 0.0)
    monkeypatch.setattr(attachment, "_ANSWER_S", 0.0)


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
    monkeypatch.setattr(attachment, "_ANSWER_S", 30.0)
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

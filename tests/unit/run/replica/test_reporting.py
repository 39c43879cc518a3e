"""What ingresses hear of a replica, over real channels and a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from serve_app.base.errors import ChannelBrokenError
from serve_app.channel import sender
from serve_app.channel.blocks import chain, request_key
from serve_app.channel.listener import Listener
from serve_app.channel.protocol import Address
from serve_app.channel.routing_reports import Reports
from serve_app.channel.score import Report
from serve_app.channel.sender import Channels
from serve_app.engine import Engine
from serve_app.run.replica import reporting
from serve_app.run.replica.reporting import Reporting
from tests.doubles.backend import FakeBackend
from tests.unit.channel.harness import ELSEWHERE, HERE, PATIENCE_S, delta, settle
from tests.unit.engine.harness import ask, endless, options, request, running

PROMPT = "a" * 64


@pytest.fixture
def engine() -> Any:
    with running(FakeBackend(endless, n_slots=2), replace(options(2), n_ctx_slot=256)) as one:
        yield one


@asynccontextmanager
async def ingress() -> AsyncIterator[tuple[Reports, Address]]:
    reports = Reports()
    listener = Listener(HERE, "127.0.0.1", reports.connection)
    try:
        yield reports, await listener.address()
    finally:
        listener.close()
        await settle()


def replica(engine: Engine, node: str = HERE) -> tuple[Reporting, Channels]:
    channels = Channels(node, "r")
    return Reporting(engine, channels), channels


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def said(reports: Reports) -> Report:
    heard = reports.newest("r")
    return Report() if heard is None else heard[0]


def holds(reports: Reports, request_id: str) -> bool:
    return request_key(request_id) in said(reports).requests


@pytest.mark.parametrize("node", [HERE, ELSEWHERE])
async def test_one_that_attaches_says_all_that_it_holds(engine: Engine, node: str) -> None:
    ask(engine, request("1", PROMPT))
    async with ingress() as (reports, address):
        told, channels = replica(engine, node)
        await told.attach(address)
        await until(lambda: holds(reports, "1"))
        assert set(chain(PROMPT.encode(), "")) <= said(reports).blocks
        assert said(reports).n_slots == 2
        channels.close()


async def test_then_it_says_all_when_something_is_new(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[bytes]()

    def report(self: sender.Channel, body: bytes) -> bool:
        sent.append(body)
        return whole(self, body)

    whole = sender.Channel.report
    monkeypatch.setattr(sender.Channel, "report", report)
    async with ingress() as (reports, address):
        told, channels = replica(engine)
        await told.attach(address)
        told.tell()
        await told.attach(address)
        assert len(sent) == 1
        ask(engine, request("1", PROMPT))
        told.tell()
        await until(lambda: holds(reports, "1"))
        assert set(chain(PROMPT.encode(), "")) <= said(reports).blocks
        ask(engine, request("2", PROMPT))
        told.tell()
        await until(lambda: holds(reports, "2"))
        assert len(sent) == 3
        channels.close()


async def test_after_a_break_it_says_everything_again(engine: Engine) -> None:
    ask(engine, request("1", PROMPT))
    async with ingress() as (reports, address):
        told, channels = replica(engine)
        await told.attach(address)
        await until(lambda: holds(reports, "1"))
        channels.close()
        await until(lambda: not reports.hears("r"))
        told.tell()
        await told.attach(address)
        await until(lambda: holds(reports, "1"))
        assert set(chain(PROMPT.encode(), "")) <= said(reports).blocks
        channels.close()


async def test_whoever_opens_a_channel_is_told(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request opens it, before anybody has asked for reports."""
    monkeypatch.setattr(reporting, "_EVERY_S", 0.0)
    ask(engine, request("1", PROMPT))
    async with ingress() as (one, first), ingress() as (other, second):
        told, channels = replica(engine)
        telling = asyncio.create_task(told.run())
        await channels.to(first)
        await channels.to(second)
        await until(lambda: holds(one, "1") and holds(other, "1"))
        telling.cancel()
        channels.close()


async def test_a_report_that_cannot_be_made_is_not_the_last(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_EVERY_S", 0.0)
    async with ingress() as (reports, address):
        told, channels = replica(engine)
        await told.attach(address)
        failures = iter([RuntimeError("once")])

        def stats() -> object:
            for failure in failures:
                raise failure
            return whole()

        whole = engine.stats
        monkeypatch.setattr(engine, "stats", stats)
        telling = asyncio.create_task(told.run())
        await until(lambda: next(failures, None) is None)
        await asyncio.to_thread(ask, engine, request("1", PROMPT))
        await until(lambda: holds(reports, "1"))
        telling.cancel()
        channels.close()


async def test_an_ingress_that_is_gone_is_no_error_of_the_engine(engine: Engine) -> None:
    async with ingress() as (_, address):
        pass
    told, _ = replica(engine)
    with pytest.raises(ChannelBrokenError):
        await told.attach(address)
    told.tell()


async def test_one_that_does_not_read_is_passed_over_and_hears_the_newest_later(
    engine: Engine,
) -> None:
    async with ingress() as (reports, address):
        told, channels = replica(engine)
        await told.attach(address)
        await until(lambda: reports.newest("r") is not None)
        (channel,) = channels.open
        while not channel._is_blocked:  # the ingress is in this loop, and so does not read yet
            channel.push(0, delta("x" * 10_000))
            channel.flush()
        before = said(reports)
        for i in range(3):
            ask(engine, request(f"{i}", f"{i}" * 64))
            told.tell()
        assert channel._report is None
        await until(lambda: not channel._is_blocked)
        assert said(reports) == before
        told.tell()
        await until(lambda: holds(reports, "2"))
        assert all(holds(reports, f"{i}") for i in range(3))
        channels.close()

"""Looks that are shared by all who ask."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from serve_app.server.shared_looks import SharedLooks
from tests.unit.channel.harness import settle

CLIENT = contextvars.ContextVar("CLIENT", default="nobody")


class Looks:
    """Looks that end when a test lets them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.clients: list[str] = []
        self.may_end = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self, question: str) -> int:
        self.begun.append(question)
        self.clients.append(CLIENT.get())
        number = len(self.begun)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return number


@pytest.fixture
async def looks() -> Looks:
    return Looks()


async def test_who_asks_during_a_look_shares_the_next(looks: Looks) -> None:
    shared = SharedLooks(looks, every_s=0)
    first = asyncio.create_task(shared.ask())
    await settle()
    others = [asyncio.create_task(shared.ask()) for _ in range(50)]
    await settle()
    assert looks.begun == [""]
    looks.may_end.set()
    assert await first == 1
    assert await asyncio.gather(*others) == [2] * 50
    assert len(looks.begun) == 2


async def test_other_questions_are_not_waited_for(looks: Looks) -> None:
    shared = SharedLooks(looks, every_s=0)
    asking = [asyncio.create_task(shared.ask(question)) for question in ("a", "b")]
    await settle()
    assert looks.begun == ["a", "b"]
    looks.may_end.set()
    assert await asyncio.gather(*asking) == [1, 2]
    await settle()
    assert not shared._looking
    assert not shared._next


async def test_the_same_is_not_asked_again_at_once(looks: Looks) -> None:
    shared = SharedLooks(looks, every_s=3600)
    looks.may_end.set()
    assert await shared.ask() == 1
    again = asyncio.create_task(shared.ask())
    await settle()
    assert not again.done()
    assert looks.begun == [""]
    again.cancel()
    shared._looking[""].cancel()


async def test_an_asker_that_leaves_takes_nobody_along(looks: Looks) -> None:
    """Serve cancels what was called in the context of a request whose client has left."""
    shared = SharedLooks(looks, every_s=0)
    CLIENT.set("ana")
    first, second = (asyncio.create_task(shared.ask()) for _ in range(2))
    await settle()
    first.cancel()
    looks.may_end.set()
    assert await second == 1
    assert first.cancelled()
    assert looks.clients == ["nobody"]


async def test_all_are_told_what_went_wrong(looks: Looks) -> None:
    shared = SharedLooks(looks, every_s=0)
    looks.failure = failure = KeyError("Nobody knows.")
    looks.may_end.set()
    found: list[object] = []
    found += await asyncio.gather(shared.ask(), shared.ask(), return_exceptions=True)
    assert found == [failure] * 2
    looks.failure = None
    assert await shared.ask() == 2

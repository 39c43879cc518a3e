"""Places are taken in turns by client."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.server.workers.fair_semaphore import FairSemaphore


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def waits(semaphore: FairSemaphore, client: str, entered: list[str]) -> asyncio.Task[None]:
    async def wait() -> None:
        await semaphore.enter(client)
        entered.append(client)

    return asyncio.create_task(wait())


async def test_those_who_wait_enter_in_turns_by_client() -> None:
    semaphore, entered = FairSemaphore(1), list[str]()
    await semaphore.enter("first")
    for client in ["a", "a", "a", "b", "c", "b"]:
        waits(semaphore, client, entered)
    await settled()
    assert entered == []
    assert (semaphore.n_waiting("a"), semaphore.n_tasks) == (3, 7)
    for client in ["first", "a", "b", "c", "a", "b"]:
        semaphore.leave(client)
        await settled()
    assert entered == ["a", "b", "c", "a", "b", "a"]


async def test_no_more_are_inside_than_there_are_places() -> None:
    semaphore, entered = FairSemaphore(2), list[str]()
    for client in "abc":
        waits(semaphore, client, entered)
    await settled()
    assert entered == ["a", "b"]
    assert not semaphore.try_enter("x")
    semaphore.leave("a")
    await settled()
    assert entered == ["a", "b", "c"]
    semaphore.leave("b")
    assert semaphore.try_enter("x")


async def test_who_is_cancelled_takes_no_place() -> None:
    semaphore, entered = FairSemaphore(1), list[str]()
    await semaphore.enter("first")
    waiting = waits(semaphore, "a", entered)
    await settled()
    waiting.cancel()
    await settled()
    semaphore.leave("first")
    assert semaphore.try_enter("x")


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_the_place_on() -> None:
    semaphore, entered = FairSemaphore(1), list[str]()
    await semaphore.enter("first")
    waiting = waits(semaphore, "a", entered)
    waits(semaphore, "b", entered)
    await settled()
    semaphore.leave("first")
    waiting.cancel()
    await settled()
    assert entered == ["b"]


async def test_a_block_that_fails_leaves_its_place() -> None:
    semaphore = FairSemaphore(1)
    with pytest.raises(ValueError, match="broken"):
        async with semaphore.place("a"):
            raise ValueError("broken")
    assert semaphore.try_enter("x")


async def test_who_is_cancelled_waits_no_more_and_costs_its_client_no_turn() -> None:
    semaphore, entered = FairSemaphore(1), list[str]()
    await semaphore.enter("first")
    leaving = [waits(semaphore, "a", entered) for _ in range(2)]
    for client in ["a", "b"]:
        waits(semaphore, client, entered)
    await settled()
    for task in leaving:
        task.cancel()
    await settled()
    assert semaphore.n_waiting("a") == 1
    semaphore.leave("first")
    await settled()
    assert entered == ["a"]


async def test_a_client_has_no_more_places_than_each_may_have() -> None:
    semaphore, entered = FairSemaphore(2, most_each=1), list[str]()
    for client in ["a", "a", "a", "b"]:
        waits(semaphore, client, entered)
    await settled()
    assert entered == ["a", "b"]
    semaphore.leave("b")
    await settled()
    assert entered == ["a", "b"]  # a place is free, and not for the one that waits
    assert semaphore.try_enter("c")
    semaphore.leave("a")
    await settled()
    assert entered == ["a", "b", "a"]

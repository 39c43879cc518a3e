"""Places are taken in turns by client."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.ingress.workers.places import Places


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def waits(places: Places, client: str, entered: list[str]) -> asyncio.Task[None]:
    async def wait() -> None:
        await places.enter(client)
        entered.append(client)

    return asyncio.create_task(wait())


async def test_those_who_wait_enter_in_turns_by_client() -> None:
    places, entered = Places(1), list[str]()
    await places.enter("first")
    for client in ["a", "a", "a", "b", "c", "b"]:
        waits(places, client, entered)
    await settled()
    assert entered == []
    assert places.n_waiting("a") == 3
    for client in ["first", "a", "b", "c", "a", "b"]:
        places.leave(client)
        await settled()
    assert entered == ["a", "b", "c", "a", "b", "a"]


async def test_no_more_are_inside_than_there_are_places() -> None:
    places, entered = Places(2), list[str]()
    for client in "abc":
        waits(places, client, entered)
    await settled()
    assert entered == ["a", "b"]
    assert not places.try_enter("x")
    places.leave("a")
    await settled()
    assert entered == ["a", "b", "c"]
    places.leave("b")
    assert places.try_enter("x")


async def test_who_is_cancelled_takes_no_place() -> None:
    places, entered = Places(1), list[str]()
    await places.enter("first")
    waiting = waits(places, "a", entered)
    await settled()
    waiting.cancel()
    await settled()
    places.leave("first")
    assert places.try_enter("x")


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_the_place_on() -> None:
    places, entered = Places(1), list[str]()
    await places.enter("first")
    waiting = waits(places, "a", entered)
    waits(places, "b", entered)
    await settled()
    places.leave("first")
    waiting.cancel()
    await settled()
    assert entered == ["b"]


async def test_a_block_that_fails_leaves_its_place() -> None:
    places = Places(1)
    with pytest.raises(ValueError, match="broken"):
        async with places.entered("a"):
            raise ValueError("broken")
    assert places.try_enter("x")


async def test_who_is_cancelled_waits_no_more_and_costs_its_client_no_turn() -> None:
    places, entered = Places(1), list[str]()
    await places.enter("first")
    leaving = [waits(places, "a", entered) for _ in range(2)]
    for client in ["a", "b"]:
        waits(places, client, entered)
    await settled()
    for task in leaving:
        task.cancel()
    await settled()
    assert places.n_waiting("a") == 1
    places.leave("first")
    await settled()
    assert entered == ["a"]


async def test_a_client_has_no_more_places_than_each_may_have() -> None:
    places, entered = Places(2, most_each=1), list[str]()
    for client in ["a", "a", "a", "b"]:
        waits(places, client, entered)
    await settled()
    assert entered == ["a", "b"]
    places.leave("b")
    await settled()
    assert entered == ["a", "b"]  # a place is free, and not for the one that waits
    assert places.try_enter("c")
    places.leave("a")
    await settled()
    assert entered == ["a", "b", "a"]

"""What is kept of responses, for whom, how long and how much."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from serve_app.errors import EngineFailedError, KeyLimitError, RateLimitError
from serve_app.ingress.responses.store import (
    ABANDONED_S,
    LEASE_S,
    AppendResult,
    Bounds,
    Event,
    LogAppend,
    Owner,
    Store,
    StoredResponse,
    packed,
    unpacked,
)
from serve_app.types import TokenDelta

BOUNDS = Bounds(kept_s=100, max_each=3, max_bytes_each=1000, max_bytes=2500)
ANN, BOB = Owner("ann", "ann"), Owner("bob", "bob")
CANCELLED = Event(1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(BOUNDS, clock)


def said(text: str) -> Event:
    return Event(1.0, TokenDelta(text, (ord(text),)))


def append(response_id: str, *entries: Event, first: int = 0, turn: int = 0) -> LogAppend:
    """Each entry is a chunk of its own."""
    ended = bool(entries) and entries[-1].is_last
    chunks = [chunk for entry in entries for chunk in packed([entry])]
    return LogAppend(response_id, turn, first, chunks, ended)


def entries(stored: StoredResponse) -> list[Event]:
    return [entry for chunk in stored.chunks for entry in unpacked(chunk)]


async def put(store: Store, response_id: str, owner: Owner, n_bytes: int = 10) -> None:
    """A response that is complete and takes so much."""
    await store.put(owner, b"r" * n_bytes, LogAppend(response_id, 0, 0, (), True))


async def kept(store: Store, owner: Owner, *response_ids: str) -> list[str]:
    """Which of these are."""
    return [one for one in response_ids if await store.find(one, owner.key) is not None]


async def test_a_log_is_read_from_any_place(store: Store) -> None:
    await store.put(ANN, b"request", append("a"))
    assert await store.append([append("a", said("x"), said("y"))]) == [AppendResult.GO_ON]
    assert await store.append([append("a", said("z"), CANCELLED, first=2)]) == [AppendResult.GO_ON]
    for since, expected in ((0, "xyz"), (1, "yz"), (2, "z"), (3, "")):
        found = await store.find("a", "ann", since)
        assert found is not None
        assert (found.stored_request, found.has_ended) == (b"request", True)
        assert len(entries(found)) == 4 - since
        texts = [e.delta.text for e in entries(found) if e.delta is not None]
        assert "".join(texts) == expected


async def test_entries_that_are_known_are_not_added_again(store: Store) -> None:
    await store.put(ANN, b"", append("a"))
    for _ in range(2):
        assert await store.append([append("a", said("x"))]) == [AppendResult.GO_ON]
    found = await store.find("a", "ann")
    assert found is not None
    assert entries(found) == [said("x")]


async def test_only_the_owner_finds_ends_and_forgets_it(store: Store) -> None:
    await store.put(ANN, b"", append("a"))
    for key in ("bob", None):
        assert await store.find("a", key) is None
        assert await store.delete("a", key) is False
        await store.cancel("a", key)
    assert await store.append([append("a")]) == [AppendResult.GO_ON]
    await store.cancel("a", "ann")
    assert await store.append([append("a")]) == [AppendResult.CANCEL]
    assert await store.delete("a", "ann") is True
    assert await store.append([append("a")]) == [AppendResult.LEAVE]
    assert await store.find("a", "ann") is None


async def test_who_waits_is_told_what_comes(store: Store) -> None:
    await store.put(ANN, b"", append("a"))
    waiting = asyncio.create_task(store.find("a", "ann", 0, 60.0))
    await asyncio.sleep(0)
    await store.append([append("a", said("x"))])
    found = await waiting
    assert found is not None
    assert entries(found) == [said("x")]
    found = await store.find("a", "ann", 1, 0.001)
    assert found is not None
    assert entries(found) == []
    waiting = asyncio.create_task(store.find("a", "ann", 1, 60.0))
    await asyncio.sleep(0)
    await store.delete("a", "ann")
    assert await waiting is None


async def test_what_is_complete_is_forgotten_after_some_time(store: Store, clock: Clock) -> None:
    await put(store, "a", ANN)
    await store.put(ANN, b"", append("b"))
    clock.now += BOUNDS.kept_s
    assert await kept(store, ANN, "a", "b") == ["b"]
    await store.append([append("b", CANCELLED)])
    clock.now += BOUNDS.kept_s - 1
    assert await kept(store, ANN, "b") == ["b"]
    clock.now += 1
    assert len(store) == 0


async def test_a_client_with_too_many_loses_its_own_oldest(store: Store) -> None:
    await put(store, "b0", BOB)
    for number in range(5):
        await put(store, f"a{number}", ANN)
    assert await kept(store, ANN, *(f"a{number}" for number in range(5))) == ["a2", "a3", "a4"]
    assert await kept(store, BOB, "b0") == ["b0"]
    await put(store, "a5", ANN, 990)
    assert await kept(store, ANN, "a2", "a3", "a4", "a5") == ["a4", "a5"]


async def test_where_all_take_too_much_who_has_most_gives_way(clock: Clock) -> None:
    store = Store(dataclasses.replace(BOUNDS, max_bytes=1500), clock)
    await put(store, "b0", BOB, 300)
    for number in range(3):
        await put(store, f"a{number}", ANN, 300)
    for number in range(6):
        await put(store, f"c{number}", Owner(f"c{number}", f"c{number}"), 50)
    await put(store, "b1", BOB, 100)
    assert await kept(store, BOB, "b0", "b1") == ["b0", "b1"]
    assert await kept(store, ANN, "a0", "a1", "a2") == ["a1", "a2"]


async def test_what_is_being_made_is_not_forgotten_but_bounded(store: Store) -> None:
    for number in range(3):
        await store.put(ANN, b"", append(f"a{number}"))
    with pytest.raises(RateLimitError):
        await store.put(ANN, b"", append("a3"))
    await store.put(BOB, b"", append("b0"))
    await put(store, "a4", ANN)
    assert await kept(store, ANN, "a0", "a1", "a2", "a4") == ["a0", "a1", "a2"]
    with pytest.raises(KeyLimitError):
        await put(store, "b1", BOB, 1001)


async def test_another_ingress_goes_on_when_one_is_silent(store: Store, clock: Clock) -> None:
    await store.put(ANN, b"request", append("a"))
    await store.append([append("a", said("x"))])
    assert await store.adopt() is None
    clock.now += LEASE_S
    found = await store.adopt()
    assert found is not None
    assert (found.stored_request, entries(found), found.turn) == (b"request", [said("x")], 1)
    assert found.owner == ANN
    assert await store.adopt() is None, "there can be one only"
    later = [append("a", said("?"), first=1), append("a", said("y"), first=1, turn=1)]
    assert await store.append(later) == [AppendResult.LEAVE, AppendResult.GO_ON]
    found = await store.find("a", "ann")
    assert found is not None
    assert entries(found) == [said("x"), said("y")]


async def test_what_nobody_goes_on_with_has_failed(store: Store, clock: Clock) -> None:
    await store.put(ANN, b"", append("a"))
    clock.now += ABANDONED_S
    assert await store.adopt() is None
    found = await store.find("a", "ann")
    assert found is not None
    (entry,) = entries(found)
    assert isinstance(entry.error, EngineFailedError)

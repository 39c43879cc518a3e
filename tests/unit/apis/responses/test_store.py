"""What is kept of responses, for whom, how long and how much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from serve_app.apis.responses import store as module
from serve_app.apis.responses.store import (
    LEASE_S,
    Event,
    LogAppend,
    Owner,
    Store,
    StoredResponse,
    item_prefix,
    pack_events,
    unpack_events,
)
from serve_app.base.errors import EngineFailedError, KeyLimitError, RateLimitError
from serve_app.base.values.answers import TokenDelta

KEPT_S = 100.0
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
def store(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A small one."""
    for name, bound in (("MAX_EACH", 3), ("MAX_BYTES_EACH", 1000), ("MAX_BYTES", 2500)):
        monkeypatch.setattr(module, name, bound)
    return Store(clock)


def said(text: str) -> Event:
    return Event(1.0, TokenDelta(text, (ord(text),)))


def append(response_id: str, *entries: Event, first: int = 0) -> LogAppend:
    """Each entry is a chunk of its own."""
    ended = bool(entries) and entries[-1].is_last
    chunks = [chunk for entry in entries for chunk in pack_events([entry])]
    return LogAppend(response_id, first, chunks, ended)


def entries(stored: StoredResponse) -> list[Event]:
    return [entry for chunk in stored.chunks for entry in unpack_events(chunk)]


async def put(
    store: Store, response_id: str, owner: Owner, n_bytes: int = 10, items: Sequence[str] = ()
) -> None:
    """A response that is complete and takes so much, and an item's place for each item."""
    log = LogAppend(response_id, 0, (), True)
    await store.put(owner, response_id[:1].encode() * n_bytes, log, KEPT_S, items)


async def begin(store: Store, response_id: str, owner: Owner = ANN) -> None:
    """A response that is being made."""
    await store.put(owner, b"request", append(response_id), KEPT_S)


async def kept(store: Store, owner: Owner, *response_ids: str) -> list[str]:
    """Which of these are."""
    return [one for one in response_ids if await store.find(one, owner.key) is not None]


async def test_a_log_is_read_from_any_place(store: Store) -> None:
    await begin(store, "a")
    assert await store.append([append("a", said("x"), said("y"))]) == [True]
    assert await store.append([append("a", said("z"), CANCELLED, first=2)]) == [True]
    for since, expected in ((0, "xyz"), (1, "yz"), (2, "z"), (3, "")):
        found = await store.find("a", "ann", since)
        assert found is not None
        assert (found.stored_request, found.has_ended) == (b"request", True)
        assert len(entries(found)) == 4 - since
        texts = [e.delta.text for e in entries(found) if e.delta is not None]
        assert "".join(texts) == expected


async def test_entries_that_are_known_are_not_added_again(store: Store) -> None:
    await begin(store, "a")
    for _ in range(2):
        assert await store.append([append("a", said("x"))]) == [True]
    found = await store.find("a", "ann")
    assert found is not None
    assert entries(found) == [said("x")]


async def test_only_the_owner_finds_ends_and_forgets_it(store: Store) -> None:
    await begin(store, "a")
    for key in ("bob", None):
        assert await store.find("a", key) is None
        assert await store.delete("a", key) is False
        await store.cancel("a", key)
    assert await store.append([append("a")]) == [True]
    await store.cancel("a", "ann")
    found = await store.find("a", "ann")
    assert found is not None
    assert found.has_ended
    assert [(entry.delta, entry.error) for entry in entries(found)] == [(None, None)]
    assert await store.append([append("a", said("x"))]) == [False]
    assert await store.delete("a", "ann") is True
    assert await store.append([append("a")]) == [False]
    assert await store.find("a", "ann") is None


async def test_who_waits_is_told_what_comes(store: Store) -> None:
    await begin(store, "a")
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
    await begin(store, "b")
    clock.now += KEPT_S
    assert await kept(store, ANN, "a", "b") == ["b"]
    await store.append([append("b", CANCELLED)])
    clock.now += KEPT_S - 1
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


async def names(store: Store, owner: Owner, *item_ids: str) -> list[str]:
    """The responses that have these items."""
    found = await store.find_items(item_ids, owner.key)
    return [one.stored_request[:1].decode() for one in found]


async def test_items_are_found_in_the_newest_responses(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ITEM_BYTES", 20)
    own = f"msg_{item_prefix('a')}00000001"
    await put(store, "a", ANN, items=["i"])
    await put(store, "b", ANN, items=["i", own, "j"])
    await put(store, "c", BOB, items=["i"])
    assert await names(store, ANN, "i", own) == ["b"]
    assert await names(store, ANN, "j", "i") == ["b"]
    assert await names(store, BOB, "i") == ["c"]
    for owner, item_id in ((BOB, "j"), (BOB, own), (ANN, "k"), (Owner(None, "x"), "i")):
        assert await names(store, owner, "i", item_id) == []
    assert await names(store, ANN, "k", "i") == ["b"]
    await store.delete("b", "ann")
    assert await names(store, ANN, "i", own) == ["a"]
    assert await names(store, ANN, "j") == []
    for owner, name in ((ANN, "a"), (BOB, "c")):
        await store.delete(name, owner.key)
    assert store._by_item == {}
    assert store._bytes == {}


async def test_items_take_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ITEM_BYTES", 100)
    await put(store, "a", ANN, items=["i"] * 2)
    await put(store, "b", ANN, 500, items=["j"] * 4)
    assert await kept(store, ANN, "a", "b") == ["b"]
    assert await names(store, ANN, "i") == []
    with pytest.raises(KeyLimitError):
        await put(store, "c", ANN, items=["k"] * 10)


async def test_items_of_too_much_together_are_refused(store: Store) -> None:
    """Without keys, the responses of all addresses can be named."""
    for name in "abc":
        await put(store, name, Owner(None, name), 400 - module.ITEM_BYTES, items=[name])
    stranger = Owner(None, "x")
    assert await names(store, stranger, "a", "b") == ["b", "a"]
    with pytest.raises(KeyLimitError):
        await names(store, stranger, "a", "b", "c")


async def test_where_all_take_too_much_who_has_most_gives_way(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1500)
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
        await begin(store, f"a{number}")
    with pytest.raises(RateLimitError):
        await begin(store, "a3")
    await begin(store, "b0", BOB)
    await put(store, "a4", ANN)
    assert await kept(store, ANN, "a0", "a1", "a2", "a4") == ["a0", "a1", "a2"]
    with pytest.raises(KeyLimitError):
        await put(store, "b1", BOB, 1001)


async def test_what_its_ingress_is_silent_about_has_failed(store: Store, clock: Clock) -> None:
    await begin(store, "a")
    await begin(store, "b")
    await store.append([append("a", said("x"))])
    clock.now += LEASE_S - 1
    assert await store.append([append("b")]) == [True]
    clock.now += 1
    waiting = await store.find("a", "ann", 1, 60.0)
    assert waiting is not None
    assert waiting.has_ended
    (entry,) = entries(waiting)
    assert isinstance(entry.error, EngineFailedError)
    assert await store.append([append("a", said("y"), first=1), append("b")]) == [False, True]
    clock.now += KEPT_S - 1
    assert await kept(store, ANN, "a") == ["a"]
    clock.now += 1
    assert await kept(store, ANN, "a") == []


async def test_a_response_that_comes_twice_is_kept_once(store: Store) -> None:
    """Its first way may have been slow, and not in vain."""
    await begin(store, "a")
    await store.append([append("a", said("x"))])
    await begin(store, "a")
    found = await store.find("a", "ann")
    assert found is not None
    assert entries(found) == [said("x")]
    assert store._bytes == {"ann": len(b"request") + len(pack_events([said("x")])[0])}

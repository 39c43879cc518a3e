"""Prefixes that lost their slot."""

from __future__ import annotations

from unittest import mock

import pytest

from serve_app.base.errors import DecodeCancelledError
from serve_app.base.formats import State
from serve_app.engine import DecodeError, Engine
from serve_app.engine.cache.memory_tier import MemoryTier
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import ask, continuation, endless, options, request, running, until


def tokens(text: str) -> list[int]:
    return list(text.encode())


def store(budget: int, *texts: str) -> MemoryTier:
    """Each text's state has ten bytes a letter."""
    made = MemoryTier(budget)
    for text in texts:
        made.put("", tokens(text), bytes(10 * len(text)))
    return made


@pytest.mark.parametrize(
    ("texts", "prompt", "n_shared", "found"),
    [
        ([], "abc", 0, None),
        (["xyz"], "abc", 0, None),
        (["ab", "abcd", "abx"], "abcde", 4, "abcd"),
        (["abcd"], "abcd", 3, "abcd"),
        (["abcdef"], "abcxyz", 3, "abcdef"),
        (["a"], "a", 0, None),
    ],
)
def test_longest(texts: list[str], prompt: str, n_shared: int, found: str | None) -> None:
    n, prefix = store(1000, *texts).longest("", tokens(prompt))
    assert n == n_shared
    assert (list(prefix.tokens) if prefix else None) == (tokens(found) if found else None)


def test_the_least_recently_used_make_room() -> None:
    made = store(100, "aaaa", "bbbb")
    _, prefix = made.longest("", tokens("aaaa!"))
    assert prefix is not None
    made.used(prefix)
    made.put("", tokens("cccc"), bytes(40))
    assert made.n_bytes == 80
    assert [made.longest("", tokens(f"{letter * 4}!"))[0] for letter in "abc"] == [4, 0, 4]


def test_a_longer_prefix_takes_the_shorter_ones_place() -> None:
    made = store(1000, "ab", "abcd", "abx")
    assert len(made) == 2
    assert made.n_bytes == 70


@pytest.mark.parametrize(
    ("text", "n_bytes", "expected"),
    [
        ("abcd", 40, False),
        ("ab", 20, False),
        ("abcde", 50, True),
        ("x", 101, False),
        ("x", 100, True),
    ],
)
def test_wants(text: str, n_bytes: int, expected: bool) -> None:
    assert store(100, "abcd").wants("", tokens(text), n_bytes) is expected


@pytest.mark.parametrize(("group", "n_found"), [("mine", 4), ("theirs", 2), ("", 0)])
def test_each_cache_group_finds_its_own(group: str, n_found: int) -> None:
    made = MemoryTier(1000)
    made.put("mine", tokens("abcd"), bytes(40))
    made.put("theirs", tokens("ab"), bytes(20))
    n, prefix = made.longest(group, tokens("abcde"))
    assert n == n_found
    assert (prefix.group if prefix else "") == group
    assert made.wants(group, tokens("abcd"), 40) is (n_found < 4)


def test_a_longer_prefix_takes_no_other_cache_groups_place() -> None:
    made = MemoryTier(1000)
    made.put("mine", tokens("ab"), bytes(20))
    made.put("theirs", tokens("abcd"), bytes(40))
    made.put("mine", tokens("abc"), bytes(30))
    assert [(one.group, bytes(list(one.tokens))) for one in reversed(list(made))] == [
        ("mine", b"abc"),
        ("theirs", b"abcd"),
    ]


# -- in the engine: one slot, several chats -------------------------------------------------------

CHATS = {name: f"{name} tells a story that is long enough to be worth keeping. " for name in "ABC"}


def talk(engine: Engine, name: str, said: str) -> int:
    """Have a turn; returns the tokens that were found."""
    prompt = CHATS[name] + said
    inbox = ask(engine, request(name, prompt, max_tokens=3))
    assert inbox.token_ids == continuation(prompt.encode(), 3)
    return inbox.end.usage.cached_tokens


def test_a_chat_that_lost_its_slot_gets_its_prefix_back() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, options(1, n_ctx_slot=256, cache_ram_bytes=10_000)) as engine:
        assert [talk(engine, name, "1") for name in "ABC"] == [0, 0, 0]
        found = [talk(engine, name, "2") for name in "ABC"]
        stats = engine.stats()
    assert found == [len(CHATS[name]) for name in "ABC"]
    assert stats.tokens.restored_tokens == sum(found)
    assert stats.tokens.cached_tokens == sum(found)
    # What each chat said at first, and what A and B said when they came back; C has the slot.
    assert stats.cache.stored_prefixes == 5
    assert stats.cache.stored_bytes == 4 * 5 * (len(CHATS["A"]) + 3)


def test_a_small_budget_keeps_the_last_ones() -> None:
    backend = FakeBackend(endless, n_slots=1)
    room = 4 * 70  # one of them
    with running(backend, options(1, n_ctx_slot=256, cache_ram_bytes=room)) as engine:
        for name in "ABC":
            talk(engine, name, "1")
        assert talk(engine, "A", "2") == 0
        assert talk(engine, "C", "2") == len(CHATS["C"])
        assert engine.stats().cache.stored_bytes <= room


@pytest.mark.parametrize(
    ("room", "n_ahead", "n_saves"), [(10_000, 2, 3), (4 * 70, 1, 1), (0, 0, 0)]
)
def test_what_idle_slots_hold_is_stored_while_nobody_is_there(
    room: int, n_ahead: int, n_saves: int
) -> None:
    """Without another prefix giving way; and then a stranger does not wait for it."""
    backend = FakeBackend(endless, n_slots=2)
    saves = mock.Mock(side_effect=backend.save)
    with (
        mock.patch.object(backend, "save", saves),
        mock.patch("serve_app.engine.core.loop._REST_S", 0.0),
        running(backend, options(2, n_ctx_slot=256, cache_ram_bytes=room)) as engine,
    ):
        for name in "AB":
            talk(engine, name, "1")
        until(lambda: engine.stats().cache.stored_prefixes == n_ahead)
        talk(engine, "C", "1")
        until(lambda: engine.stats().cache.stored_prefixes == n_saves)
    assert saves.call_count == n_saves


def test_who_comes_does_not_wait_for_a_save_that_nobody_asked_for() -> None:
    """It would never end, as it is held. It is made when nobody is there again."""

    class Holding(FakeBackend):
        n_left = 0

        def save(self, seq_id: int, *, cancellable: bool = False) -> bytes:
            if cancellable and not self.n_left:
                self.hold()
            try:
                return super().save(seq_id, cancellable=cancellable)
            except DecodeCancelledError:
                self.n_left += 1
                raise
            finally:
                self.resume()

    backend = Holding(endless, n_slots=2)
    with (
        mock.patch("serve_app.engine.core.loop._REST_S", 0.0),
        running(backend, options(2, n_ctx_slot=256, cache_ram_bytes=10_000)) as engine,
    ):
        talk(engine, "A", "1")
        until(lambda: backend.n_waiting == 1)
        talk(engine, "B", "1")
        until(lambda: engine.stats().cache.stored_prefixes == 2)
    assert backend.n_left == 1


def test_without_a_budget_nothing_is_kept() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, options(1, n_ctx_slot=256)) as engine:
        assert [talk(engine, name, said) for said in "12" for name in "AB"] == [0, 0, 0, 0]
        assert engine.stats().cache.stored_prefixes == 0


def test_what_another_slot_holds_is_not_stored() -> None:
    backend = FakeBackend(endless, n_slots=2)
    with running(backend, options(2, n_ctx_slot=256, cache_ram_bytes=10_000)) as engine:
        talk(engine, "A", "1")
        talk(engine, "B", "1")
        talk(engine, "B", "1 and more")  # in place: nothing is lost
        assert engine.stats().cache.stored_prefixes == 0


def test_a_state_that_is_refused_costs_a_prefill_and_nothing_else() -> None:
    class Forgetful(FakeBackend):
        def restore(self, seq_id: int, state: State) -> None:
            self.slots[seq_id] = [1, 2, 3]
            raise DecodeError("not mine")

    backend = Forgetful(endless, n_slots=1)
    with running(backend, options(1, n_ctx_slot=256, cache_ram_bytes=10_000)) as engine:
        talk(engine, "A", "1")
        talk(engine, "B", "1")
        assert talk(engine, "A", "2") == 0
        assert engine.stats().tokens.restored_tokens == 0

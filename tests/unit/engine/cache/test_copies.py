"""Streams do not wait too long for what is saved and restored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest

from serve_app.base.formats import State
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.cache.manager import KVCacheManager, Place
from serve_app.engine.cache.memory_tier import MemoryTier
from serve_app.engine.cache.packing import pack, token_array
from serve_app.engine.cache.slots import SlotTable
from serve_app.engine.core.sequence import Sequence, SequenceState
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.copy_budget import CopyBudget, CopySpeed
from tests.doubles.backend import FakeBackend

BYTE_S = 0.001
"""Simulated: 4 ms for a token's state."""


class Clock:
    """Goes on when somebody says so."""

    now = 0.0

    def monotonic(self) -> float:
        """Like time.monotonic."""
        return self.now


class SlowBackend(FakeBackend):
    """Copies take simulated time."""

    def __init__(self, n_slots: int, clock: Clock) -> None:
        super().__init__(lambda tokens: 1, n_slots=n_slots)
        self.clock = clock

    def save(self, seq_id: int, *, cancellable: bool = False) -> bytes:
        state = super().save(seq_id, cancellable=cancellable)
        self.clock.now += BYTE_S * len(state)
        return state

    def restore(self, seq_id: int, state: State) -> None:
        self.clock.now += BYTE_S * len(state)
        super().restore(seq_id, state)


class Cache(KVCacheManager):
    """With slots, a store, and a clock that only copies move."""

    def __init__(self, n_slots: int, max_stall_ms: float, clock: Clock) -> None:
        self.clock = clock
        self.budget = StepBudget(max_stall_ms, lambda: clock.now)
        table = SlotTable(n_slots, 3)
        super().__init__(SlowBackend(n_slots, clock), table, MemoryTier(10_000), self.budget)
        for speed in (self.copies.saves, self.copies.restores):
            speed.observe(1_000_000, 1_000_000 * BYTE_S)

    def fill(self, slot_id: int, first: int, n_tokens: int) -> list[int]:
        """Have tokens in an idle slot."""
        tokens = [first, *range(n_tokens - 1)]
        state = memoryview(pack(tokens))
        FakeBackend.restore(self.backend, slot_id, state)  # type: ignore[arg-type]
        self.table.slots[slot_id].idle_tokens = token_array(tokens)
        return tokens

    def keep(self, first: int, n_tokens: int) -> list[int]:
        """Have tokens in the store."""
        tokens = [first, *range(n_tokens - 1)]
        self.memory_tier.put("", tokens, pack(tokens))
        return tokens

    def start(self, prompt: list[int]) -> Place | None:
        """Give a prompt a slot, if it gets one now."""
        sequence = Sequence(GenerationRequest("a", tuple(prompt)), lambda delta: None)
        place = self.place(sequence)
        assert place is None or isinstance(place, Place)
        if place is not None:
            sequence.admit(place.slot.id, place.n_cached, None)
            place.slot.occupy(sequence)
        return place

    def stream(self, first: int) -> None:
        """Somebody generates."""
        place = self.start([first])
        assert place is not None
        assert place.slot.sequence is not None
        place.slot.sequence.state = SequenceState.DECODE


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    with mock.patch("serve_app.engine.costs.copy_budget.time", made):
        yield made


@pytest.mark.parametrize(
    ("max_stall_ms", "streams", "n_stored"),
    [(390, True, 0), (410, True, 1), (390, False, 1), (math.inf, True, 1)],
)
def test_what_takes_too_long_to_save_is_dropped_while_somebody_generates(
    clock: Clock, max_stall_ms: float, streams: bool, n_stored: int
) -> None:
    cache = Cache(2, max_stall_ms, clock)
    if streams:
        cache.stream(200)
    for slot in cache.table.slots:
        if slot.idle:
            cache.fill(slot.id, 201 + slot.id, 100)
    assert cache.start([210, 1, 2, 3]) is not None
    assert len(cache.memory_tier) == n_stored
    assert clock.now == pytest.approx(0.4 * n_stored)


@pytest.mark.parametrize(
    ("max_stall_ms", "streams", "n_cached"),
    [(390, True, 0), (410, True, 100), (390, False, 100), (math.inf, True, 100)],
)
def test_what_takes_too_long_to_restore_is_computed_while_somebody_generates(
    clock: Clock, max_stall_ms: float, streams: bool, n_cached: int
) -> None:
    cache = Cache(2, max_stall_ms, clock)
    stored = cache.keep(201, 100)
    if streams:
        cache.stream(200)
    place = cache.start([*stored, 250, 251])
    assert place is not None
    assert (place.n_cached, place.n_restored) == (n_cached, n_cached)


def test_what_is_too_much_for_one_step_is_done_in_the_next(clock: Clock) -> None:
    cache = Cache(4, 500, clock)
    prompts = [[*cache.keep(201 + i, 100), 250] for i in range(3)]
    cache.stream(200)
    for step in range(3):
        began = clock.now
        places = [cache.start(prompt) for prompt in prompts[step:]]
        assert [place is not None for place in places] == [True] + [False] * (2 - step)
        assert places[0] is not None
        assert places[0].n_restored == 100
        assert clock.now - began <= 0.5
        cache.budget.begin()


def test_without_streams_all_is_done_in_one_step(clock: Clock) -> None:
    cache = Cache(4, 500, clock)
    prompts = [[*cache.keep(201 + i, 100), 250] for i in range(3)]
    assert all(cache.start(prompt) for prompt in prompts)


def test_a_prefix_is_restored_even_if_there_is_never_time_to_save_what_it_replaces(
    clock: Clock,
) -> None:
    cache = Cache(2, 500, clock)
    stored = cache.keep(201, 100)
    cache.stream(200)
    (idle,) = (slot for slot in cache.table.slots if slot.idle)
    cache.fill(idle.id, 202, 100)
    place = cache.start([*stored, 250])
    assert place is not None
    assert place.n_restored == 100
    assert len(cache.memory_tier) == 1
    assert clock.now == pytest.approx(0.4)


def test_slots_that_are_emptied_in_one_step_are_saved_as_long_as_there_is_time(
    clock: Clock,
) -> None:
    cache = Cache(4, 1000, clock)
    cache.stream(200)
    for slot in cache.table.slots:
        if slot.idle:
            cache.fill(slot.id, 201 + slot.id, 100)
    assert [cache.evict_idle() for _ in range(4)] == [True, True, True, False]
    assert len(cache.memory_tier) == 2
    assert clock.now == pytest.approx(0.8)


def test_a_hiccup_is_forgotten() -> None:
    budget = CopyBudget(StepBudget(250))
    budget.saves.observe(1_000_000, 10.0)
    n_refused = 0
    while not budget.allows(budget.saves, 1_000_000):
        n_refused += 1
    assert 10 < n_refused < 100


def test_a_first_copy_is_tried_before_anything_was_measured() -> None:
    budget = CopyBudget(StepBudget(250))
    assert not budget.allows(budget.restores, 1_000_000_000)
    for _ in range(100):
        budget.allows(budget.restores, 1_000_000_000)
    assert budget.allows(budget.restores, 1_000_000_000)


def test_the_speed_is_that_of_large_copies() -> None:
    speed = CopySpeed()
    speed.observe(100_000_000, 0.1)
    speed.observe(100, 0.001)
    assert speed.forecast_s(100_000_000) == pytest.approx(0.1, rel=0.05)
    for _ in range(20):
        speed.observe(100_000_000, 0.2)
    assert speed.forecast_s(100_000_000) == pytest.approx(0.2, rel=0.05)

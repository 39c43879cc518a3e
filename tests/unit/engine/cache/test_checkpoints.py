"""Checkpoints of a scripted backend that forgets."""

from __future__ import annotations

from unittest import mock

import pytest

from serve_app.base.errors import DecodeError
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.cache.contents import Checkpoint, Checkpoints
from serve_app.engine.cache.manager import KVCacheManager, Place
from serve_app.engine.cache.memory_tier import MemoryTier
from serve_app.engine.cache.packing import token_array
from serve_app.engine.cache.slots import PrefixPending, Slot, SlotTable
from serve_app.engine.core.sequence import Sequence, SequenceState
from tests.doubles.backend import FakeBackend


def backend(n_slots: int = 2, *, n_cells: int | None = None, forgets: bool = True) -> FakeBackend:
    return FakeBackend(lambda tokens: 1, n_slots=n_slots, n_cells=n_cells, forgets=forgets)


def of(n_tokens: int, n_bytes: int = 1) -> Checkpoint:
    return Checkpoint(n_tokens, b"x" * n_bytes)


class Cache(KVCacheManager):
    """Of a backend that forgets, fed by hand."""

    def __init__(self, n_slots: int, *, n_cells: int | None = None, budget: int = 10**6) -> None:
        made = backend(n_slots, n_cells=n_cells)
        checkpoints = Checkpoints(made, budget)
        table = SlotTable(n_slots, 16, resumable=checkpoints.resumable)
        tier = MemoryTier(10**6, forgets=True)
        super().__init__(made, table, tier, None, checkpoints)
        self.fake = made

    def start(self, prompt: list[int]) -> Sequence:
        """Give a prompt a slot."""
        sequence = Sequence(GenerationRequest("a", tuple(prompt)), lambda delta: None)
        place = self.place(sequence)
        assert isinstance(place, Place)
        sequence.admit(place.slot.id, place.n_cached, None)
        place.slot.occupy(sequence)
        return sequence

    def compute(self, sequence: Sequence, n_most: int = 10**6) -> None:
        """As the decoder does: up to each stop."""
        while sequence.n_pending and n_most:
            n_rows = min(sequence.n_pending, sequence.n_to_stop, n_most)
            tokens = sequence.tokens[sequence.n_past :][:n_rows]
            rows = [
                (token, sequence.n_past + i, sequence.slot_id, False)
                for i, token in enumerate(tokens)
            ]
            self.fake.decode(rows)
            sequence.advance(n_rows)
            self.on_progress(sequence)
            n_most -= n_rows

    def say(self, prompt: list[int]) -> int:
        """Compute a prompt and let its slot go; returns the tokens that were there before."""
        sequence = self.start(prompt)
        n_cached = sequence.n_past
        self.compute(sequence)
        self.release(sequence)
        return n_cached

    def lengths(self, slot_id: int) -> list[int]:
        """Of a slot's checkpoints."""
        return [one.n_tokens for one in self.checkpoints.of(slot_id)]


CHAT = [*range(300)]


def test_none_are_made_where_slots_can_be_cut() -> None:
    made = Checkpoints(backend(forgets=False), 10**6)
    slot = Slot(0, token_array(CHAT))
    assert made.resumable(slot, 123, False) == 123
    assert made.stops(0, 100, 300) == ()
    assert not made.is_due(slot, 10**5, (10**5,))
    assert not made.is_worth(slot, 300)
    made.give(0, [of(5)])
    assert len(made) == made.n_bytes == 0


@pytest.mark.parametrize(
    ("n_cached", "n_known", "n_tokens", "expected"),
    [
        (0, 0, 300, (292,)),
        (0, 100, 300, (100, 292)),
        (280, 280, 300, ()),
        (0, 290, 300, (290,)),
        (0, 299, 300, (292,)),
        (90, 100, 300, (292,)),
        (0, 0, 20, ()),
    ],
    ids=["end", "branch", "little new", "branch near the end", "the same again", "near", "short"],
)
def test_where_they_are_made(
    n_cached: int, n_known: int, n_tokens: int, expected: tuple[int, ...]
) -> None:
    assert Checkpoints(backend(), 1).stops(n_cached, n_known, n_tokens) == expected
    assert Checkpoints(backend(), 0).stops(n_cached, n_known, n_tokens) == ()


def test_of_too_many_the_one_goes_that_is_missed_least() -> None:
    made = Checkpoints(backend(), 100)
    for n in (100, 2000, 2050, 4000, 4010):
        made.give(0, [*made.of(0), of(n)])
    assert [one.n_tokens for one in made.of(0)] == [2000, 4000, 4010]
    assert made.n_bytes == 3


def test_of_too_many_bytes_the_least_used_go_first() -> None:
    made = Checkpoints(backend(), 100)
    first = of(50, 40)
    made.give(0, [first])
    made.give(1, [of(60, 40)])
    made.used(0, first)
    made.give(2, [of(70, 50)])
    assert [len(made.of(slot)) for slot in range(3)] == [1, 0, 1]
    made.give(3, [of(80, 101)])  # never fits
    assert made.n_bytes <= 100
    assert not made.of(3)


def test_a_slot_goes_back_to_its_deepest_checkpoint() -> None:
    cache = Cache(1)
    assert cache.say(CHAT) == 0
    assert cache.lengths(0) == [292]
    assert cache.say([*CHAT[:295], *range(1000, 1100)]) == 292
    assert cache.say([*CHAT[:290], 7]) == 0


def test_where_a_turn_is_continued_there_is_one() -> None:
    cache = Cache(1)
    cache.say(CHAT)
    assert cache.say([*CHAT, *range(500, 600)]) == 300
    assert cache.lengths(0) == [292, 392]
    assert cache.say([*CHAT, *range(500, 600), *range(700, 800)]) == 400
    assert cache.lengths(0) == [292, 392, 492]


def test_a_branch_is_known_from_the_second_prompt_on() -> None:
    cache = Cache(1)
    assert [cache.say([*CHAT[:200], *range(i, i + 90)]) for i in (1000, 2000, 3000)] == [0, 0, 200]


@pytest.mark.parametrize("n_cells", [None, 2000], ids=["split", "unified"])
def test_a_copy_goes_back_to_a_checkpoint(n_cells: int | None) -> None:
    cache = Cache(2, n_cells=n_cells)
    first = cache.start(CHAT)
    cache.compute(first)
    second = cache.start([*CHAT[:295], *range(1000, 1100)])
    assert (second.slot_id, second.n_past) == (1, 292)
    assert cache.lengths(1) == [292]
    cache.compute(second)
    assert cache.fake.slots == [CHAT, list(second.tokens)]


def test_who_waits_for_a_prefix_gets_it_though_others_wait_for_more() -> None:
    cache = Cache(3)
    first = cache.start(CHAT)
    cache.compute(first, 50)
    waiting = [
        Sequence(GenerationRequest("b", (*CHAT[:n], *range(900, 950))), lambda delta: None)
        for n in (200, 250)
    ]
    assert all(isinstance(cache.place(one), PrefixPending) for one in waiting)
    cache.compute(first)
    assert cache.lengths(0) == [200, 250, 292]
    for one, n_cached in zip(waiting, (200, 250), strict=True):
        place = cache.place(one)
        assert isinstance(place, Place)
        assert place.n_cached == n_cached
        one.admit(place.slot.id, place.n_cached, None)
        place.slot.occupy(one)


def test_the_store_is_asked_for_what_can_be_resumed() -> None:
    """The prefix that shares most is good for nothing before its end; a shorter one has a checkpoint."""
    tier = MemoryTier(10**6, forgets=True)
    tier.put("", [*CHAT, 1], b"deep")
    tier.put("", [*CHAT[:150], 2], b"shallow", (of(60), of(140), of(151)))
    n_tokens, found = tier.longest("", [*CHAT, 3])
    assert (n_tokens, found and found.state) == (140, b"shallow")
    n_tokens, found = tier.longest("", [*CHAT, 1, 2])
    assert (n_tokens, found and found.state) == (301, b"deep")
    assert tier.longest("", [*CHAT[:59], 3, 4]) == (0, None)
    assert tier.n_known("", [*CHAT, 3]) == 300
    assert tier.n_bytes == 4 + 7 + 3


def test_the_store_keeps_what_a_longer_prefix_could_not_give() -> None:
    tier = MemoryTier(10**6, forgets=True)
    tier.put("", CHAT[:100], b"a")
    tier.put("", CHAT[:200], b"b", (of(40),))
    assert [one.state for one in tier] == [b"a", b"b"]
    assert not tier.wants("", CHAT[:100], 1)
    assert not tier.wants("", CHAT[:40], 1)
    assert tier.wants("", CHAT[:150], 1)  # somewhere in the middle
    tier.put("", CHAT[:250], b"c", (of(90), of(199)))
    assert [one.state for one in tier] == [b"c"]


def test_a_stored_prefix_brings_its_checkpoints() -> None:
    cache = Cache(1)
    cache.say(CHAT)
    cache.say([*range(5000, 5200)])
    assert len(cache.memory_tier) == 1
    assert cache.lengths(0) == [192]
    assert cache.say([*CHAT[:295], *range(1000, 1100)]) == 292
    assert cache.lengths(0) == [292, 387]


def test_the_budget_of_all_slots_holds() -> None:
    cache = Cache(4, budget=2000)
    for i in range(8):
        cache.say([*range(1000 * i, 1000 * i + 300)])
    assert 0 < cache.checkpoints.n_bytes <= 2000


def test_after_a_failed_batch_a_sequence_goes_on_from_a_checkpoint() -> None:
    cache = Cache(1)
    sequence = cache.start(CHAT)
    cache.compute(sequence, 296)
    cache.fake.slots[0] += [7, 8]
    assert not cache.drop_rows(sequence)
    assert (sequence.n_past, sequence.n_pending) == (292, 8)
    assert cache.fake.slots == [CHAT[:292]]
    assert cache.drop_rows(sequence)


def test_a_shift_leaves_those_before_it() -> None:
    cache = Cache(1)
    cache.say(CHAT)
    sequence = cache.start([*CHAT, *range(500, 600)])
    cache.compute(sequence)
    sequence.state = SequenceState.DECODE
    assert cache.lengths(0) == [292, 392]
    cache.shift(sequence, 300, 20)
    assert cache.lengths(0) == [292]


def test_a_checkpoint_that_the_backend_refuses_costs_its_tokens_only() -> None:
    cache, other = Cache(1), [*CHAT[:295], *range(1000, 1100)]
    cache.say(CHAT)
    with mock.patch.object(cache.fake, "rewind", side_effect=DecodeError("scripted")):
        assert cache.say(other) == 0
    assert cache.fake.slots == [other]
    assert cache.lengths(0) == [295, 387]

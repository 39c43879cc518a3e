"""Which slot suits a prompt."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.values.adapters import SHARED_GROUP
from serve_app.base.values.media import Picture
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine import CachedPrefixes, SamplingParams
from serve_app.engine.cache.memory_tier import MemoryTier
from serve_app.engine.cache.packing import common_prefix, token_array
from serve_app.engine.cache.slots import PrefixPending, Slot, SlotChoice, SlotTable
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.guests.pictures import PlacedTile
from serve_app.kernels.llama.vision.positions import Tile
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import Inbox, endless, options, request, running, submit

BUSY = None
SlotState = tuple[list[int], int] | None
"""An idle slot's tokens and when it was last used; or BUSY."""


def sequence(prompt: list[int], group: str = "") -> Sequence:
    request = GenerationRequest("a", tuple(prompt), cache_group=group)
    return Sequence(request, lambda delta: None)


def table(states: list[SlotState], min_copy: int = 99, *, consecutive: bool = False) -> SlotTable:
    slots = SlotTable(len(states), min_copy, consecutive=consecutive)
    for slot, state in zip(slots.slots, states, strict=True):
        if state is BUSY:
            slot.occupy(sequence([1]))
        else:
            slot.idle_tokens, slot.last_used = token_array(state[0]), state[1]
    return slots


@pytest.mark.parametrize(
    ("states", "prompt", "chosen", "n_cached"),
    [
        pytest.param([([], 0), ([], 0)], [1, 2], 0, 0, id="all new: the lowest id"),
        pytest.param([([], 5), ([], 3), ([], 4)], [1], 1, 0, id="least recently used"),
        pytest.param([([9], 1), ([], 0)], [1, 2], 1, 0, id="never used comes first"),
        pytest.param([([9], 1), ([1, 2], 9)], [1, 2, 3], 1, 2, id="prefix beats recency"),
        pytest.param([([1], 1), ([1, 2], 2)], [1, 2, 3], 1, 2, id="longest prefix"),
        pytest.param([([1, 2], 2), ([1, 2], 1)], [1, 2, 3], 1, 2, id="same prefix: older one"),
        pytest.param([([1, 2, 3], 1)], [1, 2, 3], 0, 2, id="last token is left to decode"),
        pytest.param([([1, 2, 3, 4], 1)], [1, 2], 0, 1, id="prompt inside the slot: last left"),
        pytest.param([([1], 1)], [1], 0, 0, id="prompt of one token"),
        pytest.param([([1, 2, 8, 9], 5), ([], 1)], [1, 2, 3], 0, 2, id="half of a slot is enough"),
        pytest.param(
            [([1, 2, 7, 8, 9], 5), ([], 1)], [1, 2, 3], 1, 0, id="less than half is left alone"
        ),
        pytest.param(
            [([1, 2, 7, 8, 9], 1), ([5], 2)], [1, 2, 3], 0, 2, id="taken by age: prefix still used"
        ),
        pytest.param([BUSY, ([], 7)], [1], 1, 0, id="busy slots are not on offer"),
    ],
)
def test_choose(states: list[SlotState], prompt: list[int], chosen: int, n_cached: int) -> None:
    slots = table(states)
    assert slots.choose("", prompt) == SlotChoice(slots.slots[chosen], n_cached)


def busy(tokens: list[int], n_past: int) -> Sequence:
    made = sequence(tokens)
    made.n_past = n_past
    return made


@pytest.mark.parametrize(
    ("states", "prompt", "expected"),
    [
        pytest.param([busy([1, 2, 3, 4], 4), []], [1, 2, 3, 9], (1, 3, 0), id="from a busy slot"),
        pytest.param([busy([1, 2, 3], 3), []], [1, 2, 9], (1, 0, None), id="too short to copy"),
        pytest.param([busy([1, 2, 3, 4], 2), []], [1, 2, 3, 9], (1, 0, None), id="soon: too short"),
        pytest.param([busy([1, 2, 3, 4], 0), []], [1, 2, 3, 9], 3, id="wait for the whole"),
        pytest.param([busy([1, 2, 3, 4, 5, 6], 3), []], [1, 2, 3, 4, 5, 6, 7], 6, id="for more"),
        pytest.param(
            [busy([1, 2, 3, 4, 5], 3), []], [1, 2, 3, 4, 5, 6], (1, 3, 0), id="not for a little"
        ),
        pytest.param(
            [busy([1, 2, 3, 4], 4), [1, 2, 3]], [1, 2, 3, 4, 5], (1, 3, None), id="in place is near"
        ),
        pytest.param(
            [[1, 2, 3, 4, 5, 6, 7], []], [1, 2, 3, 9], (1, 3, 0), id="from an idle slot worth more"
        ),
        pytest.param(
            [[1, 2, 3, 4, 5, 6, 7], busy([9], 1)],
            [1, 2, 3, 9],
            (0, 3, None),
            id="the only idle slot",
        ),
        pytest.param(
            [busy([1, 2, 3, 4], 4), [8], []], [1, 2, 3, 9], (2, 3, 0), id="into the oldest slot"
        ),
    ],
)
def test_prefixes_of_other_slots(
    states: list[Sequence | list[int]],
    prompt: list[int],
    expected: tuple[int, int, int | None] | int,
) -> None:
    slots = SlotTable(len(states), min_copy=3)
    for slot, state in zip(slots.slots, states, strict=True):
        if isinstance(state, Sequence):
            slot.occupy(state)
        else:
            slot.idle_tokens, slot.last_used = token_array(state), len(state)
    choice = slots.choose("", prompt)
    if isinstance(expected, int):
        assert choice == PrefixPending(slots.slots[0], expected)
        return
    assert isinstance(choice, SlotChoice)
    source = None if choice.copy_from is None else choice.copy_from.id
    assert (choice.slot.id, choice.n_cached, source) == expected


def test_who_waits_need_not_be_asked_again_before_the_prefix_is_computed() -> None:
    slots, owner = SlotTable(2, min_copy=3), busy([*range(10)], 0)
    slots.slots[0].occupy(owner)
    prompt = [*range(11)]
    wait = slots.choose("", prompt)
    assert wait == PrefixPending(slots.slots[0], 10)
    assert isinstance(wait, PrefixPending)
    for owner.n_past in range(10):
        assert slots.lasts(wait)
    owner.n_past = 10
    assert not slots.lasts(wait)
    assert isinstance(slots.choose("", prompt), SlotChoice)


@pytest.mark.parametrize("ends", [True, False])
def test_who_waits_is_asked_again_when_the_prefix_is_lost(ends: bool) -> None:
    slots, owner = SlotTable(2, min_copy=3), busy([*range(10)], 5)
    slots.slots[0].occupy(owner)
    wait = slots.choose("", [*range(11)])
    assert isinstance(wait, PrefixPending)
    if ends:
        slots.release(slots.slots[0])
        slots.slots[0].occupy(busy([*range(10)], 0))
    else:
        owner.shift(2, 3, cached=True)
    assert not slots.lasts(wait)


MINE, THEIRS = "mine", "theirs"


@pytest.mark.parametrize(
    ("groups", "held", "expected"),
    [
        pytest.param([MINE, MINE], [[1, 2, 3, 4], [9]], (0, 4, None), id="one's own, in place"),
        pytest.param(
            [THEIRS, MINE], [[1, 2, 3, 4], [9]], (0, 0, None), id="another's is no prefix"
        ),
        pytest.param([THEIRS, ""], [[1, 2, 3, 4], [1, 2, 3, 4]], (0, 0, None), id="nor anybody's"),
        pytest.param(
            [THEIRS, MINE], [[1, 2, 3, 4], [1, 2, 3]], (1, 3, None), id="one's own before a longer"
        ),
        pytest.param([THEIRS], [[1, 2, 3, 4]], (0, 0, None), id="another's slot is emptied"),
        pytest.param(
            [MINE, THEIRS],
            [busy([1, 2, 3, 4], 4), [7]],
            (1, 4, 0),
            id="copied from one's own that runs, into another's",
        ),
        pytest.param(
            [THEIRS, MINE],
            [busy([1, 2, 3, 4], 4), []],
            (1, 0, None),
            id="not copied from another's that runs",
        ),
        pytest.param(
            [THEIRS, MINE], [busy([1, 2, 3, 4], 0), []], (1, 0, None), id="nor waited for there"
        ),
        pytest.param([MINE, MINE], [busy([1, 2, 3, 4], 0), []], 4, id="waited for in one's own"),
    ],
)
def test_slots_of_other_cache_groups_hold_nothing(
    groups: list[str], held: list[list[int] | Sequence], expected: tuple[int, int, int | None] | int
) -> None:
    slots = SlotTable(len(groups), min_copy=3)
    for age, (slot, group, one) in enumerate(zip(slots.slots, groups, held, strict=True)):
        if isinstance(one, Sequence):
            one.request = replace(one.request, cache_group=group)
            slot.occupy(one)
        else:
            slot.group, slot.idle_tokens, slot.last_used = group, token_array(one), age
    choice = slots.choose(MINE, [1, 2, 3, 4, 5])
    if isinstance(choice, PrefixPending):
        assert choice == PrefixPending(slots.slots[0], expected)  # type: ignore[arg-type]
        return
    source = None if choice.copy_from is None else choice.copy_from.id
    assert (choice.slot.id, choice.n_cached, source) == expected


@pytest.mark.parametrize("group", ["", MINE, THEIRS])
def test_what_is_pinned_is_for_every_cache_group(group: str) -> None:
    slots = SlotTable(1, min_copy=3, pinned=((1, 2, 3),))
    choice = slots.choose(group, [1, 2, 3, 4])
    assert choice == SlotChoice(slots.slots[0], 3, copy_from=slots.slots[1])


def test_a_slot_belongs_to_the_cache_group_that_had_it_last() -> None:
    slots = SlotTable(1, min_copy=3)
    slot = slots.slots[0]
    for group in (MINE, THEIRS):
        ended = sequence([1, 2, 3], group)
        ended.n_past = 2
        slot.occupy(ended)
        slots.release(slot)
        assert slots.choose(group, [1, 2, 3]) == SlotChoice(slot, 2)
    assert slots.choose(MINE, [1, 2, 3]) == SlotChoice(slot, 0)


@pytest.mark.parametrize(
    ("other", "lost"), [(MINE, []), (THEIRS, [5, 6, 7]), (SHARED_GROUP, [])], ids=repr
)
def test_what_only_another_cache_group_holds_is_lost(other: str, lost: list[int]) -> None:
    slots = SlotTable(2, min_copy=3)
    for slot, group in zip(slots.slots, (MINE, other), strict=True):
        slot.group, slot.idle_tokens = group, token_array([5, 6, 7])
    assert list(slots.loses(SlotChoice(slots.slots[0], 0))) == lost


def test_no_slot_when_all_are_busy() -> None:
    assert not table([BUSY, BUSY]).n_idle
    assert table([BUSY, ([], 0)]).n_idle


def test_released_slot_keeps_what_is_in_the_cache() -> None:
    slots = SlotTable(2, min_copy=99)
    slot = slots.slots[0]
    ended = sequence([1, 2, 3])
    ended.n_past = 2
    slot.occupy(ended)
    assert (list(slot.tokens), slot.n_past) == ([1, 2, 3], 2)
    slots.release(slot)
    assert (slot.sequence, list(slot.tokens)) == (None, [1, 2])


def test_releases_make_the_order_of_age() -> None:
    slots = SlotTable(3, min_copy=99)
    for slot in slots.slots:
        slot.occupy(sequence([1]))
    for i in (1, 2, 0):
        slots.release(slots.slots[i])
    order = []
    for _ in range(3):
        choice = slots.choose("", [9])
        assert isinstance(choice, SlotChoice)
        choice.slot.occupy(sequence([9]))
        order.append(choice.slot.id)
    assert order == [1, 2, 0]


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2)],
    ids=str,
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix_is_what_counting_finds(a: list[int], b: list[int]) -> None:
    counted = 0
    while counted < min(len(a), len(b)) and a[counted] == b[counted]:
        counted += 1
    assert common_prefix(a, b) == counted


@pytest.mark.parametrize(
    ("states", "prompt", "chosen"),
    [
        pytest.param([([], 0), ([], 0), BUSY, ([7], 9), BUSY, ([], 0)], [1], 3, id="between two"),
        pytest.param([([], 0), ([], 0), BUSY, ([7], 9)], [1], 1, id="beside one: the older"),
        pytest.param([([], 1), ([], 0), ([], 2)], [1], 1, id="none is busy: the oldest"),
        pytest.param([([1, 2], 9), ([], 0), BUSY], [1, 2, 3], 0, id="a prefix is not moved"),
    ],
)
def test_busy_slots_are_kept_together(
    states: list[SlotState], prompt: list[int], chosen: int
) -> None:
    slots = table(states, consecutive=True)
    choice = slots.choose("", prompt)
    assert isinstance(choice, SlotChoice)
    assert choice.slot.id == chosen
    apart = table(states).choose("", [1])
    assert isinstance(apart, SlotChoice)
    assert apart.slot.last_used == min(state[1] for state in states if state)


def test_slot_ends_are_where_one_more_token_fits() -> None:
    slots = table([BUSY, ([1, 2], 0), ([], 0), ([1, 2, 3], 0)])
    busy = slots.slots[0].sequence
    assert busy is not None
    busy.n_past = 1
    slots.room = 3
    assert slots.slot_ends() == {0: 1, 1: 2, 2: 0}


def test_a_slot_within_a_picture_has_no_end() -> None:
    """A row there could not be dropped again."""
    slots = table([BUSY])
    busy = slots.slots[0].sequence
    assert busy is not None
    picture = Picture.of(b"abc", 1, 1)
    busy.spans = (PlacedTile(1, Tile(4), picture, 0, b"key"),)
    ends = []
    for busy.n_past in (1, 2, 4, 5):
        ends.append(slots.slot_ends())
    assert ends == [{0: 1}, {}, {}, {0: 5}]


def test_the_garbage_collector_does_not_walk_tokens() -> None:
    """With lists, a step would now and then take milliseconds for all that is stored."""
    slots = SlotTable(2, min_copy=3)
    running = sequence([1, 2, 3])
    slots.slots[0].occupy(running)
    tier = MemoryTier(100)
    tier.put("", [1, 2, 3], b"state")
    (stored,) = tier
    slots.slots[1].idle_tokens = stored.tokens
    for tokens in (running.tokens, slots.slots[0].tokens, slots.slots[1].tokens, stored.tokens):
        assert list(tokens) == [1, 2, 3]
        assert not any(isinstance(one, int) for one in gc.get_referents(tokens))


def test_what_was_published_does_not_change() -> None:
    seen: list[tuple[CachedPrefixes, list[tuple[int, ...]]]] = []
    backend = FakeBackend(endless, n_slots=2)
    opts = replace(options(2), cache_ram_bytes=600, context_shift=True, n_keep=4)
    with running(backend, opts) as engine:
        for i in range(24):
            prompt = f"{'abc'[i % 3] * 20}{i}\n"
            inbox = Inbox()
            submit(engine, request(str(i), prompt, max_tokens=5 + 4 * i), inbox)
            held = engine.cached_prefixes()
            seen.append((held, [tuple(one.tokens) for one in held.prompts]))
            if i % 3 == 2:
                inbox.wait()
    assert any(len(held.prompts) > 2 for held, _ in seen)
    for held, copied in seen:
        assert [tuple(one.tokens) for one in held.prompts] == copied


def test_the_last_requests_are_named() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend) as engine:
        for i in range(300):
            inbox = Inbox()
            params = SamplingParams(max_tokens=1)
            submit(engine, GenerationRequest(str(i), (1, 2), params), inbox)
            inbox.wait()
        assert engine.cached_prefixes().taken == tuple(str(i) for i in range(44, 300))


def test_after_a_context_shift_only_what_is_kept_is_offered() -> None:
    slot = Slot(0, sequence=busy([1, 2, 3, 4], 4))
    assert list(slot.prompt) == [1, 2, 3, 4]
    assert slot.sequence is not None
    slot.sequence.n_exact = 3
    assert list(slot.prompt) == [1, 2, 3]

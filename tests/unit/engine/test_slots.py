"""Which lane suits a prompt."""

from __future__ import annotations

import pytest

from serve_app.engine.sequence import Sequence
from serve_app.engine.slots import SlotTable, common_prefix
from serve_app.types import GenerationRequest

BUSY = None
Lane = tuple[list[int], int] | None
"""An idle lane's tokens and when it was last used; or BUSY."""


def sequence(prompt: list[int]) -> Sequence:
    return Sequence(GenerationRequest("a", tuple(prompt)), lambda delta: None)


def table(lanes: list[Lane]) -> SlotTable:
    slots = SlotTable(len(lanes))
    for slot, lane in zip(slots.slots, lanes, strict=True):
        if lane is BUSY:
            slots.occupy(slot, sequence([1]))
        else:
            slot.tokens, slot.last_used = lane
    return slots


@pytest.mark.parametrize(
    ("lanes", "prompt", "chosen", "n_cached"),
    [
        pytest.param([([], 0), ([], 0)], [1, 2], 0, 0, id="all new: the lowest id"),
        pytest.param([([], 5), ([], 3), ([], 4)], [1], 1, 0, id="least recently used"),
        pytest.param([([9], 1), ([], 0)], [1, 2], 1, 0, id="never used comes first"),
        pytest.param([([9], 1), ([1, 2], 9)], [1, 2, 3], 1, 2, id="prefix beats recency"),
        pytest.param([([1], 1), ([1, 2], 2)], [1, 2, 3], 1, 2, id="longest prefix"),
        pytest.param([([1, 2], 2), ([1, 2], 1)], [1, 2, 3], 1, 2, id="same prefix: older one"),
        pytest.param([([1, 2, 3], 1)], [1, 2, 3], 0, 2, id="last token is left to decode"),
        pytest.param([([1, 2, 3, 4], 1)], [1, 2], 0, 1, id="prompt inside the lane: last left"),
        pytest.param([([1], 1)], [1], 0, 0, id="prompt of one token"),
        pytest.param([([1, 2, 8, 9], 5), ([], 1)], [1, 2, 3], 0, 2, id="half of a lane is enough"),
        pytest.param(
            [([1, 2, 7, 8, 9], 5), ([], 1)], [1, 2, 3], 1, 0, id="less than half is left alone"
        ),
        pytest.param(
            [([1, 2, 7, 8, 9], 1), ([5], 2)], [1, 2, 3], 0, 2, id="taken by age: prefix still used"
        ),
        pytest.param([BUSY, ([], 7)], [1], 1, 0, id="busy lanes are not on offer"),
    ],
)
def test_choose(lanes: list[Lane], prompt: list[int], chosen: int, n_cached: int) -> None:
    slots = table(lanes)
    assert slots.choose(prompt) == (slots.slots[chosen], n_cached)


def test_no_slot_when_all_are_busy() -> None:
    assert table([BUSY, BUSY]).choose([1]) is None


def test_released_slot_keeps_what_is_in_the_cache() -> None:
    slots = SlotTable(2)
    slot = slots.slots[0]
    ended = sequence([1, 2, 3])
    ended.n_past = 2
    slots.occupy(slot, ended)
    assert slot.tokens == []
    slots.release(slot)
    assert (slot.sequence, slot.tokens) == (None, [1, 2])


def test_releases_make_the_order_of_age() -> None:
    slots = SlotTable(3)
    for slot in slots.slots:
        slots.occupy(slot, sequence([1]))
    for i in (1, 2, 0):
        slots.release(slots.slots[i])
    order = []
    for _ in range(3):
        choice = slots.choose([9])
        assert choice is not None
        slots.occupy(choice[0], sequence([9]))
        order.append(choice[0].id)
    assert order == [1, 2, 0]


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2)],
    ids=str,
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n

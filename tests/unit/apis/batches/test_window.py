"""The window of lines, whose turn it is, and when a batch is promoted."""

from __future__ import annotations

import asyncio

from serve_app.apis.batches.window import FIRST, MAX_BYTES, BatchPace, LineWindow


async def answered(window: LineWindow, n: int, *, refused: bool = False) -> None:
    for _ in range(n):
        async with window.place("", 1) as place:
            place.refused = refused


async def test_it_doubles_with_each_round_until_one_is_refused() -> None:
    window = LineWindow(256)
    await answered(window, int(FIRST))
    assert window.size == 2 * FIRST
    await answered(window, window.size)
    assert window.size == 4 * FIRST


async def test_from_then_on_it_grows_by_one_a_round() -> None:
    window = LineWindow(256)
    await answered(window, 32)
    assert window.size == 40
    await answered(window, 5, refused=True)
    assert window.size == 32, "what is refused together was asked together"
    await answered(window, 33)
    assert window.size == 33


async def test_it_keeps_to_the_most() -> None:
    window = LineWindow(10)
    await answered(window, 100)
    assert window.size == 10


async def enter(window: LineWindow, owner: str, order: list[str], n_bytes: int = 1) -> None:
    async with window.place(owner, n_bytes):
        order.append(owner)
        await asyncio.sleep(0.01)


async def test_owners_take_turns() -> None:
    window, order = LineWindow(1), list[str]()
    owners = ["many"] * 5 + ["single", "other", "single"]
    await asyncio.gather(*(enter(window, owner, order) for owner in owners))
    assert order == ["many", "many", "single", "other", "many", "single", "many", "many"]


async def test_the_owner_with_fewest_lines_inside_is_next() -> None:
    window, order = LineWindow(3), list[str]()
    async with window.place("slow", 1), window.place("slow", 1):
        lines = [enter(window, owner, order) for owner in ["quick", "slow", "quick", "quick"]]
        await asyncio.gather(*lines)
    assert order == ["quick", "quick", "quick", "slow"], "slow lines do not take all places"


async def test_an_owner_that_comes_is_not_paid_for_the_time_before() -> None:
    window, order = LineWindow(1), list[str]()
    early = [asyncio.create_task(enter(window, "early", order)) for _ in range(20)]
    await early[9]
    late = [asyncio.create_task(enter(window, "late", order)) for _ in range(10)]
    await asyncio.gather(*early, *late)
    assert "early" in order[10:16], "the late one does not get all that the early one had"


async def test_large_lines_are_few_at_once() -> None:
    window = LineWindow(8)
    async with window.place("a", MAX_BYTES - 1), window.place("a", 1):
        third = asyncio.create_task(enter(window, "b", [], 1))
        await asyncio.sleep(0.01)
        assert not third.done()
    await third
    async with window.place("a", 2 * MAX_BYTES):
        """A line alone always has a place."""


async def test_who_leaves_while_waiting_takes_no_place() -> None:
    window = LineWindow(1)
    async with window.place("a", 1):
        waiting = asyncio.create_task(enter(window, "b", []))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), window.place("c", 1):
        pass


def test_the_best_pace_so_far_says_whether_it_will_be_in_time() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=101)
    pace.on_answers(1, 10.0)
    pace.on_answers(10, 20.0)
    assert not pace.runs_out(300.0), "90 lines take 135 s with the margin"
    assert not pace.runs_out(864.0)
    assert pace.runs_out(870.0)


def test_a_batch_that_catches_up_is_in_no_hurry_any_more() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=101)
    pace.on_answers(1, 10.0)
    assert not pace.runs_out(249.0), "its time has only begun"
    assert pace.runs_out(251.0)
    pace.on_answers(50, 260.0)
    assert not pace.runs_out(270.0)


def test_without_a_pace_it_waits_for_half_of_its_time() -> None:
    pace = BatchPace(now=0.0, deadline=100.0, n_left=10)
    assert not pace.runs_out(50.0)
    assert pace.runs_out(50.1)


def test_in_the_last_tenth_it_is_in_a_hurry_all_the_same() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=200)
    pace.on_answers(100, 10.0)
    assert not pace.runs_out(899.0)
    assert pace.runs_out(901.0)

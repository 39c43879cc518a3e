"""Entries that arrive together enter together."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.run.replica.batching import Batcher


class Engine:
    """It notes what entered together, and answers with the double."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def submit(self, entries: list[int]) -> list[int]:
        self.batches.append(entries)
        if 13 in entries:
            raise ValueError("No.")
        return [2 * entry for entry in entries]


async def test_what_arrives_in_one_turn_enters_together_up_to_a_bound() -> None:
    engine = Engine()
    batcher = Batcher(engine.submit, 3)
    assert await asyncio.gather(*(batcher.enter(n) for n in range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert engine.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert await batcher.enter(7) == 14
    assert engine.batches[3:] == [[7]]


async def test_who_has_left_does_not_enter() -> None:
    engine = Engine()
    batcher = Batcher(engine.submit, 16)
    left, stays = batcher.enter(1), batcher.enter(2)
    left.cancel()
    assert await stays == 4
    assert engine.batches == [[2]]


async def test_an_error_is_everybody_s() -> None:
    batcher = Batcher(Engine().submit, 16)
    entering = [batcher.enter(1), batcher.enter(13)]
    for outcome in entering:
        with pytest.raises(ValueError, match="No"):
            await outcome

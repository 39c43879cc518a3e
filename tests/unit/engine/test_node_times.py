"""How long it is until llama.cpp looks next."""

from __future__ import annotations

import pytest

from serve_app.engine.pictures.node_times import NodeTimes
from serve_app.llama.vision.tiles import Tile


def encoded(times: NodeTimes, tile: Tile, *seconds: float) -> list[float]:
    """What was forecast before each look of a tile that took so long."""
    times.begin(tile)
    found = []
    for one in seconds:
        found.append(times.next_s)
        times.observe(one)
    return found


def test_a_new_shape_is_as_slow_as_it_has_been_at_most() -> None:
    assert encoded(NodeTimes(), Tile(64), 0.1, 0.3, 0.2, 0.1) == [0.0, 0.1, 0.3, 0.3]


def test_the_next_of_a_shape_is_like_the_last_ones_node_by_node() -> None:
    times = NodeTimes()
    encoded(times, Tile(64), 0.1, 0.3, 0.2)
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.3, 0.2])
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.2, 0.2])
    assert encoded(times, Tile(9), 0.5) == [0.0]
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.15, 0.2])


def test_one_slow_moment_is_forgotten() -> None:
    times = NodeTimes()
    encoded(times, Tile(64), 0.1, 9.0)
    for _ in range(10):
        encoded(times, Tile(64), 0.1, 0.1)
    assert encoded(times, Tile(64), 0.1, 0.1) == pytest.approx([0.1, 0.1], abs=0.01)


def test_it_remembers_no_more_than_some_shapes() -> None:
    times = NodeTimes()
    for n_tokens in range(1, 66):
        encoded(times, Tile(n_tokens), 0.1)
    assert encoded(times, Tile(1), 0.1) == [0.0]

"""What the forecast benchmark prints."""

from __future__ import annotations

from loadtests.engine.forecast import Batch, busy, by_depth, by_step


def batch(depth: int, forecast_s: float) -> Batch:
    return Batch(depth, forecast_s, before_s=0.5, seconds=1.0, again_s=1.02)


def test_a_row_for_each_band_of_depths() -> None:
    found = by_depth([batch(0, 1.1), batch(1023, 0.9), batch(4096, 1.3)])
    assert found == [
        ("depth from 0", "2", "10%", "10%", "2%", "2%", "2.00"),
        ("depth from 4096", "1", "30%", "30%", "2%", "2%", "2.00"),
        ("all", "3", "10%", "28%", "2%", "2%", "2.00"),
    ]


def test_a_row_for_the_first_steps_and_those_that_follow() -> None:
    found = by_step([batch(0, 2.0)] * 10 + [batch(0, 1.1)] * 15)
    assert [row[:3] for row in found] == [
        ("from step 0", "10", "100%"),
        ("from step 10", "10", "10%"),
        ("from step 20", "5", "10%"),
    ]


def test_the_load_ends_with_its_block() -> None:
    with busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)

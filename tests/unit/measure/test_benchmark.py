"""What the benchmarks share."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from serve_app.measure.benchmark import (
    Prompts,
    bounded,
    choice,
    listed,
    peak_bytes,
    percentile,
    spread,
    table,
)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 50, 2.5),
        ([0.0, 10.0], 99, 9.9),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_prompts_are_the_same_for_the_same_seed_and_fresh_every_time() -> None:
    prompts, again, other = Prompts(range(1000)), Prompts(range(1000)), Prompts(range(1000), 1)
    first = prompts.draw(20)
    assert len(first) == 20
    assert first == again.draw(20)
    assert first != prompts.draw(20)
    assert first != other.draw(20)


def test_peak_bytes_is_of_the_process_that_is_asked_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert peak_bytes(child.pid) > 0
        held = bytearray(64 * 2**20)
        assert peak_bytes() > len(held)
        assert peak_bytes(child.pid) < len(held)
    finally:
        child.communicate(b"\n")
    assert peak_bytes(child.pid) == 0


def test_arguments() -> None:
    assert listed(bounded(1, 4))("1,4,1") == (1, 4)
    assert listed(choice("on", "off"))("off") == ("off",)
    with pytest.raises(argparse.ArgumentTypeError, match="5 is not between 1 and 4"):
        bounded(1, 4)("5")
    with pytest.raises(argparse.ArgumentTypeError, match="'no' is none of on, off"):
        choice("on", "off")("no")


def test_table() -> None:
    assert table(("a", "b"), [(1, "x"), (2, "y")]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | x |",
        "| 2 | y |",
    ]


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00-3.00)"
    assert spread([]) == "-"

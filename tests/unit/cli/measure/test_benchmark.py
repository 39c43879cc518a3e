"""What all measurements share."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtests.common.comparing import compared
from serve_app.cli.measure.benchmark import (
    Prompts,
    check_files,
    choice,
    in_turns,
    list_of,
    new_file,
    number_between,
    of_each,
    peak_bytes,
    percentile,
    ratios,
    spread,
    table,
    turns,
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
    assert list_of(number_between(1, 4))("1,4,1") == (1, 4)
    assert list_of(choice("on", "off"))("off") == ("off",)
    assert number_between(0.5, 4.0)("3") == 3.0
    for text in ("5", "x", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not an integer between"):
            number_between(1, 4)(text)
    for text in ("nan", "inf", "-1", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number between"):
            number_between(0.5, 4.0)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="'no' is none of on, off"):
        choice("on", "off")("no")


def test_files_are_there_and_can_be_written_before_anything_is_measured(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    assert new_file(str(there)) == there
    check_files(None, there)
    for path in (tmp_path, tmp_path / "other"):
        with pytest.raises(SystemExit, match="There is no file"):
            check_files(there, path)
    for path in (tmp_path, there / "x", tmp_path / "no" / "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a file in a folder"):
            new_file(str(path))


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


WAYS = ("a", "b", "c")


def measured(n_rounds: int, *, warm_up: bool) -> tuple[list[str], list[dict[str, str]]]:
    """What was measured, in order, and the rounds."""
    calls: list[str] = []

    def measure(number: int, way: str) -> str:
        calls.append(f"{way}{number}")
        return calls[-1]

    return calls, in_turns(WAYS, n_rounds, measure, warm_up=warm_up)


def test_turns_go_forth_and_back() -> None:
    assert [list(turns(WAYS, number)) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_ways_take_turns_after_a_round_that_warms_up() -> None:
    calls, rounds = measured(2, warm_up=True)
    assert calls == ["a0", "b0", "c0", "c1", "b1", "a1", "a2", "b2", "c2"]
    assert rounds == [{"a": "a1", "b": "b1", "c": "c1"}, {"a": "a2", "b": "b2", "c": "c2"}]
    assert [list(one) for one in rounds] == [list(WAYS)] * 2  # as they were named
    assert dict(of_each(rounds)) == {"a": ["a1", "a2"], "b": ["b1", "b2"], "c": ["c1", "c2"]}


def test_without_it_every_round_counts() -> None:
    calls, rounds = measured(1, warm_up=False)
    assert calls == ["c1", "b1", "a1"]
    assert rounds == [{"a": "a1", "b": "b1", "c": "c1"}]


def test_what_measuring_raises_ends_it() -> None:
    def fail(number: int, way: str) -> None:
        raise ValueError(f"{way}{number}")

    with pytest.raises(ValueError, match="a0"):
        in_turns(WAYS, 1, fail)


@pytest.mark.parametrize(
    ("values", "baseline", "expected"),
    [
        ([2.0, 1.0], [1.0, 4.0], [2.0, 0.25]),
        ([0.0], [2.0], [0.0]),
        ([1.0, 2.0], [1.0, 0.0], None),
        ([1.0, None], [1.0, 1.0], None),
        ([1.0], [None], None),
        ([], [], []),
    ],
)
def test_ratios_are_of_the_same_round(
    values: Sequence[float | None], baseline: Sequence[float | None], expected: list[float] | None
) -> None:
    assert ratios(values, baseline) == expected


def test_a_row_for_each_way() -> None:
    rounds = [{"slow": 1.0, "fast": 3.0}, {"slow": 2.0, "fast": 2.0}]
    lines = compared(rounds, "slow", ("way", "rate", "to slow"), "{:.1f}".format).splitlines()
    assert lines == [
        "| way | rate | to slow |",
        "| --- | --- | --- |",
        "| slow | 1.5 | 1.00 (1.00-1.00) |",
        "| fast | 2.5 | 2.00 (1.00-3.00) |",
    ]


def test_no_ratio_to_nothing() -> None:
    (*_, row) = compared([{"a": 1.0, "b": 0.0}], "b", ("way", "x", "to b"), str).splitlines()[:3]
    assert row == "| a | 1.0 | - |"

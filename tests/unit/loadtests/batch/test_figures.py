"""What a batch got beside people, and what people left."""

from __future__ import annotations

import pytest

from loadtests.batch import native
from loadtests.batch.__main__ import report
from loadtests.batch.figures import Turn, Window, covered_s, used_of_left

TURNS = (Turn(1.0, 2.0, (1.5, 1.6, 2.0)), Turn(1.8, 3.0, (2.5, 2.6, 3.0)), Turn(9.0, 10.0, ()))


def test_seconds_that_overlap_count_once() -> None:
    assert covered_s([(5, 6), (0, 2), (1, 3), (2, 2.5)], 10) == 4
    assert covered_s([(0, 2), (8, 12)], 10) == 4


def test_people_leave_what_none_of_them_waits_in() -> None:
    calm = Window(10.0, TURNS)
    assert calm.left == pytest.approx(0.7)
    assert calm.ttft_s == pytest.approx(0.5 + 0.95 * 0.2)  # between 0.5 and 0.7
    assert calm.gap_s == pytest.approx(0.4)


def test_what_the_batch_uses_of_that() -> None:
    alone, calm = Window(10.0, line_tokens=600), Window(10.0, TURNS)
    beside = Window(10.0, TURNS, line_tokens=378)
    assert used_of_left([beside], [calm], [alone]) == [pytest.approx(0.9)]


def test_the_native_tool_is_read() -> None:
    line = '{"n_kv_max": 3072, "pp": 128, "tg": 64, "pl": %d, "t_pp": 4.0, "t_tg": 12.0}'
    output = "\n".join(["main: n_kv_max = 3072", line % 8, "", line % 16])
    assert native.parse(output) == {8: 32.0, 16: 64.0}


def test_the_report() -> None:
    found = report(
        [
            {
                "batch": Window(10.0, line_tokens=600),
                "people": Window(10.0, TURNS),
                "both": Window(10.0, TURNS, line_tokens=378),
                native.NATIVE: Window(1.0, line_tokens=50.0),
            }
        ]
    )
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("|")]
    assert ["batch", "60.00 (60.00-60.00)", "-", "-", "-"] in rows
    compared = dict(row for row in rows if len(row) == 2)
    assert compared["of what people leave, the batch uses"] == "0.90 (0.90-0.90)"
    assert compared["TTFT p95, both to people"] == "1.00 (1.00-1.00)"
    assert compared["batch to llama-batched-bench"] == "1.20 (1.20-1.20)"

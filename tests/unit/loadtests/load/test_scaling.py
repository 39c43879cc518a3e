"""What a burst's samples and requests add up to."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtests.load.driver import Load, Result
from loadtests.load.observer import Sample
from loadtests.load.scaling import Row, plot, rows, table
from loadtests.load.stream_metrics import ABORTED, COMPLETE, FAILED, REFUSED, Outcome

START_S = 1000.0


def outcome(at_s: float, end: str, ttft_s: float | None) -> Outcome:
    return Outcome(str(at_s), "chat", START_S + at_s, 1.0, end, "", ttft_s)


def sample(at_s: float, replicas: int, waiting: int) -> Sample:
    return Sample(at_s, replicas, 1, waiting, 0.0, 1, 10, 0.0, None, None)


@pytest.fixture
def found() -> list[Row]:
    """Twenty seconds; the second half has the burst."""
    outcomes = [
        outcome(1, COMPLETE, 0.1),
        outcome(11, COMPLETE, 0.2),
        outcome(12, COMPLETE, 0.4),
        outcome(13, REFUSED, None),
        outcome(14, FAILED, None),
        outcome(15, ABORTED, 0.4),
    ]
    samples = [sample(0.5, 1, 0), sample(9.5, 1, 2), sample(19, 2, 7)]
    load = Load(20, 20, "chat", shape="burst")
    result = Result(load, [], outcomes, samples, Counter(), 20.0, 0.1, None, None)
    return rows(result, [(START_S + 3, 1), (START_S + 18, 2)], START_S)


def test_rows_have_the_last_state_and_the_requests_of_their_seconds(found: list[Row]) -> None:
    before, after = found
    assert before == Row(0, 20, 1, 1, 2, 1, 0, 0.1, 0.1)
    assert (after.at_s, after.users, after.replicas, after.nodes) == (10, 1, 2, 2)
    assert (after.waiting, after.sent, after.failed, after.ttft_p50_s) == (7, 5, 2, 0.4)


def test_the_table_has_a_line_for_each(found: list[Row]) -> None:
    head, _, first, second = table(found).splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    assert first == "| 0 | 20 | 1 | 1 | 2 | 1 | 0 | 0.10 | 0.10 |"


def test_the_picture_has_a_line_for_each_series(found: list[Row]) -> None:
    assert plot(found).count("<polyline") == 6

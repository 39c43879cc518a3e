"""For how long nobody has wanted an engine."""

from __future__ import annotations

from dataclasses import replace

from serve_app.routing.reporter import Idleness
from tests.unit.replica.test_metrics import STATS

LONG_S = 1e9


def test_a_request_counts_while_it_is_there_and_when_it_has_ended() -> None:
    idleness = Idleness(0.0)
    assert idleness.seconds(STATS, 5.0) == 5
    assert idleness.seconds(replace(STATS, running=1), 6.0) == 0
    ended = replace(STATS, ended={"stop": 1})
    assert idleness.seconds(ended, 9.0) == 0
    assert idleness.seconds(ended, 11.0) == 2


def test_what_is_released_is_not_wanted_whatever_ended_just_before() -> None:
    idleness = Idleness(0.0)
    ended = replace(STATS, ended={"stop": 1})
    idleness.release(ended)
    assert idleness.seconds(ended, 1.0) == LONG_S
    assert idleness.seconds(replace(ended, waiting=1), 2.0) == 0, "somebody asks for it again"
    assert idleness.seconds(replace(STATS, ended={"stop": 2}), 3.0) == 0
    assert idleness.seconds(replace(STATS, ended={"stop": 2}), 4.0) == 1


def test_a_request_that_runs_at_its_release_ends_first() -> None:
    idleness = Idleness(0.0)
    idleness.release(replace(STATS, running=1))
    assert idleness.seconds(replace(STATS, running=1), 1.0) == 0
    assert idleness.seconds(replace(STATS, ended={"stop": 1}), 2.0) == LONG_S
    idleness.wanted(3.0)
    assert idleness.seconds(replace(STATS, ended={"stop": 1}), 4.0) == 1

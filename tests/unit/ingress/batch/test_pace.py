"""When a batch that waits behind everybody is in a hurry."""

from __future__ import annotations

from serve_app.ingress.batch.pace import Pace


def test_the_pace_so_far_says_whether_it_will_be_in_time() -> None:
    pace = Pace(now=0.0, deadline=100.0, n_left=10)
    assert not pace.runs_out(9.0)
    pace.answered(2)
    assert not pace.runs_out(10.0), "8 lines take 50 s with the margin, of 90"
    assert pace.runs_out(40.0), "8 lines take 200 s, of 60"


def test_it_stays_in_a_hurry() -> None:
    pace = Pace(now=0.0, deadline=100.0, n_left=100)
    pace.answered(1)
    assert pace.runs_out(10.0)
    pace.answered(98)
    assert pace.runs_out(11.0)


def test_nothing_answered_for_a_tenth_of_the_time_is_too_slow() -> None:
    pace = Pace(now=0.0, deadline=100.0, n_left=10)
    assert not pace.runs_out(10.0)
    assert pace.runs_out(10.1)

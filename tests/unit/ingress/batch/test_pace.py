"""When a batch that waits behind everybody is in a hurry."""

from __future__ import annotations

from serve_app.ingress.batch.window import BatchPace


def test_the_best_pace_so_far_says_whether_it_will_be_in_time() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=101)
    pace.answered(1, 10.0)
    pace.answered(10, 20.0)
    assert not pace.runs_out(300.0), "90 lines take 135 s with the margin"
    assert not pace.runs_out(864.0)
    assert pace.runs_out(870.0)


def test_a_batch_that_catches_up_is_in_no_hurry_any_more() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=101)
    pace.answered(1, 10.0)
    assert not pace.runs_out(249.0), "its time has only begun"
    assert pace.runs_out(251.0)
    pace.answered(50, 260.0)
    assert not pace.runs_out(270.0)


def test_without_a_pace_it_waits_for_half_of_its_time() -> None:
    pace = BatchPace(now=0.0, deadline=100.0, n_left=10)
    assert not pace.runs_out(50.0)
    assert pace.runs_out(50.1)


def test_in_the_last_tenth_it_is_in_a_hurry_all_the_same() -> None:
    pace = BatchPace(now=0.0, deadline=1000.0, n_left=200)
    pace.answered(100, 10.0)
    assert not pace.runs_out(899.0)
    assert pace.runs_out(901.0)

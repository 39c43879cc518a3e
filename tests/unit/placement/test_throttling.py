"""When a CPU quota slows a replica down."""

from __future__ import annotations

from serve_app.placement.throttling import ThrottleWatch


def test_growth_is_told_once_a_minute() -> None:
    watch = ThrottleWatch(5.0, now=100)
    assert watch.look(5.0, 1.5, now=105) is None
    assert watch.look(6.25, 1.5, now=110) == (
        "The CPU quota of 1.5 cores has withheld 1.2 s of CPU time in the last 10 s: "
        "raise it, or give this replica fewer threads."
    )
    assert watch.look(9.0, 1.5, now=169) is None
    told = watch.look(9.25, None, now=170)
    assert told is not None
    assert told.startswith("The CPU quota has withheld 3.0 s of CPU time in the last 60 s:")
    assert watch.look(9.25, None, now=400) is None

"""The table of what accounting costs."""

from __future__ import annotations

from loadtests.compare.accounting import OFF, ON, report


def test_ratios_above_one_are_better_on() -> None:
    rounds = [
        {
            (4, OFF): {"tokens_per_s": 100.0, "itl_p99_ms": 50.0},
            (4, ON): {"tokens_per_s": 99.0 + i, "itl_p99_ms": 100.0},
        }
        for i in range(3)
    ]
    speed, gaps = (line.split("|")[-2].strip() for line in report(rounds).splitlines()[-2:])
    assert speed == "1.00 (0.99-1.01)"
    assert gaps == "0.50 (0.50-0.50)"

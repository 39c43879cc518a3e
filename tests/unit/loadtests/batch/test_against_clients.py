"""Speeds once lines are in full swing."""

from __future__ import annotations

import time

import pytest

from loadtests.batch import against_clients


class Clock:
    """Time that passes where somebody sleeps; so many tokens a second are counted, none at first."""

    def __init__(self, first_s: float, per_s: float) -> None:
        self.now, self._first_s, self._per_s = 100.0, first_s, per_s

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def count(self) -> int:
        return round(max(0.0, self.now - 100.0 - self._first_s) * self._per_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(20.0, 50.0)
    monkeypatch.setattr(time, "sleep", made.sleep)
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


def test_what_comes_before_the_full_swing_does_not_count(clock: Clock) -> None:
    assert against_clients.tokens_per_s(clock.count, 4, 40.0) == pytest.approx(50.0)
    assert clock.now == pytest.approx(100 + 20 + 2 * 4 * 64 / 50 + 40, abs=0.3)


def test_lines_that_do_not_get_on_are_an_error(clock: Clock) -> None:
    with pytest.raises(TimeoutError):
        against_clients.tokens_per_s(lambda: 0, 4, 40.0)

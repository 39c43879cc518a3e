"""The time of saving and restoring states, and when streams can wait for it. Decoder thread only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.engine.core.step_budget import StepBudget

# Seconds for a byte until that was measured: machines are faster.
_FIRST_GUESS_S = 2e-9
# What earlier copies count beside the newest one.
_OLDER = 0.8
# How fast a bad measurement is forgotten, each time that it forbids a copy: it may have been a hiccup.
_FORGIVING = 0.95


@dataclass(slots=True)
class CopySpeed:
    """The speed of one kind of copies, learned by their bytes: small ones say little."""

    seconds: float = _FIRST_GUESS_S
    n_bytes: float = 1.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        self.seconds = _OLDER * self.seconds + seconds
        self.n_bytes = _OLDER * self.n_bytes + n_bytes

    def forecast_s(self, n_bytes: int) -> float:
        return n_bytes * self.seconds / self.n_bytes


class CopyBudget:
    """The forecasts of copies, and whether a step's budget has time for them."""

    def __init__(self, budget: StepBudget) -> None:
        self._budget = budget
        self.saves = CopySpeed()
        self.restores = CopySpeed()

    @contextmanager
    def making(self, speed: CopySpeed, n_bytes: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        speed.observe(n_bytes, time.monotonic() - began)

    def allows(self, speed: CopySpeed, n_bytes: int) -> bool:
        """Whether streams can ever wait for a copy of that size, in a step that makes no other."""
        if self._budget.allows(speed.forecast_s(n_bytes)):
            return True
        speed.seconds *= _FORGIVING
        return False

    def fits(self, seconds: float) -> bool:
        """Whether copies of so many seconds fit into what is left of this step."""
        return self._budget.fits(seconds)

    def can_wait(self, restore_s: float, save_s: float) -> bool:
        """Whether another step has room for what this one has not: both, or the first one alone if both
        never fit. The next step reserves that time."""
        both_s = restore_s + save_s
        seconds = both_s if self._budget.allows(both_s) else restore_s
        waits = seconds > 0 and not self._budget.fits(seconds)
        if waits:
            self._budget.reserved_s = max(self._budget.reserved_s, seconds)
        return waits

"""How long it takes to save and restore states, and when streams can wait for that. Decoder thread only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Seconds for a byte until that was measured: machines are faster.
_FIRST_GUESS_S = 2e-9
# What earlier copies count beside the newest one.
_OLDER = 0.8
# How fast a bad measurement is forgotten, each time that it forbids a copy: it may have been a hiccup.
_FORGIVING = 0.95


@dataclass(slots=True)
class CopySpeed:
    """Of one kind of copies, learned by their bytes: small ones say little."""

    seconds: float = _FIRST_GUESS_S
    n_bytes: float = 1.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from one."""
        self.seconds = _OLDER * self.seconds + seconds
        self.n_bytes = _OLDER * self.n_bytes + n_bytes

    def forecast_s(self, n_bytes: int) -> float:
        """Seconds that so many bytes will take."""
        return n_bytes * self.seconds / self.n_bytes


@dataclass(slots=True)
class CopyBudget:
    """The time that copies may take between two tokens of a stream: `max_stall_s`; None sets no
    bound."""

    max_stall_s: float | None = None
    saves: CopySpeed = field(default_factory=CopySpeed)
    restores: CopySpeed = field(default_factory=CopySpeed)
    spent_s: float = 0.0
    """On copies since the last step's end."""

    @contextmanager
    def making(self, speed: CopySpeed, n_bytes: int) -> Iterator[None]:
        """A copy is made: learn how long that takes."""
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        speed.observe(n_bytes, seconds)
        self.spent_s += seconds

    def stepped(self) -> None:
        """All streams have another token."""
        self.spent_s = 0.0

    def allows(self, speed: CopySpeed, n_bytes: int) -> bool:
        """Whether streams can ever wait for a copy of that size, in a step that makes no other."""
        if self.max_stall_s is None or speed.forecast_s(n_bytes) <= self.max_stall_s:
            return True
        speed.seconds *= _FORGIVING
        return False

    def fits(self, seconds: float) -> bool:
        """Whether copies of so many seconds fit into what is left of this step."""
        return self.max_stall_s is None or self.spent_s + seconds <= self.max_stall_s

    def can_wait(self, restore_s: float, save_s: float) -> bool:
        """Whether another step has room for what this one has not: both, or the first one alone if both
        never fit."""
        both_s = restore_s + save_s
        seconds = both_s if both_s <= (self.max_stall_s or 0.0) else restore_s
        return seconds > 0 and not self.fits(seconds)

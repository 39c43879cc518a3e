"""Detects that a CPU quota slows this process down: nothing else tells."""

from __future__ import annotations

_SILENCE_S = 60.0


class ThrottleWatch:
    """Turns readings of `machine.throttled_s` into log lines, one a minute at most. One thread."""

    def __init__(self, throttled_s: float, now: float) -> None:
        """Time withheld before `now` (seconds of any clock) does not count."""
        self._told_s = throttled_s
        self._since = self._silent_until = now

    def look(self, throttled_s: float, quota: float | None, now: float) -> str | None:
        """The line to log, if CPU time was withheld since the last one; `quota` is in cores."""
        withheld = throttled_s - self._told_s
        if withheld <= 0 or now < self._silent_until:
            return None
        named = "The CPU quota" if quota is None else f"The CPU quota of {quota:g} cores"
        line = (
            f"{named} has withheld {withheld:.1f} s of CPU time in the last {now - self._since:.0f} s: "
            "raise it, or give this replica fewer threads."
        )
        self._told_s, self._since, self._silent_until = throttled_s, now, now + _SILENCE_S
        return line

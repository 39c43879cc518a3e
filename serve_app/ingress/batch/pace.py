"""Forecasts whether a batch will be done in time. Pure: callers say what time it is."""

from __future__ import annotations

from collections import deque

_LOOK_BACK_S = 10.0
"""The shortest time over which a pace is measured."""
_MARGIN = 1.5
"""The factor by which the rest may take longer than at the best pace so far."""
_LAST = 0.1
"""The last part of its time, in which a batch is promoted whatever its pace."""
_UNKNOWN = 0.5
"""The last part of its time, in which a batch is promoted if its pace is not known yet."""
_PATIENT = 0.25
"""The first part of its time, in which a batch is never promoted: its first answers come late, and all
together."""


class BatchPace:
    """The pace of one batch. Times are seconds of one clock.

    The best pace counts, and not the average: a batch that gets nothing done by day may be done by night.
    """

    def __init__(self, now: float, deadline: float, n_left: int) -> None:
        """`n_left` lines have no answer."""
        self._deadline = deadline
        self._window_s = deadline - now
        self._n_left = n_left
        self._best = 0.0
        """Lines a second."""
        self._seen = deque([(now, n_left)])

    def answered(self, n: int, now: float) -> None:
        """Note that `n` more lines have answers."""
        self._n_left -= n
        self._seen.append((now, self._n_left))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _LOOK_BACK_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since >= _LOOK_BACK_S:
            self._best = max(self._best, (before - self._n_left) / (now - since))

    def runs_out(self, now: float) -> bool:
        """Whether the deadline is nearer than the last answer would be at that pace."""
        left_s = self._deadline - now
        if left_s > (1 - _PATIENT) * self._window_s:
            return False
        if not self._best:
            return left_s < _UNKNOWN * self._window_s
        return left_s < max(_MARGIN * self._n_left / self._best, _LAST * self._window_s)

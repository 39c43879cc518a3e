"""Whether a batch will be done in time. Pure: it is told what time it is."""

from __future__ import annotations

from collections import deque

_LOOK_BACK_S = 10.0
"""A pace is what was answered in so long at least."""
_MARGIN = 1.5
"""How much longer the rest may take than at the best pace so far."""
_LAST = 0.1
"""In so much of its time, the last, a batch is in a hurry whatever its pace."""
_UNKNOWN = 0.5
"""And in so much of it, if no pace is known yet."""
_PATIENT = 0.25
"""In so much of it, the first, it is in none: its first answers come late, and all together."""


class BatchPace:
    """Of one batch, by one who works on it. Times are seconds of one clock.

    The best pace counts, and not the average: a batch that gets nothing done by day may be done by night.
    """

    def __init__(self, now: float, deadline: float, n_left: int) -> None:
        """There are so many lines without an answer."""
        self._deadline = deadline
        self._window_s = deadline - now
        self._n_left = n_left
        self._best = 0.0
        """In lines a second."""
        self._seen = deque([(now, n_left)])

    def answered(self, n: int, now: float) -> None:
        """So many more lines have answers."""
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

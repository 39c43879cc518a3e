"""Whether a batch will be done in time. Pure: it is told what time it is."""

from __future__ import annotations

_MARGIN = 1.25
"""How much longer the rest may take than the pace so far says."""
_FIRST_PART = 0.1
"""Of the time there is, what must have passed before nothing answered means that it is too slow."""


class Pace:
    """Of one batch, by one who works on it. Times are seconds of one clock."""

    def __init__(self, now: float, deadline: float, n_left: int) -> None:
        """There are so many lines without an answer."""
        self._began, self._deadline = now, deadline
        self._n_left, self._n_answered = n_left, 0
        self._rises = False

    def answered(self, n: int) -> None:
        """So many more lines have answers."""
        self._n_answered += n
        self._n_left -= n

    def runs_out(self, now: float) -> bool:
        """Whether, at the pace so far, the deadline comes before the last answer. Once that is so, it
        stays so: with less effort it would be so again."""
        passed_s, left_s = now - self._began, self._deadline - now
        if self._n_answered:
            needed_s = _MARGIN * self._n_left * passed_s / self._n_answered
            self._rises |= needed_s > left_s
        else:
            self._rises |= passed_s > _FIRST_PART * (passed_s + left_s)
        return self._rises

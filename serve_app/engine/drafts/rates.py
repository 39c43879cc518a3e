"""How many proposed tokens are right. Pure: no model, no threads, no clock."""

from __future__ import annotations

_FIRST_GUESS = 0.7
# Weight of the newest proposed token in a sequence's rate, and in that of all.
_NEWEST, _NEWEST_OF_ALL = 0.1, 0.04
# How fast what all sequences showed is forgotten, at each new one: other texts may come.
_FORGOTTEN = 0.05
# How fast a bad rate is forgotten, at each step without a draft: the text may have changed. A hundred steps
# bring two thirds of it back.
_FORGIVING = 0.01
# The part of the time that may be lost on trials; how many are granted at first, and can be saved up.
_LOSABLE = 0.01
_FIRST_TRIALS, _MOST_TRIALS = 3, 4


class Allowance:
    """Seconds that may be lost on drafts that are only tried, to learn how many are right. Decoder thread
    only.

    Right tokens are given back. So a good draft model is tried until it is known to be good, and a bad one
    takes no more than a small part of the time.
    """

    def __init__(self) -> None:
        self._left_s: float | None = None

    def passed(self, seconds: float) -> None:
        """So much time went by without a draft."""
        if self._left_s is not None:
            self._left_s += _LOSABLE * seconds

    def grants(self, loss_s: float) -> bool:
        """Whether a trial may be made that loses so much if it is wrong."""
        if self._left_s is None:
            self._left_s = _FIRST_TRIALS * loss_s
        self._left_s = min(self._left_s, _MOST_TRIALS * loss_s)
        return self._left_s >= loss_s

    def changes(self, seconds: float) -> None:
        """So much was saved by a trial, or lost."""
        if self._left_s is not None:
            self._left_s += seconds


class CommonRate:
    """The rate of all sequences: what a new one is expected to have. Decoder thread only."""

    def __init__(self) -> None:
        self.acceptance = _FIRST_GUESS
        """Running rate of proposed tokens that were right."""

    def begin(self) -> SequenceRate:
        """A new sequence's rate."""
        self.acceptance += _FORGOTTEN * (_FIRST_GUESS - self.acceptance)
        return SequenceRate(self)

    def record(self, right: bool) -> None:
        """One proposed token was right, or was not."""
        self.acceptance += _NEWEST_OF_ALL * (right - self.acceptance)


class SequenceRate:
    """The rate of one sequence. Decoder thread only."""

    def __init__(self, common: CommonRate) -> None:
        self._common = common
        self.acceptance = common.acceptance
        """Running rate of proposed tokens that were right."""

    def expected(self, n_drafted: int) -> float:
        """Tokens that a batch over so many proposed ones, and the one before them, is worth."""
        return float(sum(self.acceptance**n for n in range(n_drafted + 1)))

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """Learn from a draft of which the first `n_accepted` were right; the rest went unseen."""
        for right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
            self.acceptance += _NEWEST * (right - self.acceptance)
            self._common.record(right)

    def unused(self) -> None:
        """A step had no draft for it. It becomes what all have, no better: where drafts are always wrong,
        hardly any is tried."""
        better = max(0.0, self._common.acceptance - self.acceptance)
        self.acceptance += _FORGIVING * better

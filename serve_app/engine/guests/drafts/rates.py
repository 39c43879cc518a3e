"""How many drafted tokens are right. Pure: no model, no threads, no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AcceptanceRate:
    """The running rate of drafted tokens that were right. Decoder thread only.

    A rate that is thought too good is tried and known, one that is thought too bad never is. So a rate
    begins high, and rises while no draft is made.
    """

    acceptance: float
    newest: float = 0.1
    """Weight of the newest drafted token."""
    forgiving: float = 0.01
    """How fast a bad rate is forgotten, at each step without a draft: the text may have changed. By a
    hundredth, a hundred steps bring two thirds of it back."""

    def expected_tokens(self, n_drafted: int) -> float:
        """Tokens that a batch over so many drafted ones, and the one before them, is worth."""
        if self.acceptance >= 1:
            return n_drafted + 1.0
        return (1 - self.acceptance ** (n_drafted + 1)) / (1 - self.acceptance)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """Learn from a draft of which the first `n_accepted` were right; the rest went unseen."""
        for right in [True] * n_accepted + [False] * (n_accepted < n_drafted):
            self.acceptance += self.newest * (right - self.acceptance)

    def forgive(self, likely: float) -> None:
        """A step had no draft: a rate below the likely one comes closer to it."""
        self.acceptance += self.forgiving * max(0.0, likely - self.acceptance)

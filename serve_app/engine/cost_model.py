"""How long a forward pass takes, on this machine with this model. Pure: no model, no threads, no clock.

Measured at the start and corrected while running. A pass is either one token of each of some
sequences, or a chunk of one prompt: the two are computed by calls of their own, so a step's time is
their sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

# Weight of the newest step in what is known of its kind.
_NEWEST = 0.1
# A step that took so many times longer or shorter than expected is no news about this machine.
_OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class Measurements:
    """Seconds that single passes took."""

    decode_s: Mapping[int, float] = field(default_factory=dict)
    """By number of sequences that get one token each; empty if passes cost nothing worth counting."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """By number of a prompt's rows, with an empty cache before them."""
    row_and_cached_token_s: float = 0.0
    """What each row of a prompt costs more for each token that stands in the cache before it."""


class CostModel:
    """Predicts passes from measurements, and learns from those that follow. Decoder thread only."""

    def __init__(self, measured: Measurements) -> None:
        self._decode = _Curve(measured.decode_s)
        self._prefill = _Curve(measured.prefill_s)
        self._row_and_cached_token_s = measured.row_and_cached_token_s
        self._prefill_drift = 1.0

    def decode_s(self, n_rows: int) -> float:
        """Seconds to compute one token of each of `n_rows` sequences."""
        return self._decode.at(n_rows)

    def prefill_s(self, n_rows: int, n_past: int) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache."""
        attention = n_rows * n_past * self._row_and_cached_token_s
        return self._prefill_drift * (self._prefill.at(n_rows) + attention)

    def chunk(self, n_pending: int, n_past: int, *, beside_s: float, within_s: float) -> int:
        """How many of a prompt's next rows to compute in a step that takes `beside_s` anyway and
        should take `within_s` at most: those that get the prompt on fastest; 0 if none fit.

        Only numbers of rows that were measured come into question, and all that is left: kernels
        have steps, and 63 rows can cost twice what 64 do.
        """
        sizes = [size for size in self._prefill.measured if size < n_pending] + [n_pending]
        times = {size: beside_s + self.prefill_s(size, n_past) for size in sizes}
        fitting = [size for size in sizes if times[size] <= within_s]
        return max(fitting, key=lambda size: size / (times[size] or 1e-9), default=0)

    def smallest_chunk(self, n_pending: int) -> int:
        """The fewest of a prompt's rows that are worth a pass."""
        return min([n_pending, *self._prefill.measured[:1]])

    def saw_decode(self, n_rows: int, seconds: float) -> None:
        """Learn from a pass over one token of each of `n_rows` sequences."""
        self._decode.learn(n_rows, seconds)

    def saw_prefill(self, n_rows: int, n_past: int, seconds: float) -> None:
        """Learn from a pass over a chunk of one prompt."""
        expected = self.prefill_s(n_rows, n_past)
        if expected and 1 / _OUTLIER < seconds / expected < _OUTLIER:
            self._prefill_drift *= 1 + _NEWEST * (seconds / expected - 1)

    def curve(self) -> dict[str, dict[int, float]]:
        """What is known now, in milliseconds by number of rows."""
        return {
            "decode_ms": {n: round(1000 * self.decode_s(n), 1) for n in self._decode.measured},
            "prefill_ms": {
                n: round(1000 * self.prefill_s(n, 0), 1) for n in self._prefill.measured
            },
        }


class _Curve:
    """Seconds by number of rows: straight between what was measured, and beyond."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.measured = sorted(points)
        self._seconds = [points[n] for n in self.measured]

    def at(self, n_rows: int) -> float:
        if not self.measured:
            return 0.0
        right = bisect_left(self.measured, n_rows)
        if right == len(self.measured):
            return self._seconds[-1] * n_rows / self.measured[-1]
        if right == 0 or self.measured[right] == n_rows:
            return self._seconds[right]
        left = right - 1
        part = (n_rows - self.measured[left]) / (self.measured[right] - self.measured[left])
        return self._seconds[left] + part * (self._seconds[right] - self._seconds[left])

    def learn(self, n_rows: int, seconds: float) -> None:
        """Move the nearest measured point by what this pass took more or less than expected."""
        expected = self.at(n_rows)
        if expected and 1 / _OUTLIER < seconds / expected < _OUTLIER:
            nearest = min(range(len(self.measured)), key=lambda i: abs(self.measured[i] - n_rows))
            self._seconds[nearest] *= 1 + _NEWEST * (seconds / expected - 1)

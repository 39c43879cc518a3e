"""One curve of the cost model, and how it learns. Pure: no model, no clock.

A batch takes `speed * (base + slope * depth)`: the base for its number of rows, the slope for each token
that stands in the cache before them. Each batch tells one number about all of these, so they are estimated
by a Kalman filter of relative errors, whose covariances are left out: each number moves by its share of
the forecast and by how little is known of it. Source: Puskorius and Feldkamp, "Decoupled Extended Kalman
Filter Training of Feedforward Layered Networks", 1991.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Batches that are forecast rightly differ from that by so much, as a variance of the relative error.
_NOISE = 0.08**2
# An error counts up to so many standard deviations: more may be a hiccup. One that stays is learnt anyway.
_MOST_DEVIATIONS = 2.0
# Where no slope was measured, a depth of so many tokens may double what a batch takes.
_DOUBLING_DEPTH = 4_000
# No base gets below this part of what was measured: hiccups must not make batches cost nothing.
_LEAST_BASE = 0.05


@dataclass(slots=True)
class Estimate:
    """A number that is learnt, and how sure it is."""

    value: float
    variance: float
    drift: float
    """Variance that it gains with every batch: what was not seen for long is old."""
    most: float
    """Variance that it gains at most."""
    seen: int = 0

    def age(self, now: int) -> None:
        """Forget a little, for the batches since it was last seen."""
        grown = self.variance + self.drift * (now - self.seen)
        self.variance = max(self.variance, min(self.most, grown))
        self.seen = now


def learn(shares: Iterable[tuple[Estimate, float]], error: float, now: int) -> None:
    """Move the estimates by a relative error of the forecast, the logarithm of what was by what was
    expected. A share says how much the forecast grows, relatively, with the estimate. `now` counts batches.
    """
    known = [(estimate, share) for estimate, share in shares if share]
    for estimate, _ in known:
        estimate.age(now)
    variance = _NOISE + sum(share**2 * estimate.variance for estimate, share in known)
    most = _MOST_DEVIATIONS * math.sqrt(variance)
    for estimate, share in known:
        gain = estimate.variance * share / variance
        estimate.value += gain * max(-most, min(most, error))
        estimate.variance *= 1 - gain * share


class Speed:
    """How much longer all batches take than when they were measured: neighbours, throttling, a quota."""

    def __init__(self) -> None:
        self.log = Estimate(0.0, 0.005, 0.002, 0.1)
        self.n_seen = 0

    @property
    def factor(self) -> float:
        """To multiply measured seconds by."""
        return math.exp(self.log.value)


class Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(
        self, shallow: Mapping[int, float], deep: Mapping[int, float], depth: int, speed: Speed
    ) -> None:
        self.measured = sorted(shallow)
        self._speed = speed
        self._seconds = [shallow[n] for n in self.measured]
        known = sorted(n for n in deep if n in shallow)
        slopes = [max(0.0, deep[n] - shallow[n]) / max(1, depth) for n in known]
        self._slopes = [_by_rows(known, slopes, n) for n in self.measured]
        row_s = min((shallow[n] / n for n in self.measured), default=0.0)
        self._scales = [
            max(slope, n * row_s / _DOUBLING_DEPTH)
            for n, slope in zip(self.measured, self._slopes, strict=True)
        ]
        self._bases = [Estimate(1.0, 0.02, 2e-5, 0.05) for _ in self.measured]
        self._deeper = [Estimate(0.0, 0.1, 5e-5, 0.1) for _ in self.measured]
        self._all_deeper = Estimate(0.0, 1.0, 1e-4, 1.0)

    def at(self, n_rows: int, n_past: float) -> float:
        """Seconds of a batch; 0 if none was measured."""
        parts = _parts(self.measured, n_rows)
        return self._speed.factor * sum(
            weight * (self._base_s(i) + n_past * self._slope_s(i)) for i, weight in parts
        )

    def learn(self, n_rows: int, n_past: float, seconds: float) -> None:
        """See how long a batch took."""
        expected = self.at(n_rows, n_past)
        if not expected or seconds <= 0:
            return
        self._speed.n_seen += 1
        scale = self._speed.factor / expected
        shares = [(self._speed.log, 1.0)]
        deeper = 0.0
        for i, weight in _parts(self.measured, n_rows):
            shares.append((self._bases[i], scale * weight * self._seconds[i]))
            shares.append((self._deeper[i], scale * weight * n_past * self._scales[i]))
            deeper += shares[-1][1]
        shares.append((self._all_deeper, deeper))
        learn(shares, math.log(seconds / expected), self._speed.n_seen)

    def _base_s(self, i: int) -> float:
        return max(_LEAST_BASE, self._bases[i].value) * self._seconds[i]

    def _slope_s(self, i: int) -> float:
        more = self._all_deeper.value + self._deeper[i].value
        return max(0.0, self._slopes[i] + more * self._scales[i])


def _parts(points: Sequence[int], x: int) -> list[tuple[int, float]]:
    """Which points the value at x is made of, and how much of each: straight between the points, the
    first one's before, growing with x beyond."""
    if not points:
        return []
    right = bisect_left(points, x)
    if right == len(points):
        return [(right - 1, x / points[-1])]
    if right == 0 or points[right] == x:
        return [(right, 1.0)]
    part = (x - points[right - 1]) / (points[right] - points[right - 1])
    return [(right - 1, 1 - part), (right, part)]


def _by_rows(points: Sequence[int], values: Sequence[float], x: int) -> float:
    """The same for slopes, which fewer rows have in proportion."""
    if points and x < points[0]:
        return values[0] * x / points[0]
    return sum(weight * values[i] for i, weight in _parts(points, x))

"""One curve of the cost model. Pure: no model, no clock.

A batch takes `speed * (base + slope * depth)`: the base for its number of rows, the slope for each token
that stands in the cache before them. All three are learnt, the speed together with the other curves.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from serve_app.engine.autotune.kalman import Estimates
from serve_app.engine.autotune.trials import doubtful

# Where no slope was measured, a depth of so many tokens may double what a batch takes.
_DOUBLING_DEPTH = 4_000
# Seconds of batches of one size, of which one is learnt from.
_LEARN_S = 0.1
# Variances of what was measured: it is wrong by a seventh, or, where it is doubted, by anything.
_TRUSTED, _TRUSTED_SLOPE, _DOUBTED = 0.02, 0.1, 1.0


class Speed:
    """How much longer all batches take than when they were measured: neighbours, throttling, a
    quota."""

    def __init__(self) -> None:
        self.estimates = Estimates()
        self.index = self.estimates.add(0.0, 0.005, 0.0007, jump=0.03)

    @property
    def factor(self) -> float:
        """To multiply measured seconds by."""
        return math.exp(self.estimates.values[self.index])


class Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(
        self, shallow: Mapping[int, float], deep: Mapping[int, float], depth: int, speed: Speed
    ) -> None:
        self.measured = sorted(shallow)
        self.doubted = doubtful(shallow)
        """Numbers of rows whose measurement looks like a hiccup."""
        shallow = {**shallow, **_as_more_rows(shallow, self.doubted)}
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
        add = speed.estimates.add
        self._bases = [
            add(0.0, _DOUBTED if n in self.doubted else _TRUSTED, 2e-5) for n in self.measured
        ]
        added = {n: deep[n] - shallow[n] for n in known}
        doubted_slopes = [n for n in known if n in doubtful(added) or added[n] <= 0]
        self._deeper = [
            add(0.0, _DOUBTED if n in doubted_slopes else _TRUSTED_SLOPE, 5e-5)
            for n in self.measured
        ]
        self._all_deeper = add(0.0, 1.0, 1e-4)
        self._unlearnt_s: dict[int, float] = {}
        """By number of rows, what batches took since one was learnt from."""

    def at(self, n_rows: int, n_past: float) -> float:
        """Seconds of a batch; 0 if none was measured."""
        parts, attending = _parts(self.measured, n_rows), n_past * self._depth_share(n_rows)
        return self._speed.factor * sum(
            weight * (self._base_s(i) + attending * self._slope_s(i)) for i, weight in parts
        )

    def _depth_share(self, n_rows: int) -> float:
        """The part of the first point's slope that fewer rows have: the weights are read for one row
        as for eight, but each row attends for itself."""
        return min(1.0, n_rows / self.measured[0]) if self.measured else 1.0

    def learn(self, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from the time of a batch. Of short batches of one size, one in `_LEARN_S` counts: all
        tell the same, and learning takes time, too."""
        unlearnt_s = self._unlearnt_s.get(n_rows, _LEARN_S) + seconds
        self._unlearnt_s[n_rows] = unlearnt_s
        if unlearnt_s < _LEARN_S and n_rows not in self.doubted:
            return
        self._unlearnt_s[n_rows] = 0.0
        expected = self.at(n_rows, n_past)
        if not expected or seconds <= 0:
            return
        scale, deeper = self._speed.factor / expected, 0.0
        shares = {self._speed.index: 1.0}
        for i, weight in _parts(self.measured, n_rows):
            shares[self._bases[i]] = scale * weight * self._base_s(i)
            attending = n_past * self._depth_share(n_rows)
            shares[self._deeper[i]] = scale * weight * attending * self._scales[i]
            deeper += shares[self._deeper[i]]
        shares[self._all_deeper] = deeper
        self._speed.estimates.learn(shares, seconds / expected - 1)

    def _base_s(self, i: int) -> float:
        return math.exp(self._speed.estimates.values[self._bases[i]]) * self._seconds[i]

    def _slope_s(self, i: int) -> float:
        values = self._speed.estimates.values
        more = values[self._all_deeper] + values[self._deeper[i]]
        return max(0.0, self._slopes[i] + more * self._scales[i])


def _parts(points: Sequence[int], x: int) -> list[tuple[int, float]]:
    """The points that the value at x is made of, and the part of each: straight between the points, the
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


def _as_more_rows(seconds: Mapping[int, float], doubted: Sequence[int]) -> dict[int, float]:
    """The doubted numbers of rows, with the time of the fastest larger batch where that is less: what
    is thought too fast is tried and learnt, what is thought too slow never is."""
    return {n: min(seconds[m] for m in seconds if m >= n) for n in doubted}


def _by_rows(points: Sequence[int], values: Sequence[float], x: int) -> float:
    """The points for slopes, which fewer rows have in proportion."""
    if points and x < points[0]:
        return values[0] * x / points[0]
    return sum(weight * values[i] for i, weight in _parts(points, x))

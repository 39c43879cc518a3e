"""The cost model: how long a batch takes with this model on this machine. Pure: no model, no clock.

A batch is either some tokens of each of some decoding sequences, or a chunk of one prompt, and a step's
time is their sum; in a unified cache the two share one. It takes `speed * (base + slope * depth)`: the base
for its number of rows, the slope for each token that stands in the cache before them. In a unified cache
those of other sequences count, too, as far as the kernel does not skip what is masked. All numbers are
measured at the start and learned while running.

A Kalman filter learns them from the relative errors of forecasts. It knows how unsure each number is, and
which were wrong together. Sources: Kalman, "A New Approach to Linear Filtering and Prediction Problems",
1960; errors are bounded as in Huber, "Robust Estimation of a Location Parameter", 1964.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Batches that are forecast rightly differ from that by so much, as a variance of the relative error.
_NOISE = 0.08**2
# An error counts up to so many standard deviations: more may be a hiccup. One that stays is learnt anyway.
_MOST_DEVIATIONS = 2.0
# Where no slope was measured, a depth of so many tokens may double what a batch takes.
_DOUBLING_DEPTH = 4_000
# Seconds of batches of one size, of which one is learnt from.
_LEARN_S = 0.1
# Variances of what was measured: it is wrong by a seventh, or, where it is doubted, by anything.
_TRUSTED, _TRUSTED_SLOPE, _DOUBTED = 0.02, 0.1, 1.0
# Doubted are batches that take so many times longer than a larger one, or, by row, than a smaller one.
_SLOWER, _SLOWER_BY_ROW = 1.1, 1.2
# Up to so many rows, kernels like multiples of the second number; beyond the last one, of _LARGE_STEP.
_ROW_STEPS = ((64, 4), (128, 8), (256, 16))
_LARGE_STEP = 32
# Fewer rows than are measured, for prompts so deep that those would take too long; and how much longer
# than one row the smallest chunk may take.
_FEW_ROWS, _HARDLY_LONGER = (1, 2, 4), 1.25
# A split that gains less than this part is noise.
_LEAST_GAIN = 0.05
# Weight of the newest batch with drafts of several sequences.
_NEWEST = 0.1
# What was planned is planned anew after so many batches, as the curve may have moved.
_PLANS_KEPT = 64


class Estimates:
    """Numbers that are learned from forecasts' errors. The first one is the speed: how much longer all
    batches take than when they were measured (neighbours, throttling, a quota), as a logarithm."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._covariance = np.zeros((0, 0))
        self._drift, self._jump = np.zeros(0), np.zeros(0)
        self._most = np.zeros(0)
        self._speed = self.add(0.005, 0.0007, jump=0.03)

    @property
    def speed(self) -> float:
        """The factor of measured seconds."""
        return math.exp(self.values[self._speed])

    def add(self, variance: float, drift: float, jump: float = 0.0) -> int:
        """Add a number, 0 at first, and return its index. It becomes unsure again by `drift` with each
        error, until it is as unsure as at the beginning; and by `jump` with each that is too large to be
        noise."""
        self.values.append(0.0)
        n = len(self.values)
        self._covariance = np.pad(self._covariance, (0, 1))
        self._covariance[-1, -1] = variance
        self._drift = np.append(self._drift, drift)
        self._jump = np.append(self._jump, jump)
        self._most = np.append(self._most, variance)
        return n - 1

    def learn(self, shares: Mapping[int, float], error: float) -> None:
        """Learn from a forecast's relative error. A share says how much the forecast grows, relatively,
        with that number; with the speed, it grows as much as that."""
        shares = {self._speed: 1.0, **shares}
        diagonal = np.einsum("ii->i", self._covariance)
        np.add(diagonal, self._drift, out=diagonal, where=diagonal < self._most)
        indices, parts = list(shares), np.array(list(shares.values()))
        due = parts @ self._covariance[indices]  # it is symmetric
        variance = _NOISE + float(parts @ due[indices])
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        moved = due * (max(-most, min(most, error)) / variance)
        self.values = (moved + self.values).tolist()
        if abs(error) <= most:
            self._covariance -= np.outer(due, due) / variance
        else:  # a hiccup, which tells nothing, or something has changed
            diagonal += self._jump


class Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(
        self,
        shallow: Mapping[int, float],
        deep: Mapping[int, float],
        depth: int,
        estimates: Estimates,
    ) -> None:
        self.measured = sorted(shallow)
        self._doubted = doubtful(shallow)
        # What is thought too fast is tried and learned, what is thought too slow never is.
        shallow = {
            n: min(shallow[m] for m in shallow if m >= n) if n in self._doubted else shallow[n]
            for n in shallow
        }
        self._estimates = estimates
        self._seconds = [shallow[n] for n in self.measured]
        known = sorted(n for n in deep if n in shallow)
        slopes = [max(0.0, deep[n] - shallow[n]) / max(1, depth) for n in known]
        self._slopes = [_by_rows(known, slopes, n) for n in self.measured]
        row_s = min((shallow[n] / n for n in self.measured), default=0.0)
        self._scales = [
            max(slope, n * row_s / _DOUBLING_DEPTH)
            for n, slope in zip(self.measured, self._slopes, strict=True)
        ]
        add = estimates.add
        self._bases = [
            add(_DOUBTED if n in self._doubted else _TRUSTED, 2e-5) for n in self.measured
        ]
        added = {n: deep[n] - shallow[n] for n in known}
        doubted_slopes = [n for n in known if n in doubtful(added) or added[n] <= 0]
        self._deeper = [
            add(_DOUBTED if n in doubted_slopes else _TRUSTED_SLOPE, 5e-5) for n in self.measured
        ]
        self._all_deeper = add(1.0, 1e-4)
        self._unlearnt_s: dict[int, float] = {}
        """The seconds that batches of each number of rows took since one was learnt from."""

    def at(self, n_rows: int, n_past: float) -> float:
        """Seconds of a batch; 0 if none was measured."""
        parts, attending = _parts(self.measured, n_rows), n_past * self._depth_share(n_rows)
        return self._estimates.speed * sum(
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
        if unlearnt_s < _LEARN_S and n_rows not in self._doubted:
            return
        self._unlearnt_s[n_rows] = 0.0
        expected = self.at(n_rows, n_past)
        if not expected or seconds <= 0:
            return
        scale, deeper = self._estimates.speed / expected, 0.0
        shares: dict[int, float] = {}
        for i, weight in _parts(self.measured, n_rows):
            shares[self._bases[i]] = scale * weight * self._base_s(i)
            attending = n_past * self._depth_share(n_rows)
            shares[self._deeper[i]] = scale * weight * attending * self._scales[i]
            deeper += shares[self._deeper[i]]
        shares[self._all_deeper] = deeper
        self._estimates.learn(shares, seconds / expected - 1)

    def _base_s(self, i: int) -> float:
        return math.exp(self._estimates.values[self._bases[i]]) * self._seconds[i]

    def _slope_s(self, i: int) -> float:
        values = self._estimates.values
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


def _by_rows(points: Sequence[int], values: Sequence[float], x: int) -> float:
    if points and x < points[0]:
        return values[0] * x / points[0]
    return sum(weight * values[i] for i, weight in _parts(points, x))


def doubtful(times: Mapping[int, float]) -> list[int]:
    """The numbers of rows that may have been measured while something else ran.

    More rows take no less time, and not much more by row than fewer. Kernels with tiles break both rules,
    so what is still doubtful when it is measured again is to be believed.
    """
    sizes = sorted(times)
    least_by_row = {n: min(times[m] / m for m in sizes if m <= n) for n in sizes}
    least = {n: min(times[m] for m in sizes if m >= n) for n in sizes}
    return [
        n
        for n in sizes
        if times[n] > _SLOWER * least[n] or times[n] / n > _SLOWER_BY_ROW * least_by_row[n]
    ]


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured seconds of single batches; empty if batches cost nothing worth counting."""

    decode_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the number of sequences that get one token each, with an empty cache before them."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the number of a prompt's rows, with an empty cache before them."""
    verify_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the number of one sequence's rows that are all sampled from: a token and drafted ones."""
    depth: int = 0
    """Tokens in every slot for the next two; in a unified cache, the same cells."""
    deep_decode_s: Mapping[int, float] = field(default_factory=dict)
    deep_prefill_s: Mapping[int, float] = field(default_factory=dict)
    copy_s: float = 0.0
    """The time that copying one slot adds to the next batch."""
    masked: float = 1.0
    """The cost of a token of other sequences in a unified cache, as a part of the cost of an own
    one."""


class CostModel:
    """Predicts what batches take by a profile, and learns from every batch. Decoder thread only."""

    def __init__(self, profile: Profile) -> None:
        self.begin(profile)

    def begin(self, profile: Profile) -> None:
        """Predict by that profile from now on, and learn anew, of another kind of cache."""
        estimates, depth = Estimates(), profile.depth
        self._decode = Curve(profile.decode_s, profile.deep_decode_s, depth, estimates)
        self._prefill = Curve(profile.prefill_s, profile.deep_prefill_s, depth, estimates)
        self._verify = Curve(profile.verify_s, _deep_verify_s(profile), depth, estimates)
        self.copy_s = profile.copy_s
        """Seconds that copying a slot takes."""
        self._masked = profile.masked
        self._splits: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}
        self._retried: set[int] = set()
        self._n_seen = 0
        self._longer: dict[int, float] = {}
        """How much longer drafts of several sequences take than as many sequences do, by
        `_doublings`."""

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._decode.measured)

    def attended(self, n_past: float, n_cells: float) -> float:
        """How many tokens of its own would cost a row as much as its `n_past` and the rest of the
        `n_cells` in use in a unified cache. To be given as `n_past` to the other methods."""
        return n_past + self._masked * max(0.0, n_cells - n_past)

    def decode_s(self, n_rows: int, n_past: float = 0) -> float:
        """Seconds to compute `n_rows` tokens of decoding sequences that have `n_past` tokens each."""
        return self._decode.at(n_rows, n_past)

    def verify_s(self, n_sequences: int, n_drafted: int, n_past: float) -> float:
        """Seconds to compute the next token of each sequence, and so many drafted ones behind each."""
        n_rows = n_sequences * (n_drafted + 1)
        if n_sequences > 1 or n_drafted == 0 or not self._verify.measured:
            longer = self._longer.get(_doublings(n_rows), 1.0) if n_drafted else 1.0
            return longer * self.decode_s(n_rows, n_past)
        return self._verify.at(n_rows, n_past)

    def prefill_s(self, n_rows: int, n_past: float) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache; in a unified
        one, where kernels see all rows alike, of whatever sequences."""
        return self._prefill.at(n_rows, n_past)

    def batch_s(self, n_rows: int, n_past: float) -> float:
        """Seconds that a batch of so many rows may take, whatever they are of; 0 if none was
        measured."""
        return max(self.decode_s(n_rows, n_past), self.prefill_s(n_rows, n_past))

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token takes, in chunks as large as pays."""
        if not self._prefill.measured:
            return 0.0
        return min(self.prefill_s(n, 0) / n for n in self._prefill.measured)

    def chunk(
        self, n_pending: int, n_past: float, *, within_s: float, beside_s: float = 0.0
    ) -> int:
        """How many of a prompt's next rows to compute in a batch of `within_s` at most, beside
        `beside_s` that the step takes anyway: those that get the prompt on fastest; 0 if none fit.

        Kernels have steps, and 63 rows can cost twice what 64 do: what comes into question are the
        measured numbers of rows, between them multiples of 4, and of more the larger they are, and all
        that is left.
        """
        sizes = [size for size in self._sizes if size < n_pending] + [n_pending]
        times = {size: self.prefill_s(size, n_past) for size in sizes}
        return _fastest(times, within_s, beside_s)

    def mixed_chunk(self, n_pending: int, n_beside: int, n_past: float, *, within_s: float) -> int:
        """The largest chunk for a batch that has `n_beside` rows of other sequences: the numbers that
        come into question are of all rows."""
        sizes = [n - n_beside for n in self._sizes if n_beside < n < n_beside + n_pending]
        times = {n: self.prefill_s(n_beside + n, n_past) for n in [*sizes, n_pending]}
        return _fastest(times, within_s, 0.0)

    @property
    def _sizes(self) -> Sequence[int]:
        measured = self._prefill.measured
        if not measured:
            return []
        sizes, begin = {*measured, *(n for n in _FEW_ROWS if n < measured[0])}, measured[0]
        for end, step in (*_ROW_STEPS, (measured[-1], _LARGE_STEP)):
            sizes.update(range(begin, min(end, measured[-1]), step))
            begin = max(begin, end)
        return sorted(sizes)

    def smallest_chunk(self, n_pending: int, n_past: float = 0) -> int:
        """The fewest of a prompt's rows that are worth a batch: those that take hardly longer than one.
        Behind many tokens, where each row attends for long, that is less than the fewest measured."""
        if not self._prefill.measured:
            return n_pending
        most_s = _HARDLY_LONGER * self.prefill_s(1, n_past)
        few = [*_FEW_ROWS, self._prefill.measured[0]]
        return min(n_pending, max(n for n in few if self.prefill_s(n, n_past) <= most_s))

    def split(
        self, slots: tuple[int, ...], n_past: float, blocked: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """How many of the decoding slots each batch is to compute. `slots` are their ids, which
        ascend.

        llama.cpp computes only consecutive slots together, so a batch also has a row for each slot between
        its own, which is wasted; none of those may be `blocked`. All slots are in one batch, unless
        several batches are measured to be faster: too many slots may lie between, or small batches may be
        fast (Q8_0 at two rows, on AVX-512). Now and then consecutive slots are in one batch all the same,
        so that its time is measured again."""
        n_slots = len(slots)
        if not self:
            return (n_slots,)
        if _span(slots) == n_slots and n_slots not in self._retried:
            self._retried.add(n_slots)
            return (n_slots,)
        return self._known_split(slots, n_past, blocked)

    def _known_split(
        self, slots: tuple[int, ...], n_past: float, blocked: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        key = slots, int(n_past) // 256 * 256, blocked
        if key not in self._splits:
            self._splits[key] = self._best_split(*key)
        return self._splits[key]

    def _best_split(
        self, slots: tuple[int, ...], n_past: float, blocked: frozenset[int]
    ) -> tuple[int, ...]:
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for end in range(1, len(slots) + 1):
            found = []
            for start in range(end):
                if blocked.isdisjoint(range(slots[start], slots[end - 1])):
                    seconds = self.decode_s(_span(slots[start:end]), n_past)
                    found.append((seconds + best[start][0], (*best[start][1], end - start)))
            best.append(min(found))
        split_s, parts = best[-1]
        whole_s = self.decode_s(_span(slots), n_past)
        whole = blocked.isdisjoint(range(slots[0], slots[-1]))
        return (len(slots),) if whole and split_s >= (1 - _LEAST_GAIN) * whole_s else parts

    def steps_s(self, n_rows: int, n_past: float) -> float:
        """Seconds of the batches that compute one token of each sequence in `n_rows` consecutive
        slots."""
        if not self:
            return 0.0
        parts = self._known_split(tuple(range(n_rows)), n_past)
        return sum(self.decode_s(part, n_past) for part in parts)

    def observe_decode(self, n_sequences: int, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a batch over decoding sequences, one row of each or with drafts."""
        if n_rows == n_sequences:
            self._decode.learn(n_rows, n_past, seconds)
        elif n_sequences == 1:
            self._verify.learn(n_rows, n_past, seconds)
        elif self:
            size, expected_s = _doublings(n_rows), self.decode_s(n_rows, n_past)
            known = self._longer.get(size, 1.0)
            seen = min(2.0, max(0.5, seconds / expected_s))
            self._longer[size] = known + _NEWEST * (seen - known)
        self._n_seen += 1
        if self._n_seen % _PLANS_KEPT == 0:
            for size in self._longer:  # what is not tried any more may have become faster
                self._longer[size] += _NEWEST * (1 - self._longer[size])
            self._splits.clear()
            self._retried.clear()

    def observe_prefill(self, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a batch of the kind that `prefill_s` predicts."""
        self._prefill.learn(n_rows, n_past, seconds)

    def curve(self) -> dict[str, dict[int, float]]:
        """The times known now, in milliseconds by number of rows, with an empty cache."""
        return {
            "decode_ms": {n: round(1000 * self.decode_s(n), 1) for n in self._decode.measured},
            "prefill_ms": {
                n: round(1000 * self.prefill_s(n, 0), 1) for n in self._prefill.measured
            },
            "verify_ms": {n: round(1000 * self._verify.at(n, 0), 1) for n in self._verify.measured},
        }


def _deep_verify_s(profile: Profile) -> dict[int, float]:
    deeper_s = profile.deep_decode_s.get(1, 0.0) - profile.decode_s.get(1, 0.0)
    return {n: seconds + n * max(0.0, deeper_s) for n, seconds in profile.verify_s.items()}


def _fastest(times: Mapping[int, float], within_s: float, beside_s: float) -> int:
    """The number of rows with the best rate among those whose time fits, of equal ones the largest; 0
    if none does."""
    fitting = [size for size, seconds in times.items() if seconds <= within_s]
    rates = {size: size / (beside_s + times[size] or 1e-9) for size in fitting}
    best = max(rates.values(), default=0.0)
    return max((size for size in fitting if rates[size] >= best * (1 - 1e-9)), default=0)


def _span(slots: Sequence[int]) -> int:
    return slots[-1] - slots[0] + 1


def _doublings(n_rows: int) -> int:
    return n_rows.bit_length()

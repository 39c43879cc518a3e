"""The cost model: how long a batch takes with this model on this machine. Pure: no model, no clock.

A batch is either some tokens of each of some decoding sequences, or a chunk of one prompt. A step's time
is their sum. In a unified cache the two share one. A batch takes `speed * (base + slope * depth)`: the
base for its number of rows, the slope for each token that stands in the cache before them. In a unified
cache those of other sequences count, too, as far as the kernel does not skip what is masked.

The profile has bases and slopes as they were measured. Factors of these are learned from each batch. One
is for the speed of all batches, one for each measured base, and one for the slopes of each kind of batch.
Their logarithms are the state of a Kalman filter. It corrects what a forecast was most likely wrong about,
as it knows how unsure each factor is. Sources: Kalman, "A New Approach to Linear Filtering and Prediction
Problems", 1960. Errors are bounded as in Huber, "Robust Estimation of a Location Parameter", 1964.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

# The variance of a batch's time about its forecast, relatively. An error counts up to so many standard
# deviations: more may be a hiccup. One that stays is learnt anyway.
_NOISE, _MOST_DEVIATIONS = 0.08**2, 2.0
# The variances of factors at first: of the speed, the bases, and the slopes.
_SPEED, _BASE, _SLOPES = 0.01, 0.02, 1.0
# What an error that is too large to be noise adds to the speed's: the machine may have changed.
_CHANGED = 0.06
# The part of what was learned that each batch has forgotten: of the speed, and of all factors.
_SOON, _LATE = 0.14, 0.001
# Where no slope was measured, so many tokens before the rows double what a batch takes: hardly any, until
# more is learned.
_DOUBLING_DEPTH = 300_000
# Up to so many rows, kernels like multiples of the second number; beyond the last one, of _LARGE_STEP.
_ROW_STEPS = ((64, 4), (128, 8), (256, 16))
_LARGE_STEP = 32
# Fewer rows than are measured, for prompts so deep that those would take too long. The other number: how
# much longer than one row the smallest chunk may take.
_FEW_ROWS, _HARDLY_LONGER = (1, 2, 4), 1.25
AHEAD_S = 0.02
"""Passes follow each other in one step if they end in so many seconds. The work around a pass takes as
long as a pass of a tiny model. Nobody sees whether tokens come so fast one by one."""
# A split that gains less than this part is noise.
_LEAST_GAIN = 0.05
# What was planned is planned anew after so many batches, as the curve may have moved.
_PLANS_KEPT = 64


def own_s(seconds: float, share: float) -> float:
    """Seconds that a batch would have taken had its threads had all of their time instead of that share.

    Threads wait for each other after each matrix. So a batch gets on while all of them have a core: with
    two threads, that share of that share of the time. Measured beside one and two busy loops, the median
    of a few batches was 0.8 to 1.8 times that of a quiet machine. The time that passed was 2 to 7 times
    that.
    """
    return seconds * share**2


def envelope(times: Mapping[int, float], *, by_row: bool = True) -> dict[int, float]:
    """The most that batches can take by the times of all: no longer than a larger one. With `by_row`, no
    longer by row than a smaller one, several of which could be computed instead.

    Other programs only ever make a batch longer. So what is above this was probably measured beside them.
    Kernels with tiles are above it, too.
    """
    return {
        n: min(times[m] * max(1.0, n / m) for m in times if m >= n or by_row) for n in sorted(times)
    }


class Factors:
    """The factors of measured numbers, as logarithms, and their covariance: a Kalman filter."""

    def __init__(self) -> None:
        self.logs: list[float] = []
        """All 0 at first. The first one is the speed."""
        self._covariance, self._begun = np.zeros((0, 0)), np.zeros(0)
        self.add(_SPEED)

    def add(self, variance: float) -> int:
        """Add a factor that is so unsure; returns its index."""
        self.logs.append(0.0)
        self._covariance = np.pad(self._covariance, (0, 1))
        self._covariance[-1, -1] = variance
        self._begun = np.append(self._begun, variance)
        return len(self.logs) - 1

    def learn(self, parts: Mapping[int, float], error: float) -> None:
        """Learn from the logarithm of a time to its forecast. `parts` are those of the forecast that grow
        with each factor, by its index."""
        variances = np.einsum("ii->i", self._covariance)
        forgotten = np.maximum(0.0, self._begun - variances)
        variances += _LATE * forgotten
        variances[0] += _SOON * forgotten[0]
        growth = np.zeros(len(self.logs))
        growth[list(parts)] = list(parts.values())
        shared = self._covariance @ growth
        variance = _NOISE + float(growth @ shared)
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        gains = shared / variance
        self.logs = (self.logs + gains * max(-most, min(most, error))).tolist()
        if abs(error) <= most:
            self._covariance -= np.outer(gains, shared)
        else:
            variances[0] += _CHANGED


class Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(
        self, shallow: Mapping[int, float], deep: Mapping[int, float], depth: int, factors: Factors
    ) -> None:
        """A size that is thought too fast is tried and learned, one that is thought too slow never is:
        so batches begin at the `envelope`. How far a size is above it is how unsure it is."""
        self.measured, self._factors = sorted(shallow), factors
        self._bases = list(envelope(shallow, by_row=False).values())
        doubts = (math.log(shallow[n] / s) for n, s in zip(self.measured, self._bases, strict=True))
        self._base_factors = [factors.add(_BASE + doubt**2) for doubt in doubts]
        added_s = {n: max(0.0, deep[n] - shallow[n]) for n in deep if n in shallow}
        self._attending = [0, *sorted(added_s)] if added_s else []
        """The numbers of rows of which a slope is known: none for no rows."""
        self._slopes = [added_s.get(n, 0.0) / max(1, depth) for n in self._attending]
        self._least_slope = min((s / n for n, s in shallow.items()), default=0.0) / _DOUBLING_DEPTH
        """Seconds that each row may take for a token before it, whatever was measured."""
        self._slope_factor = factors.add(_SLOPES)
        self._lines: dict[int, tuple[float, float]] = {}
        """The seconds without tokens before the rows, and those that each such token adds, by number of
        rows. A step asks for some twenty."""

    def seconds(self, n_rows: int, n_past: float) -> float:
        """Seconds of a batch; 0 if none was measured."""
        if not self.measured:
            return 0.0
        base_s, slope_s = self._lines.get(n_rows) or self._line(n_rows)
        return base_s + n_past * slope_s

    def _line(self, n_rows: int) -> tuple[float, float]:
        bases, slope_s = self._terms(n_rows)
        speed = math.exp(self._factors.logs[0])
        line = self._lines[n_rows] = speed * sum(bases.values()), speed * slope_s
        return line

    def _terms(self, n_rows: int) -> tuple[dict[int, float], float]:
        """The terms of the base by the index of their factor, and the slope, all without the speed."""
        logs = self._factors.logs
        bases = dict[int, float]()
        for i, weight in _interpolate(self.measured, n_rows):
            index = self._base_factors[i]
            bases[index] = weight * math.exp(logs[index]) * self._bases[i]
        return bases, math.exp(logs[self._slope_factor]) * self._slope_s(n_rows)

    def times(self, n_past: float = 0) -> dict[int, float]:
        """Seconds of all numbers of rows that were measured."""
        return {n: self.seconds(n, n_past) for n in self.measured}

    def parts(self, n_rows: int, n_past: float) -> dict[int, float]:
        """The parts of a forecast that grow with each factor, by its index."""
        bases, slope_s = self._terms(n_rows)
        terms = bases | {self._slope_factor: n_past * slope_s}
        return {0: 1.0} | {index: s / sum(terms.values()) for index, s in terms.items()}

    def forget_lines(self) -> None:
        """Compute all times anew, as factors have changed."""
        self._lines.clear()

    def _slope_s(self, n_rows: int) -> float:
        """Seconds that a token before so many rows adds, as measured. Fewer rows than were measured attend
        for themselves, too."""
        measured = sum(w * self._slopes[i] for i, w in _interpolate(self._attending, n_rows))
        return max(measured, n_rows * self._least_slope)


def _interpolate(points: Sequence[int], x: int) -> list[tuple[int, float]]:
    """The points that the value at x is made of, and the part of each. The value is straight between the
    points, the first one's before, and grows with x beyond."""
    if not points:
        return []
    right = bisect_left(points, x)
    if right == len(points):
        return [(right - 1, x / points[-1])]
    if right == 0 or points[right] == x:
        return [(right, 1.0)]
    part = (x - points[right - 1]) / (points[right] - points[right - 1])
    return [(right - 1, 1 - part), (right, part)]


def predict_s(times: Mapping[int, float], n: int) -> float:
    """Seconds of so many rows by the times of others: straight between them, and beyond."""
    points = sorted(times)
    return sum(weight * times[points[i]] for i, weight in _interpolate(points, n))


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
    masked: float = 1.0
    """The cost of a token of other sequences in a unified cache, as a part of the cost of an own one."""
    share: float = 1.0
    """The part of their time that the batches' threads had. Other programs had the rest. It is 1 where it
    is not known, or once the costs have been learned."""


class CostModel:
    """Predicts what batches take by a profile, and learns from every batch. Decoder thread only."""

    def __init__(self, profile: Profile) -> None:
        self.begin(profile)

    def begin(self, profile: Profile) -> None:
        """Predict by that profile from now on, and learn anew, of another kind of cache."""
        self._profile, depth, factors = profile, profile.depth, Factors()
        self._factors = factors
        self._decode = Curve(profile.decode_s, profile.deep_decode_s, depth, factors)
        self._prefill = Curve(profile.prefill_s, profile.deep_prefill_s, depth, factors)
        self._verify = Curve(profile.verify_s, _deep_verify_s(profile), depth, factors)
        self._splits: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}
        self._retried: set[int] = set()
        self._n_seen = 0

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._decode.measured)

    def effective_past(self, n_past: float, n_cells: float) -> float:
        """The tokens of its own that would cost a row as much as its `n_past` and the rest of a unified
        cache's `n_cells` in use. To be given as `n_past` to the other methods."""
        return n_past + self._profile.masked * max(0.0, n_cells - n_past)

    def decode_s(self, n_rows: int, n_past: float = 0) -> float:
        """Seconds to compute `n_rows` tokens of decoding sequences that have `n_past` tokens each."""
        return self._decode.seconds(n_rows, n_past)

    def verify_s(self, n_sequences: int, n_drafted: int, n_past: float) -> float:
        """Seconds to compute the next token of each sequence, and so many drafted ones behind each."""
        n_rows = n_sequences * (n_drafted + 1)
        if n_sequences > 1 or n_drafted == 0 or not self._verify.measured:
            return self.decode_s(n_rows, n_past)
        return self._verify.seconds(n_rows, n_past)

    def prefill_s(self, n_rows: int, n_past: float) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache. In a unified one,
        these are of whatever sequences, as kernels see all rows alike."""
        return self._prefill.seconds(n_rows, n_past)

    def batch_s(self, n_rows: int, n_past: float) -> float:
        """Seconds that a batch of so many rows may take, whatever they are of; 0 if none was measured."""
        return max(self.decode_s(n_rows, n_past), self.prefill_s(n_rows, n_past))

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token takes in a large chunk. It is the median of the larger half of
        what was measured: the least of many is the one whose measurement was luckiest."""
        if not self._prefill.measured:
            return 0.0
        large = self._prefill.measured[len(self._prefill.measured) // 2 :]
        return median(self.prefill_s(n, 0) / n for n in large)

    def chunk(
        self,
        n_pending: int,
        n_past: float,
        *,
        within_s: float,
        beside_s: float = 0.0,
        n_beside: int = 0,
    ) -> int:
        """How many of a prompt's next rows to compute: those that get it on fastest, of equal ones the
        most, 0 if none fit. The batch takes `within_s` at most, with `n_beside` rows of other sequences,
        in a step that takes `beside_s` besides.

        Kernels have steps, and 63 rows can cost twice what 64 do. So candidates are the measured numbers
        of rows, all that is left, and multiples between: of 4, and of more the larger they are.
        """
        sizes = [n - n_beside for n in self._sizes if n_beside < n < n_beside + n_pending]
        times = {n: self.prefill_s(n_beside + n, n_past) for n in [*sizes, n_pending]}
        rates = {n: n / (beside_s + s or 1e-9) for n, s in times.items() if s <= within_s}
        best = max(rates.values(), default=0.0)
        return max((n for n in rates if rates[n] >= best * (1 - 1e-9)), default=0)

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
        """How many of the decoding slots each batch is to compute. `slots` are their ids, which ascend.

        llama.cpp computes only consecutive slots together. So a batch also has a row for each slot between
        its own, which is wasted. None of those may be `blocked`. All slots are in one batch, unless
        several batches are measured to be faster. Too many slots may lie between, or small batches may be
        fast (Q8_0 at two rows, on AVX-512). Consecutive slots stay in one batch if more passes may follow
        it in the step: the work around several batches takes longer than they save. Now and then
        consecutive slots are in one batch all the same, so that its time is measured again."""
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
        is_followed = _span(slots) == len(slots) and 2 * whole_s < AHEAD_S
        gains = not is_followed and split_s < (1 - _LEAST_GAIN) * whole_s
        return parts if gains or not whole else (len(slots),)

    def steps_s(self, n_rows: int, n_past: float) -> float:
        """Seconds of the batches that compute one token of each sequence in `n_rows` consecutive slots."""
        if not self:
            return 0.0
        parts = self._known_split(tuple(range(n_rows)), n_past)
        return sum(self.decode_s(part, n_past) for part in parts)

    def observe_decode(self, n_sequences: int, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a batch of decoding sequences, maybe with drafts."""
        drafted_for_one = n_sequences == 1 and n_rows > 1 and bool(self._verify.measured)
        self._learn(self._verify if drafted_for_one else self._decode, n_rows, n_past, seconds)
        self._n_seen += 1
        if self._n_seen % _PLANS_KEPT == 0:
            self._splits.clear()
            self._retried.clear()

    def observe_prefill(self, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a batch that `prefill_s` predicts."""
        self._learn(self._prefill, n_rows, n_past, seconds)

    def _learn(self, curve: Curve, n_rows: int, n_past: float, seconds: float) -> None:
        expected_s = curve.seconds(n_rows, n_past)
        if expected_s > 0 and seconds > 0:
            self._factors.learn(curve.parts(n_rows, n_past), math.log(seconds / expected_s))
            for each in (self._decode, self._prefill, self._verify):
                each.forget_lines()

    def yardsticks(self, most: int) -> dict[int, float]:
        """Seconds of prompts of up to so many rows with nothing before them, by number of rows."""
        return {n: self.prefill_s(n, 0) for n in self._prefill.measured if n <= most}

    def learned_profile(self) -> Profile:
        """The profile by what is known now, whoever disturbed the measurement."""
        profile = self._profile
        return replace(
            profile,
            share=1.0,
            decode_s=self._present_times(self._decode),
            prefill_s=self._present_times(self._prefill),
            verify_s=self._present_times(self._verify),
            deep_decode_s=self._present_times(self._decode, profile.deep_decode_s),
            deep_prefill_s=self._present_times(self._prefill, profile.deep_prefill_s),
        )

    def _present_times(
        self, curve: Curve, deep: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """The present seconds of a curve's sizes, or of those that were measured deep."""
        times = curve.times(0 if deep is None else self._profile.depth)
        return {n: s for n, s in times.items() if deep is None or n in deep}

    def curve(self) -> dict[str, dict[int, float]]:
        """The times known now, in milliseconds by number of rows, with an empty cache."""
        curves = {"decode_ms": self._decode, "prefill_ms": self._prefill, "verify_ms": self._verify}
        return {
            name: {n: round(1000 * s, 1) for n, s in self._present_times(curve).items()}
            for name, curve in curves.items()
        }


def _deep_verify_s(profile: Profile) -> dict[int, float]:
    deeper_s = profile.deep_decode_s.get(1, 0.0) - profile.decode_s.get(1, 0.0)
    return {n: seconds + n * max(0.0, deeper_s) for n, seconds in profile.verify_s.items()}


def _span(slots: Sequence[int]) -> int:
    return slots[-1] - slots[0] + 1

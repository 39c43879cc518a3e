"""The cost model: how long a batch takes with this model on this machine. Pure: no model, no clock.

A batch is either some tokens of each of some decoding sequences, or a chunk of one prompt, and a step's
time is their sum; in a unified cache the two share one. It takes `speed * (base + slope * depth)`: the base
for its number of rows, the slope for each token that stands in the cache before them. In a unified cache
those of other sequences count, too, as far as the kernel does not skip what is masked.

The profile has bases and slopes as they were measured. Their factors are learned while running, by a Kalman
filter: one for the speed, one for each measured base, and one for the slopes of each kind of batch. It
corrects what a forecast was most likely wrong about, as it knows how unsure each factor is. Sources:
Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960; errors are bounded as in Huber,
"Robust Estimation of a Location Parameter", 1964.

Each measurement carries its own trust: the part of their time that its threads had, its `share`. Other
programs had the rest, which says nothing about a batch (`own_s`). The smaller the share, the less the
filter learns. How much longer batches take meanwhile is a factor of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Batches that are forecast rightly differ from that by so much, as a variance of the relative error.
_NOISE = 0.08**2
# An error counts up to so many standard deviations: more may be a hiccup. One that stays is learnt anyway.
_MOST_DEVIATIONS = 2.0
# What was measured is wrong by a seventh, as a variance. A size whose variance is above the second one is
# worth a trial.
_TRUSTED, _WORTH_A_TRIAL = 0.02, 0.03
# The variance of the speed, which changes soon, and what an error adds that is too large to be noise.
_SPEED, _JUMP = 0.005, 0.03
# How soon what was learned is forgotten, with each batch: of the speed, and of all else.
_SOON, _LATE = 0.14, 0.001
# Where no slope was measured, a depth of so many tokens may double what a batch takes.
_DOUBLING_DEPTH = 4_000
# Seconds of batches of one size, of which one is learnt from.
_LEARN_S = 0.1
# The weight of the newest batch in how much longer batches take because of other programs.
_NEWEST_DELAY = 0.2
# Up to so many rows, kernels like multiples of the second number; beyond the last one, of _LARGE_STEP.
_ROW_STEPS = ((64, 4), (128, 8), (256, 16))
_LARGE_STEP = 32
# Fewer rows than are measured, for prompts so deep that those would take too long; and how much longer
# than one row the smallest chunk may take.
_FEW_ROWS, _HARDLY_LONGER = (1, 2, 4), 1.25
AHEAD_S = 0.02
"""Passes follow each other in one step if they end in so many seconds: the work around a pass takes as long
as a pass of a tiny model, and nobody sees whether tokens come so fast one by one."""
# A split that gains less than this part is noise.
_LEAST_GAIN = 0.05
# Weight of the newest batch with drafts of several sequences.
_NEWEST = 0.1
# What was planned is planned anew after so many batches, as the curve may have moved.
_PLANS_KEPT = 64
_NO_LINE = -1, 0.0, 0.0


def own_s(seconds: float, share: float) -> float:
    """Seconds that a batch would have taken had its threads had all of their time instead of that share.

    Threads wait for each other after each matrix. So a batch gets on while all of them have a core: with
    two threads, that share of that share of the time. Measured beside one and two busy loops, the median of
    a few batches was 0.8 to 1.8 times that of a quiet machine; the time that passed was 2 to 7 times that.
    """
    return seconds * share**2


def envelope(times: Mapping[int, float], *, by_row: bool = True) -> dict[int, float]:
    """The most that batches can take by the times of all: no longer than a larger one; and `by_row` no
    longer by row than a smaller one, several of which could be computed instead.

    Other programs only ever make a batch longer. So what is above this was probably measured beside them.
    Kernels with tiles are above it, too.
    """
    return {
        n: min(times[m] * max(1.0, n / m) for m in times if m >= n or by_row) for n in sorted(times)
    }


class Factors:
    """Corrections that are learned from forecasts' errors, all 0 at first. The first one is the speed, as a
    logarithm: how much longer all batches take than when they were measured (throttling, memory that
    others use)."""

    def __init__(self, doubt: float = 0.0) -> None:
        """`doubt` is the variance of all that was measured together."""
        self.values: list[float] = []
        self.n_learned = 0
        """The number of errors that changed them so far."""
        self._covariance, self._begun = np.zeros((0, 0)), np.zeros(0)
        self.add(_SPEED + doubt)
        self._begun[0] = _SPEED

    @property
    def speed(self) -> float:
        """The factor of measured seconds, without delays."""
        return math.exp(self.values[0])

    def variance(self, growth: Mapping[int, float]) -> float:
        """The present variance of a forecast's relative error. `growth` says how much the forecast grows,
        relatively, with each number."""
        indices, parts = list(growth), np.array(list(growth.values()))
        return float(parts @ self._covariance[np.ix_(indices, indices)] @ parts)

    def add(self, variance: float) -> int:
        """Add a factor, which is that unsure, and return its index."""
        self.values.append(0.0)
        self._covariance = np.pad(self._covariance, (0, 1))
        self._covariance[-1, -1] = variance
        self._begun = np.append(self._begun, variance)
        return len(self.values) - 1

    def learn(self, growth: Mapping[int, float], error: float, noise: float) -> None:
        """Learn from a forecast's relative error, which has that variance, too. `growth` is its growth."""
        diagonal = np.einsum("ii->i", self._covariance)
        forgotten = np.maximum(0.0, self._begun - diagonal)
        diagonal += _LATE * forgotten
        diagonal[0] += _SOON * forgotten[0]
        indices, parts = list(growth), np.array(list(growth.values()))
        self.n_learned += 1
        due = parts @ self._covariance[indices]  # it is symmetric
        variance = noise + float(parts @ due[indices])
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        self.values = (due * (max(-most, min(most, error)) / variance) + self.values).tolist()
        if abs(error) <= most:
            self._covariance -= np.outer(due, due) / variance
        else:  # a hiccup, which tells nothing, or the machine has changed
            diagonal[0] += _JUMP


class Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(
        self,
        shallow: Mapping[int, float],
        deep: Mapping[int, float],
        depth: int,
        factors: Factors,
        doubt: float = 0.0,
    ) -> None:
        """`doubt` is the additional variance of each measured number. What is thought too fast is tried and
        learned, what is thought too slow never is: so batches begin at the envelope. But some kernels are
        odd, and that is to be believed of a quiet machine."""
        self.measured, self._factors = sorted(shallow), factors
        by_row = doubt > _TRUSTED
        likely_s = envelope(shallow, by_row=by_row)
        self._seconds = list(likely_s.values())
        self._bases = [
            factors.add(_TRUSTED + doubt + math.log(shallow[n] / likely_s[n]) ** 2)
            for n in self.measured
        ]
        added_s = {n: max(0.0, deep[n] - shallow[n]) for n in deep if n in shallow}
        if by_row:
            added_s = envelope(added_s)
        self._attending = [0, *sorted(added_s)]
        """The numbers of rows of which a slope is known: none for no rows."""
        self._slopes = [added_s.get(n, 0.0) / max(1, depth) for n in self._attending]
        self._row_s = min((shallow[n] / n for n in self.measured), default=0.0)
        self._deeper = factors.add(1.0)
        self._lines: dict[int, tuple[int, float, float]] = {}
        """The count of what had been learned, the seconds without tokens before the rows, and those that
        each such token adds; by number of rows. A step asks for some twenty."""
        self._to_learn_s: dict[int, float] = {}
        """The seconds that batches of each number of rows take until the next one is learnt from."""
        self._seen_at: dict[int, float] = {}
        """The tokens before the last batch of each number of rows."""

    def own_s(self, n_rows: int, n_past: float) -> float:
        """Seconds of a batch if no other program had the cores; 0 if none was measured."""
        if not self.measured:
            return 0.0
        n_learned, base_s, slope_s = self._lines.get(n_rows, _NO_LINE)
        if n_learned != self._factors.n_learned:
            base_s, slope_s = self._line(n_rows)
            self._lines[n_rows] = self._factors.n_learned, base_s, slope_s
        return base_s + n_past * slope_s

    def _line(self, n_rows: int) -> tuple[float, float]:
        base_s = sum(weight * self._base_s(i) for i, weight in _parts(self.measured, n_rows))
        slope_s, scale_s = self._slope_s(n_rows)
        slope_s += self._factors.values[self._deeper] * scale_s
        return self._factors.speed * base_s, self._factors.speed * max(0.0, slope_s)

    def own_times(self, n_past: float = 0) -> dict[int, float]:
        """Seconds that `own_s` gives for all numbers of rows that were measured."""
        return {n: self.own_s(n, n_past) for n in self.measured}

    @property
    def worth_a_trial(self) -> list[int]:
        """The numbers of rows of which too little is known, fewer first."""
        return [n for n in self.measured if not self._knows(n)]

    def _knows(self, n_rows: int) -> bool:
        """Whether forecasts are sure enough at the depth at which such batches are computed."""
        growth = self._growth(n_rows, self._seen_at.get(n_rows, 0.0))
        return self._factors.variance(growth) <= _WORTH_A_TRIAL

    def _growth(self, n_rows: int, n_past: float) -> dict[int, float]:
        """How much a forecast grows, relatively, with each number that is learned; as much as the speed."""
        scale = self._factors.speed / (self.own_s(n_rows, n_past) or 1.0)
        growth = {0: 1.0, self._deeper: scale * n_past * self._slope_s(n_rows)[1]}
        for i, weight in _parts(self.measured, n_rows):
            growth[self._bases[i]] = scale * weight * self._base_s(i)
        return growth

    def learn(self, n_rows: int, n_past: float, seconds: float, share: float) -> None:
        """Learn from a batch that took `seconds` of its threads' own time, of which they had that share. Of
        short batches of one size, one in `_LEARN_S` counts: all tell the same, and learning takes time."""
        to_learn_s = self._to_learn_s.get(n_rows, 0.0) - seconds
        self._to_learn_s[n_rows], self._seen_at[n_rows] = to_learn_s, n_past
        if to_learn_s > 0 or (expected_s := self.own_s(n_rows, n_past)) <= 0:
            return
        growth = self._growth(n_rows, n_past)
        # Speed and bases are factors, slopes are added.
        ratio, added = seconds / expected_s, min(1.0, growth[self._deeper])
        error = (1 - added) * math.log(ratio) + added * (ratio - 1)
        self._factors.learn(growth, error, _NOISE + (1 - share) ** 2)
        self._to_learn_s[n_rows] = _LEARN_S if self._knows(n_rows) else 0.0

    def _base_s(self, i: int) -> float:
        return math.exp(self._factors.values[self._bases[i]]) * self._seconds[i]

    def _slope_s(self, n_rows: int) -> tuple[float, float]:
        """Seconds that a token before so many rows adds, as measured, and what may be added to that. Fewer
        rows than were measured attend for themselves, too."""
        slope_s = 0.0
        if len(self._slopes) > 1:
            parts = _parts(self._attending, n_rows)
            slope_s = sum(weight * self._slopes[i] for i, weight in parts)
        return slope_s, max(slope_s, n_rows * self._row_s / _DOUBLING_DEPTH)


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


def predicted(times: Mapping[int, float], n: int) -> float:
    """Seconds of so many rows by the times of others: straight between them, and beyond."""
    points = sorted(times)
    return sum(weight * times[points[i]] for i, weight in _parts(points, n))


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
    """The part of their time that the batches' threads had; other programs had the rest. 1 where it is not
    known, or once the costs have been learned."""

    @property
    def doubt(self) -> float:
        """The variance of what was measured beside other programs."""
        return (1 - self.share) ** 2


class CostModel:
    """Predicts what batches take by a profile, and learns from every batch. Decoder thread only."""

    def __init__(self, profile: Profile) -> None:
        self.begin(profile)

    def begin(self, profile: Profile) -> None:
        """Predict by that profile from now on, and learn anew, of another kind of cache."""
        depth, doubt = profile.depth, profile.doubt
        self._factors = factors = Factors(doubt)
        self._delay = 1.0
        """The factor by which batches take longer because other programs have the cores."""
        self._profile = profile
        self._decode = Curve(profile.decode_s, profile.deep_decode_s, depth, factors, doubt)
        self._prefill = Curve(profile.prefill_s, profile.deep_prefill_s, depth, factors, doubt)
        self._verify = Curve(profile.verify_s, _deep_verify_s(profile), depth, factors, doubt)
        self._masked = profile.masked
        self._splits: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}
        self._retried: set[int] = set()
        self._n_seen = 0
        self._longer: dict[int, float] = {}
        """How much longer drafts of several sequences take than as many sequences do, by `_doublings`."""

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._decode.measured)

    def attended(self, n_past: float, n_cells: float) -> float:
        """How many tokens of its own would cost a row as much as its `n_past` and the rest of the
        `n_cells` in use in a unified cache. To be given as `n_past` to the other methods."""
        return n_past + self._masked * max(0.0, n_cells - n_past)

    def decode_s(self, n_rows: int, n_past: float = 0) -> float:
        """Seconds to compute `n_rows` tokens of decoding sequences that have `n_past` tokens each."""
        return self._delay * self._decode.own_s(n_rows, n_past)

    def verify_s(self, n_sequences: int, n_drafted: int, n_past: float) -> float:
        """Seconds to compute the next token of each sequence, and so many drafted ones behind each."""
        n_rows = n_sequences * (n_drafted + 1)
        if n_sequences > 1 or n_drafted == 0 or not self._verify.measured:
            longer = self._longer.get(_doublings(n_rows), 1.0) if n_drafted else 1.0
            return longer * self.decode_s(n_rows, n_past)
        return self._delay * self._verify.own_s(n_rows, n_past)

    def prefill_s(self, n_rows: int, n_past: float) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache; in a unified
        one, where kernels see all rows alike, of whatever sequences."""
        return self._delay * self._prefill.own_s(n_rows, n_past)

    def batch_s(self, n_rows: int, n_past: float) -> float:
        """Seconds that a batch of so many rows may take, whatever they are of; 0 if none was measured."""
        return max(self.decode_s(n_rows, n_past), self.prefill_s(n_rows, n_past))

    @property
    def prompt_token_s(self) -> float:
        """Seconds that one more prompt token takes, in chunks as large as pays."""
        if not self._prefill.measured:
            return 0.0
        return min(self.prefill_s(n, 0) / n for n in self._prefill.measured)

    def chunk(
        self,
        n_pending: int,
        n_past: float,
        *,
        within_s: float,
        beside_s: float = 0.0,
        n_beside: int = 0,
    ) -> int:
        """How many of a prompt's next rows to compute in a batch of `within_s` at most, with `n_beside`
        rows of other sequences, in a step that takes `beside_s` besides: those that get the prompt on
        fastest, of equal ones the most; 0 if none fit.

        Kernels have steps, and 63 rows can cost twice what 64 do: what comes into question are the measured
        numbers of rows, between them multiples of 4, and of more the larger they are, and all that is left.
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

        llama.cpp computes only consecutive slots together, so a batch also has a row for each slot between
        its own, which is wasted; none of those may be `blocked`. All slots are in one batch, unless
        several batches are measured to be faster: too many slots may lie between, or small batches may be
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

    def observe_decode(
        self, n_sequences: int, n_rows: int, n_past: float, seconds: float, share: float = 1.0
    ) -> None:
        """Learn from a batch of decoding sequences, maybe with drafts. Its threads had that share of it."""
        if n_rows == n_sequences:
            self._learn(self._decode, n_rows, n_past, seconds, share)
        elif n_sequences == 1:
            self._learn(self._verify, n_rows, n_past, seconds, share)
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

    def observe_prefill(
        self, n_rows: int, n_past: float, seconds: float, share: float = 1.0
    ) -> None:
        """Learn from a batch that `prefill_s` predicts. Its threads had that share of their time."""
        self._learn(self._prefill, n_rows, n_past, seconds, share)

    def _learn(
        self, curve: Curve, n_rows: int, n_past: float, seconds: float, share: float
    ) -> None:
        computed_s = own_s(seconds, share)
        if computed_s > 0:
            self._delay += _NEWEST_DELAY * (seconds / computed_s - self._delay)
            curve.learn(n_rows, n_past, computed_s, share)

    def yardsticks(self, most: int) -> dict[int, float]:
        """Seconds of prompts of up to so many rows with nothing before them, by number of rows."""
        return {n: self.prefill_s(n, 0) for n in self._prefill.measured if n <= most}

    def rested(self) -> None:
        """Forget, after a pause, how much longer batches took because of other programs."""
        self._delay = 1.0

    @property
    def worth_a_trial(self) -> list[tuple[str, int]]:
        """The batches of which too little is known, by kind and number of rows, the smallest first."""
        curves = {"decode": self._decode, "prefill": self._prefill, "verify": self._verify}
        pairs = ((kind, n) for kind, curve in curves.items() for n in curve.worth_a_trial)
        return sorted(pairs, key=lambda pair: curves[pair[0]].own_s(pair[1], 0))

    def learned(self) -> Profile:
        """The profile by what is known now. Its share grows with the part of its sizes that are known."""
        profile, depth = self._profile, self._profile.depth
        curves = (self._decode, self._prefill, self._verify)
        n_sizes = sum(len(curve.measured) for curve in curves)
        unknown = len(self.worth_a_trial) / max(1, n_sizes)
        deep_decode_s, deep_prefill_s = (
            {n: seconds for n, seconds in curve.own_times(depth).items() if n in deep}
            for curve, deep in (
                (self._decode, profile.deep_decode_s),
                (self._prefill, profile.deep_prefill_s),
            )
        )
        return replace(
            profile,
            decode_s=self._decode.own_times(),
            prefill_s=self._prefill.own_times(),
            verify_s=self._verify.own_times(),
            deep_decode_s=deep_decode_s,
            deep_prefill_s=deep_prefill_s,
            share=1 - unknown * (1 - profile.share),
        )

    def curve(self) -> dict[str, dict[int, float]]:
        """The times known now, in milliseconds by number of rows, with an empty cache."""
        curves = {"decode_ms": self._decode, "prefill_ms": self._prefill, "verify_ms": self._verify}
        return {
            name: {n: round(1000 * self._delay * s, 1) for n, s in curve.own_times().items()}
            for name, curve in curves.items()
        }


def _deep_verify_s(profile: Profile) -> dict[int, float]:
    deeper_s = profile.deep_decode_s.get(1, 0.0) - profile.decode_s.get(1, 0.0)
    return {n: seconds + n * max(0.0, deeper_s) for n, seconds in profile.verify_s.items()}


def _span(slots: Sequence[int]) -> int:
    return slots[-1] - slots[0] + 1


def _doublings(n_rows: int) -> int:
    return n_rows.bit_length()

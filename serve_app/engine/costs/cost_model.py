"""The cost model: how long a batch takes with this model on this machine. Pure: no model, no clock.

A batch is either some tokens of each of some decoding sequences, or a chunk of one prompt, and a step's
time is their sum; in a unified cache the two share one. It takes `speed * (base + slope * depth)`: the base
for its number of rows, the slope for each token that stands in the cache before them. In a unified cache
those of other sequences count, too, as far as the kernel does not skip what is masked.

The profile has bases and slopes as they were measured. Factors of these are learned from each batch: one
for the speed of all batches, one for each measured base, and one for the slopes of each kind of batch. Each
moves by a part of the forecast's error, as large as its own part of the forecast is. Source: Widrow and
Hoff, "Adaptive Switching Circuits", 1960; errors are bounded as in Huber, "Robust Estimation of a Location
Parameter", 1964.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

# The parts of an error by which the speed moves, and the base or the slopes that a forecast consists of.
# Few batches tell of slopes, and each tells of all.
_SPEED, _BASE, _SLOPES = 0.2, 0.2, 0.6
# The most that counts of an error, as a logarithm: more may be a hiccup. One that stays is learnt anyway.
_MOST_ERROR = 0.45
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
# What was planned is planned anew after so many batches, as the curve may have moved.
_PLANS_KEPT = 64


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


class Curve:
    """Seconds by number of rows and depth, at the speed of the measurement: straight between what was
    measured, and beyond."""

    def __init__(self, shallow: Mapping[int, float], deep: Mapping[int, float], depth: int) -> None:
        """What is thought too fast is tried and learned, what is thought too slow never is: so batches
        begin at the `envelope`."""
        self.measured = sorted(shallow)
        self._bases = list(envelope(shallow, by_row=False).values())
        added_s = {n: max(0.0, deep[n] - shallow[n]) for n in deep if n in shallow}
        self._attending = [0, *sorted(added_s)] if added_s else []
        """The numbers of rows of which a slope is known: none for no rows."""
        self._slopes = [added_s.get(n, 0.0) / max(1, depth) for n in self._attending]
        self._deeper = 1.0
        """The factor of all slopes."""
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
        base_s = sum(weight * self._bases[i] for i, weight in _parts(self.measured, n_rows))
        line = self._lines[n_rows] = base_s, self._deeper * self._slope_s(n_rows)
        return line

    def times(self, n_past: float = 0) -> dict[int, float]:
        """Seconds of all numbers of rows that were measured."""
        return {n: self.seconds(n, n_past) for n in self.measured}

    def learn(self, n_rows: int, n_past: float, error: float) -> None:
        """Learn from the logarithm of the time of a batch to its forecast."""
        base_part = self.seconds(n_rows, 0) / self.seconds(n_rows, n_past)
        for i, weight in _parts(self.measured, n_rows):
            self._bases[i] *= math.exp(_BASE * min(1.0, weight) * base_part * error)
        self._deeper *= math.exp(_SLOPES * (1 - base_part) * error)
        self._lines.clear()

    def _slope_s(self, n_rows: int) -> float:
        """Seconds that a token before so many rows adds, as measured. Fewer rows than were measured attend
        for themselves, too."""
        return sum(weight * self._slopes[i] for i, weight in _parts(self._attending, n_rows))


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


class CostModel:
    """Predicts what batches take by a profile, and learns from every batch. Decoder thread only."""

    def __init__(self, profile: Profile) -> None:
        self.begin(profile)

    def begin(self, profile: Profile) -> None:
        """Predict by that profile from now on, and learn anew, of another kind of cache."""
        self._speed = 1.0
        """The factor of measured seconds: other programs may have the cores, or clocks are slower."""
        self._profile, depth = profile, profile.depth
        self._decode = Curve(profile.decode_s, profile.deep_decode_s, depth)
        self._prefill = Curve(profile.prefill_s, profile.deep_prefill_s, depth)
        self._verify = Curve(profile.verify_s, _deep_verify_s(profile), depth)
        self._splits: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}
        self._retried: set[int] = set()
        self._n_seen = 0

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._decode.measured)

    def attended(self, n_past: float, n_cells: float) -> float:
        """How many tokens of its own would cost a row as much as its `n_past` and the rest of the
        `n_cells` in use in a unified cache. To be given as `n_past` to the other methods."""
        return n_past + self._profile.masked * max(0.0, n_cells - n_past)

    def decode_s(self, n_rows: int, n_past: float = 0) -> float:
        """Seconds to compute `n_rows` tokens of decoding sequences that have `n_past` tokens each."""
        return self._speed * self._decode.seconds(n_rows, n_past)

    def verify_s(self, n_sequences: int, n_drafted: int, n_past: float) -> float:
        """Seconds to compute the next token of each sequence, and so many drafted ones behind each."""
        n_rows = n_sequences * (n_drafted + 1)
        if n_sequences > 1 or n_drafted == 0 or not self._verify.measured:
            return self.decode_s(n_rows, n_past)
        return self._speed * self._verify.seconds(n_rows, n_past)

    def prefill_s(self, n_rows: int, n_past: float) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache; in a unified
        one, where kernels see all rows alike, of whatever sequences."""
        return self._speed * self._prefill.seconds(n_rows, n_past)

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
        expected_s = self._speed * curve.seconds(n_rows, n_past)
        if expected_s > 0 and seconds > 0:
            error = math.log(seconds / expected_s)
            error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
            self._speed *= math.exp(_SPEED * error)
            curve.learn(n_rows, n_past, error)

    def yardsticks(self, most: int) -> dict[int, float]:
        """Seconds of prompts of up to so many rows with nothing before them, by number of rows."""
        return {n: self.prefill_s(n, 0) for n in self._prefill.measured if n <= most}

    def learned(self) -> Profile:
        """The profile by what is known now, whoever disturbed the measurement."""
        profile = self._profile
        return replace(
            profile,
            share=1.0,
            decode_s=self._known(self._decode),
            prefill_s=self._known(self._prefill),
            verify_s=self._known(self._verify),
            deep_decode_s=self._known(self._decode, profile.deep_decode_s),
            deep_prefill_s=self._known(self._prefill, profile.deep_prefill_s),
        )

    def _known(self, curve: Curve, deep: Mapping[int, float] | None = None) -> dict[int, float]:
        """The present seconds of a curve's sizes, or of those that were measured deep."""
        times = curve.times(0 if deep is None else self._profile.depth)
        return {n: self._speed * s for n, s in times.items() if deep is None or n in deep}

    def curve(self) -> dict[str, dict[int, float]]:
        """The times known now, in milliseconds by number of rows, with an empty cache."""
        curves = {"decode_ms": self._decode, "prefill_ms": self._prefill, "verify_ms": self._verify}
        return {
            name: {n: round(1000 * s, 1) for n, s in self._known(curve).items()}
            for name, curve in curves.items()
        }


def _deep_verify_s(profile: Profile) -> dict[int, float]:
    deeper_s = profile.deep_decode_s.get(1, 0.0) - profile.decode_s.get(1, 0.0)
    return {n: seconds + n * max(0.0, deeper_s) for n, seconds in profile.verify_s.items()}


def _span(slots: Sequence[int]) -> int:
    return slots[-1] - slots[0] + 1

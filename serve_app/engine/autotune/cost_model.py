"""How long a forward pass takes, on this machine with this model. Pure: no model, no threads, no clock.

Measured at the start and corrected while running. A pass is either some tokens of each of some decoding
sequences, or a chunk of one prompt, and a step's time is their sum; in a unified cache the two share one.
It takes longer the more tokens stand in the cache before it; that part grows straight. In a unified cache
those of other sequences count, too, as far as the kernel does not skip what is masked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Weight of the newest step in what is known of its kind, and the most that it grows to: what was not seen
# for so many steps of other sizes is old.
_NEWEST, _MOST_NEWEST, _OLD = 0.1, 0.5, 8
# A pass that took more or less than expected by a larger part counts as if by that: it may be a hiccup.
_MOST_CHANGE = 0.5
# Between measured sizes, kernels like multiples of this many rows.
_ROW_STEP = 4
# A split that gains less than this part is noise.
_LEAST_GAIN = 0.05
# What was planned is planned anew after so many passes, as the curve may have moved.
_PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Measurements:
    """Seconds that single passes took; empty if passes cost nothing worth counting."""

    decode_s: Mapping[int, float] = field(default_factory=dict)
    """By number of sequences that get one token each, with an empty cache before them."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """By number of a prompt's rows, with an empty cache before them."""
    verify_s: Mapping[int, float] = field(default_factory=dict)
    """By number of one sequence's rows that are all sampled from: a token and drafted ones."""
    depth: int = 0
    """Tokens in every lane for the next two; in a unified cache, the same cells."""
    deep_decode_s: Mapping[int, float] = field(default_factory=dict)
    deep_prefill_s: Mapping[int, float] = field(default_factory=dict)
    copy_s: float = 0.0
    """What copying one lane adds to the next pass."""
    masked: float = 1.0
    """What a token of other sequences costs in a unified cache, as a part of what one of its own does."""


class CostModel:
    """Predicts passes from measurements, and learns from those that follow. Decoder thread only."""

    def __init__(self, measured: Measurements) -> None:
        self._decode = _Curve(measured.decode_s, measured.deep_decode_s, measured.depth)
        self._prefill = _Curve(measured.prefill_s, measured.deep_prefill_s, measured.depth)
        self._verify = _Curve(measured.verify_s, {}, 0)
        self.copy_s = measured.copy_s
        """Seconds that copying a lane takes."""
        self._masked = measured.masked
        self._splits: dict[tuple[tuple[int, ...], int, frozenset[int]], tuple[int, ...]] = {}
        self._retried: set[int] = set()
        self._n_seen = 0

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._decode.measured)

    def attended(self, n_past: float, n_cells: float) -> float:
        """How many tokens of its own would cost a row as much as its `n_past` and the rest of the `n_cells`
        in use in a unified cache. To be given as `n_past` to the other methods."""
        return n_past + self._masked * max(0.0, n_cells - n_past)

    def decode_s(self, n_rows: int, n_past: float = 0) -> float:
        """Seconds to compute `n_rows` tokens of decoding sequences that have `n_past` tokens each."""
        return self._decode.at(n_rows, n_past)

    def verify_s(self, n_sequences: int, n_drafted: int, n_past: float) -> float:
        """Seconds to compute the next token of each sequence, and so many drafted ones behind each."""
        n_rows = n_sequences * (n_drafted + 1)
        if n_sequences > 1 or n_drafted == 0 or not self._verify.measured:
            return self.decode_s(n_rows, n_past)
        deeper_s = self.decode_s(1, n_past) - self.decode_s(1)
        return self._verify.at(n_rows, 0) + n_rows * deeper_s

    def prefill_s(self, n_rows: int, n_past: float) -> float:
        """Seconds to compute `n_rows` of a prompt that has `n_past` tokens in the cache; in a unified one,
        where kernels see all rows alike, of whatever sequences."""
        return self._prefill.at(n_rows, n_past)

    def batch_s(self, n_rows: int, n_past: float) -> float:
        """Seconds that a pass of so many rows may take, whatever they are of; 0 if nothing was measured."""
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
        """How many of a prompt's next rows to compute in a pass of `within_s` at most, beside `beside_s`
        that the step takes anyway: those that get the prompt on fastest; 0 if none fit.

        Kernels have steps, and 63 rows can cost twice what 64 do: what comes into question are the
        measured numbers of rows, multiples of 4 between them, and all that is left.
        """
        sizes = [size for size in self._sizes if size < n_pending] + [n_pending]
        times = {size: self.prefill_s(size, n_past) for size in sizes}
        return _fastest(times, within_s, beside_s)

    def mixed_chunk(self, n_pending: int, n_beside: int, n_past: float, *, within_s: float) -> int:
        """The same for a pass that has `n_beside` rows of other sequences: the numbers that come into
        question are of all rows."""
        sizes = [n - n_beside for n in self._sizes if n_beside < n < n_beside + n_pending]
        times = {n: self.prefill_s(n_beside + n, n_past) for n in [*sizes, n_pending]}
        return _fastest(times, within_s, 0.0)

    @property
    def _sizes(self) -> Sequence[int]:
        measured = self._prefill.measured
        if not measured:
            return []
        dense = [n for n in measured if n <= 64]
        return sorted({*measured, *range(measured[0], dense[-1] if dense else 0, _ROW_STEP)})

    def smallest_chunk(self, n_pending: int) -> int:
        """The fewest of a prompt's rows that are worth a pass."""
        return min([n_pending, *self._prefill.measured[:1]])

    def split(
        self, lanes: tuple[int, ...], n_past: float, blocked: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        """How many of the decoding lanes, which ascend, each pass is to compute.

        llama.cpp computes only consecutive lanes together, so that a pass has rows for those between
        its lanes, too, for nothing; none of them may be `blocked`. All lanes are in one pass, unless
        several are measured to be faster: as there are too many between, or as small ones are (Q8_0 at
        two rows, on AVX-512). Now and then consecutive ones are in one pass all the same: or that would
        never be measured again."""
        n_lanes = len(lanes)
        if not self:
            return (n_lanes,)
        if _span(lanes) == n_lanes and n_lanes not in self._retried:
            self._retried.add(n_lanes)
            return (n_lanes,)
        return self._known_split(lanes, n_past, blocked)

    def _known_split(
        self, lanes: tuple[int, ...], n_past: float, blocked: frozenset[int] = frozenset()
    ) -> tuple[int, ...]:
        key = lanes, _rounded(n_past), blocked
        if key not in self._splits:
            self._splits[key] = self._best_split(*key)
        return self._splits[key]

    def _best_split(
        self, lanes: tuple[int, ...], n_past: float, blocked: frozenset[int]
    ) -> tuple[int, ...]:
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for end in range(1, len(lanes) + 1):
            found = []
            for start in range(end):
                if blocked.isdisjoint(range(lanes[start], lanes[end - 1])):
                    seconds = self.decode_s(_span(lanes[start:end]), n_past)
                    found.append((seconds + best[start][0], (*best[start][1], end - start)))
            best.append(min(found))
        split_s, parts = best[-1]
        whole_s = self.decode_s(_span(lanes), n_past)
        whole = blocked.isdisjoint(range(lanes[0], lanes[-1]))
        return (len(lanes),) if whole and split_s >= (1 - _LEAST_GAIN) * whole_s else parts

    def steps_s(self, n_rows: int, n_past: float) -> float:
        """Seconds of the passes that compute a token of each of `n_rows` sequences in consecutive lanes."""
        if not self:
            return 0.0
        parts = self._known_split(tuple(range(n_rows)), n_past)
        return sum(self.decode_s(part, n_past) for part in parts)

    def saw_decode(self, n_sequences: int, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a pass over decoding sequences, one row of each or with drafts."""
        if n_rows == n_sequences:
            self._decode.learn(n_rows, n_past, seconds)
        elif n_sequences == 1:
            self._verify.learn(n_rows, 0, seconds)
        self._n_seen += 1
        if self._n_seen % _PLANS_KEPT == 0:
            self._splits.clear()
            self._retried.clear()

    def saw_prefill(self, n_rows: int, n_past: float, seconds: float) -> None:
        """Learn from a pass that `prefill_s` foretells."""
        self._prefill.learn(n_rows, n_past, seconds)

    def curve(self) -> dict[str, dict[int, float]]:
        """What is known now, in milliseconds by number of rows, with nothing in the cache before them."""
        return {
            "decode_ms": {n: round(1000 * self.decode_s(n), 1) for n in self._decode.measured},
            "prefill_ms": {
                n: round(1000 * self.prefill_s(n, 0), 1) for n in self._prefill.measured
            },
            "verify_ms": {n: round(1000 * self._verify.at(n, 0), 1) for n in self._verify.measured},
        }


class _Curve:
    """Seconds by number of rows and depth: straight between what was measured, and beyond."""

    def __init__(self, shallow: Mapping[int, float], deep: Mapping[int, float], depth: int) -> None:
        self.measured = sorted(shallow)
        self._seconds = [shallow[n] for n in self.measured]
        known = sorted(n for n in deep if n in shallow)
        slopes = [max(0.0, deep[n] - shallow[n]) / max(1, depth) for n in known]
        self._slopes = [_between(known, slopes, n) for n in self.measured]
        self._n_learned = 0
        self._learned_at = [0] * len(self.measured)

    def at(self, n_rows: int, n_past: float) -> float:
        token_s = _between(self.measured, self._slopes, n_rows)
        return _between(self.measured, self._seconds, n_rows) + n_past * token_s

    def learn(self, n_rows: int, n_past: float, seconds: float) -> None:
        """Move the nearest measured point by what this pass took more or less than expected."""
        expected = self.at(n_rows, n_past)
        if not expected:
            return
        right = bisect_left(self.measured, n_rows)
        around = range(max(0, right - 1), min(right + 1, len(self.measured)))
        nearest = min(around, key=lambda i: abs(self.measured[i] - n_rows))
        news = max(-_MOST_CHANGE, min(_MOST_CHANGE, seconds / expected - 1))
        age = self._n_learned - self._learned_at[nearest]
        self._learned_at[nearest] = self._n_learned
        self._n_learned += 1
        change = 1 + news * min(_MOST_NEWEST, _NEWEST * max(1.0, age / _OLD))
        self._seconds[nearest] *= change
        self._slopes[nearest] *= change


def _fastest(times: Mapping[int, float], within_s: float, beside_s: float) -> int:
    """The number of rows with the best rate among those whose time fits; 0 if none does."""
    fitting = [size for size, seconds in times.items() if seconds <= within_s]
    rates = {size: size / (beside_s + times[size] or 1e-9) for size in fitting}
    return max(fitting, key=lambda size: (rates[size], size), default=0)


def _span(lanes: Sequence[int]) -> int:
    return lanes[-1] - lanes[0] + 1


def _rounded(n_past: float) -> int:
    return int(n_past) // 256 * 256


def _between(points: Sequence[int], values: Sequence[float], x: int) -> float:
    """The value at x: straight between the points, the first one's before, growing with x beyond."""
    if not points:
        return 0.0
    right = bisect_left(points, x)
    if right == len(points):
        return values[-1] * x / points[-1]
    if right == 0 or points[right] == x:
        return values[right]
    left = right - 1
    part = (x - points[left]) / (points[right] - points[left])
    return values[left] + part * (values[right] - values[left])

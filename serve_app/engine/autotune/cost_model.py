"""The cost model: how long a batch takes with this model on this machine. Pure: no model, no clock.

Measured at the start and corrected while running. A batch is either some tokens of each of some decoding
sequences, or a chunk of one prompt, and a step's time is their sum; in a unified cache the two share one.
It takes longer the more tokens stand in the cache before it; that part grows straight. In a unified cache
those of other sequences count, too, as far as the kernel does not skip what is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.engine.autotune.curve import Curve, Speed

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


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured seconds of single batches; empty if batches cost nothing worth counting."""

    decode_s: Mapping[int, float] = field(default_factory=dict)
    """By number of sequences that get one token each, with an empty cache before them."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """By number of a prompt's rows, with an empty cache before them."""
    verify_s: Mapping[int, float] = field(default_factory=dict)
    """By number of one sequence's rows that are all sampled from: a token and drafted ones."""
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
        speed, depth = Speed(), profile.depth
        self._decode = Curve(profile.decode_s, profile.deep_decode_s, depth, speed)
        self._prefill = Curve(profile.prefill_s, profile.deep_prefill_s, depth, speed)
        self._verify = Curve(profile.verify_s, _deep_verify_s(profile), depth, speed)
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
        key = slots, _rounded(n_past), blocked
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
    """Each of the rows is taken to cost at depth what a decoding sequence's does."""
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


def _rounded(n_past: float) -> int:
    return int(n_past) // 256 * 256

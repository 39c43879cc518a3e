"""Makes a profile: measures what batches cost, by running some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.backends.base import Row, State

# Numbers of rows: the most telling ones first.
_CHUNKS, _NEXT_CHUNKS, _MORE_CHUNKS = (16, 64), (32, 8, 48), (24, 40, 56, 128, 96, 256, 512)
_DECODES, _MORE_DECODES = (2, 4, 8, 16, 32, 64), (3, 6, 12, 24, 48)
_VERIFIES = (2, 4, 8, 3, 6)
# Tokens of a slot that is not empty: llama.cpp attends to multiples of so many cells, with fewer nothing
# takes longer. And the part of the time left that they may take.
_DEPTH, _FILLING = 256, 1 / 2
# Batches shorter than this are measured twice: the shorter, the noisier.
_SHORT_S = 0.35
# What a copy costs is a difference of two batches; each is tried so often, if it is short.
_TRIALS = 3
# More than this is noise.
_MOST_MASKED = 4.0
# So do those that take so many times longer than smaller ones, by row: something else may have run.
_ODD = 1.2


class ProfiledContext(Protocol):
    """What the profiler needs of a context; see `serve_app.engine.backends.base.Backend`."""

    def decode(self, rows: Sequence[Row]) -> None:
        """One forward pass."""

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop the sequence's tokens from position n_past on."""

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` a copy of sequence `source`."""

    def save(self, seq_id: int) -> State:
        """The sequence's tokens as a state."""

    def restore(self, seq_id: int, state: State) -> None:
        """Fill a sequence with a state."""


class Profiler:
    """Makes one profile, in an empty cache. Decoder thread only.

    First `essentials`, then `rest`. A batch that would take more time than is left is left out, and
    predicted from those that were measured. At depth, all slots hold the same tokens: in a unified
    cache the same cells, and once each their own, to see what those of others cost. Without `can_rewind`,
    nothing is measured at depth: a slot would have to forget the rows of each batch.
    """

    def __init__(
        self,
        context: ProfiledContext,
        *,
        n_slots: int,
        n_ctx_slot: int,
        n_batch: int,
        unified: bool = False,
        can_rewind: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context = context
        self._n_slots = n_slots
        self._n_ctx_slot = n_ctx_slot
        self._n_batch = n_batch
        self._unified = unified
        self._can_rewind = can_rewind
        self._clock = clock
        self._left_s = 0.0
        self._decode: dict[int, float] = {}
        self._verify: dict[int, float] = {}
        self._prefill: dict[int, float] = {}
        self._depth = 0
        self._deep_decode: dict[int, float] = {}
        self._deep_prefill: dict[int, float] = {}
        self._copy_s, self._masked = 0.0, 1.0

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return Profile(
            decode_s=self._decode,
            prefill_s=self._prefill,
            verify_s=self._verify,
            depth=self._depth,
            deep_decode_s=self._deep_decode,
            deep_prefill_s=self._deep_prefill,
            copy_s=self._copy_s,
            masked=self._masked,
        )

    def essentials(self, limit_s: float) -> Iterator[None]:
        """The batches that tell one kind of context from another, in about `limit_s`: each is run when the
        next is asked for."""
        self._left_s = limit_s
        ends = sorted({self._n_slots, 1}, reverse=True)
        yield from self._measure(self._decode, ends, self._decode_batch, 0)
        chunks = self._fitting(_CHUNKS, 0) or [min(self._n_batch, self._n_ctx_slot - 1)]
        yield from self._measure(self._prefill, chunks, self._prefill_batch, 0)
        yield from self._fill()
        if self._depth:
            yield from self._measure(self._deep_decode, ends, self._decode_batch, self._depth)
            chunks = self._fitting(_CHUNKS, self._depth)
            yield from self._measure(self._deep_prefill, chunks, self._prefill_batch, self._depth)
            yield from self._measure_masked()

    def rest(self, limit_s: float) -> None:
        """After all essentials, what is between them, in about `limit_s`. Leaves the cache empty."""
        self._left_s = limit_s
        for _ in self._rest():
            pass

    def _rest(self) -> Iterator[None]:
        between, more = self._slot_counts(_DECODES), self._slot_counts(_MORE_DECODES)
        chunks, more_chunks = self._fitting(_NEXT_CHUNKS, 0), self._fitting(_MORE_CHUNKS, 0)
        if self._depth:
            self._measure_copy()
            beginning = self._context.save(0)
        self._empty()
        yield from self._measure(self._decode, between, self._decode_batch, 0)
        yield from self._measure(self._prefill, chunks, self._prefill_batch, 0)
        if self._depth:
            self._context.restore(0, beginning)
            self._fill_slots()
            deep = [n for n in between if n in self._decode]
            yield from self._measure(self._deep_decode, deep, self._decode_batch, self._depth)
            deep = [n for n in self._fitting(chunks, self._depth) if n in self._prefill]
            yield from self._measure(self._deep_prefill, deep, self._prefill_batch, self._depth)
            self._empty()
        yield from self._measure(self._verify, self._fitting(_VERIFIES, 0), self._verify_batch, 0)
        yield from self._measure(self._decode, more, self._decode_batch, 0)
        yield from self._measure(self._prefill, more_chunks, self._prefill_batch, 0)

    def _empty(self) -> None:
        for seq_id in range(self._n_slots):
            self._context.truncate(seq_id, 0)

    def _slot_counts(self, counts: Sequence[int]) -> list[int]:
        return [n for n in counts if n < self._n_slots]

    def _fitting(self, sizes: Sequence[int], depth: int) -> list[int]:
        return [n for n in sizes if n <= min(self._n_batch, self._n_ctx_slot - depth)]

    def _fill(self) -> Iterator[None]:
        """Give every slot the same beginning, if there is time for that."""
        row_s = min(seconds / n for n, seconds in self._prefill.items())
        fitting = max(self._n_ctx_slot - max(_CHUNKS), self._n_ctx_slot // 2)
        depth = min(_DEPTH, fitting) // 8 * 8
        if not self._can_rewind or not depth or not self._time_for(depth * row_s / _FILLING):
            return
        for begin in range(0, depth, self._n_batch):
            n_rows = min(self._n_batch, depth - begin)
            seconds = self._timed(partial(self._prefill_batch, n_rows, begin))
            if begin == 0:
                self._prefill[n_rows] = min(seconds, self._prefill.get(n_rows, seconds))
            yield
        self._depth = depth
        self._fill_slots()

    def _fill_slots(self) -> None:
        """Give every slot what the first one has."""
        if self._unified:
            self._share()
        else:
            self._fill_others()

    def _share(self) -> None:
        """Give every slot the first one's cells."""
        for seq_id in range(1, self._n_slots):
            self._context.copy(0, seq_id)

    def _fill_others(self) -> None:
        """Give every slot cells of its own with what the first one has."""
        state = self._context.save(0)
        for seq_id in range(1, self._n_slots):
            self._context.truncate(seq_id, 0)
            self._context.restore(seq_id, state)

    def _measure_masked(self) -> Iterator[None]:
        """See `Profile.masked`: what batches take longer with cells of others, for each of these,
        beside what they take longer with cells of their own."""
        if self._n_slots == 1 or not self._unified:
            return
        kinds = (
            (self._deep_decode, self._decode, self._decode_batch),
            (self._deep_prefill, self._prefill, self._prefill_batch),
        )
        known = [
            (max(n for n in deep if n in shallow), deep, shallow, run)
            for deep, shallow, run in kinds
            if deep.keys() & shallow.keys()
        ]
        if not known or not self._time_for(sum(deep[n] for n, deep, _, _ in known)):
            return
        self._fill_others()
        own_s = others_s = 0.0
        for n, deep, shallow, run in known:
            own_s += max(0.0, deep[n] - shallow[n])
            others_s += max(0.0, self._trial(n, run, self._depth) - deep[n])
            yield
        self._share()
        if own_s:
            self._masked = min(_MOST_MASKED, others_s / (self._n_slots - 1) / own_s)

    def _measure_copy(self) -> None:
        """What a copied slot adds to the next batch."""
        if self._n_slots > 1:
            alone_s = self._shortest(self._decode_batch)
            with_copy_s = self._shortest(self._copy_batch)
            self._copy_s = max(0.0, with_copy_s - alone_s)

    def _measure(
        self,
        found: dict[int, float],
        sizes: Sequence[int],
        run: Callable[[int, int], None],
        depth: int,
    ) -> Iterator[None]:
        for n in sizes:
            if n in found:
                continue
            known = {size: seconds for size, seconds in found.items() if size <= n}
            expected = n * min((s / m for m, s in (known or found).items()), default=0.0)
            if found and not self._time_for((2 if expected < _SHORT_S else 1) * expected):
                continue
            seconds = self._trial(n, run, depth)
            yield
            odd = bool(known) and seconds > _ODD * n * min(s / m for m, s in known.items())
            if (odd or seconds < _SHORT_S) and self._time_for(seconds):
                seconds = min(seconds, self._trial(n, run, depth))
            yield  # in any case: what is compared stays in step
            found[n] = seconds

    def _trial(self, n: int, run: Callable[[int, int], None], depth: int) -> float:
        """Seconds of one batch, whose rows are forgotten again."""
        seconds = self._timed(lambda: run(n, depth))
        for seq_id in range(n if run == self._decode_batch else 1):
            self._context.truncate(seq_id, depth)
        return seconds

    def _shortest(self, run: Callable[[int, int], None]) -> float:
        """Seconds of a batch of one row, of several trials if it is short: a difference of two such is less
        than what anything else that runs adds to one."""
        trials = [self._trial(1, run, self._depth)]
        while trials[0] < _SHORT_S and len(trials) < _TRIALS and self._time_for(trials[0]):
            trials.append(self._trial(1, run, self._depth))
        return min(trials)

    def _timed(self, run: Callable[[], None]) -> float:
        began = self._clock()
        run()
        seconds = self._clock() - began
        self._left_s -= seconds
        return seconds

    def _time_for(self, seconds: float) -> bool:
        return seconds < self._left_s

    def _decode_batch(self, n_rows: int, depth: int) -> None:
        self._context.decode([(0, depth, seq_id, True) for seq_id in range(n_rows)])

    def _copy_batch(self, n_rows: int, depth: int) -> None:
        self._context.copy(0, 1)
        self._decode_batch(n_rows, depth)

    def _prefill_batch(self, n_rows: int, depth: int) -> None:
        end = depth + n_rows
        self._context.decode([(0, i, 0, i == end - 1) for i in range(depth, end)])

    def _verify_batch(self, n_rows: int, depth: int) -> None:
        self._context.decode([(0, i, 0, True) for i in range(depth, depth + n_rows)])


def in_turns(profilers: Sequence[Profiler], limit_s: float) -> None:
    """Run the essentials of these, which are to be compared, batch by batch: the speed of a machine that
    others share changes from one minute to the next."""
    for _ in zip_longest(
        *(profiler.essentials(limit_s / len(profilers)) for profiler in profilers)
    ):
        pass

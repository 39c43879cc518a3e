"""Makes a profile: measures what batches cost, by running some."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.trials import Trials
from serve_app.engine.backends.base import Row, State

# Numbers of rows: the most telling ones first.
_CHUNKS, _NEXT_CHUNKS, _MORE_CHUNKS = (16, 64), (32, 8, 48), (24, 40, 56, 128, 96, 256, 512)
_MOST_CHUNKS = (80, 112, 192, 160, 384)
_DECODES, _MORE_DECODES = (2, 4, 8, 16, 32, 64), (3, 6, 12, 24, 48)
_VERIFIES = (2, 4, 8, 16, 3, 6, 12)
# The part of a slot that is in use when it is copied: with less, only that would be copied.
_COPIED = 0.27
# What a copy costs is a difference of two batches, each tried so often.
_TRIALS = 3
ALONE = 0.75
"""A profile is not kept if this process had less of its threads' time than this meanwhile: something
else computed. Ray and its start take a fifth of two cores."""


class ProfiledContext(Protocol):
    """The methods that the profiler needs of a context; see
    `serve_app.engine.backends.base.Backend`."""

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
    """Makes a profile without depth, in an empty cache. Decoder thread only.

    First `essentials`, then `rest`. A batch that would take more time than is left is left out, and
    predicted from those that were measured.
    """

    def __init__(
        self,
        context: ProfiledContext,
        *,
        n_slots: int,
        n_ctx_slot: int,
        n_batch: int,
        can_rewind: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without `can_rewind`, copies are not measured: a slot would have to forget the row behind."""
        self._context = context
        self._n_slots = n_slots
        self._n_ctx_slot = n_ctx_slot
        self._n_batch = n_batch
        self._can_rewind = can_rewind
        self._trials = Trials(clock)
        self._decode: dict[int, float] = {}
        self._verify: dict[int, float] = {}
        self._prefill: dict[int, float] = {}
        self._copy_s = 0.0

    @property
    def profile(self) -> Profile:
        """The measurements so far."""
        return Profile(
            decode_s=self._decode,
            prefill_s=self._prefill,
            verify_s=self._verify,
            copy_s=self._copy_s,
        )

    @property
    def noise(self) -> float:
        """The part by which the same batches differed."""
        return self._trials.noise

    def essentials(self, limit_s: float) -> Iterator[None]:
        """The batches that tell one kind of context from another, in about `limit_s`: each is run
        when the next is asked for."""
        self._trials.left_s = limit_s
        ends = sorted({self._n_slots, 1}, reverse=True)
        yield from self._trials.measure(self._decode, ends, self._decoded)
        chunks = self._fitting(_CHUNKS) or [min(self._n_batch, self._n_ctx_slot - 1)]
        yield from self._trials.measure(self._prefill, chunks, self._prefilled)

    def rest(self, limit_s: float) -> None:
        """After all essentials, what is between them, in about `limit_s`. Leaves the cache empty."""
        self._trials.left_s = limit_s
        self._measure_copy()
        kinds = (
            (self._decode, self._slot_counts(_DECODES), self._decoded),
            (self._prefill, self._fitting(_NEXT_CHUNKS), self._prefilled),
            (self._verify, self._fitting(_VERIFIES), self._verified),
            (self._decode, self._slot_counts(_MORE_DECODES), self._decoded),
            (self._prefill, self._fitting(_MORE_CHUNKS), self._prefilled),
            (self._prefill, self._fitting(_MOST_CHUNKS), self._prefilled),
        )
        for found, sizes, trial in kinds:
            for _ in self._trials.measure(found, sizes, trial):
                pass

    def _slot_counts(self, counts: Sequence[int]) -> list[int]:
        return [n for n in counts if n < self._n_slots]

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        return [n for n in sizes if n <= min(self._n_batch, self._n_ctx_slot)]

    def _measure_copy(self) -> None:
        """Measures how much a copied slot adds to the next batch."""
        begin = min(int(_COPIED * self._n_ctx_slot), self._n_batch)
        row_s = min(seconds / n for n, seconds in self._prefill.items())
        possible = self._n_slots > 1 and self._can_rewind and begin > 0
        if not possible or not self._trials.time_for(2 * begin * row_s):
            return
        self._trials.timed(partial(self._context.decode, _prompt_rows(begin)))
        alone_s = with_copy_s = math.inf
        for _ in range(_TRIALS):
            alone_s = min(alone_s, self._one_more(begin))
            with_copy_s = min(with_copy_s, self._copied(begin))
        self._copy_s = max(0.0, with_copy_s - alone_s)
        for seq_id in range(self._n_slots):
            self._context.truncate(seq_id, 0)

    def _one_more(self, begin: int) -> float:
        seconds = self._trials.timed(partial(self._context.decode, [(0, begin, 0, True)]))
        self._context.truncate(0, begin)
        return seconds

    def _copied(self, begin: int) -> float:
        began = self._trials.left_s
        self._trials.timed(partial(self._context.copy, 0, 1))
        self._one_more(begin)
        return began - self._trials.left_s

    def _decoded(self, n_rows: int) -> float:
        return self._trial([(0, 0, seq_id, True) for seq_id in range(n_rows)])

    def _prefilled(self, n_rows: int) -> float:
        return self._trial(_prompt_rows(n_rows))

    def _verified(self, n_rows: int) -> float:
        return self._trial([(0, i, 0, True) for i in range(n_rows)])

    def _trial(self, rows: Sequence[Row]) -> float:
        """Seconds of one batch, whose rows are forgotten again."""
        seconds = self._trials.timed(partial(self._context.decode, rows))
        for seq_id in {row[2] for row in rows}:
            self._context.truncate(seq_id, 0)
        return seconds


def _prompt_rows(n_rows: int) -> list[Row]:
    return [(0, i, 0, i == n_rows - 1) for i in range(n_rows)]


class Measures(Protocol):
    """A measurement that takes turns with others of its kind."""

    @property
    def noise(self) -> float:
        """The part by which the same batches differed."""

    def essentials(self, limit_s: float) -> Iterator[None]:
        """The batches that it is compared by."""


def in_turns(profilers: Sequence[Measures], limit_s: float) -> None:
    """Run the essentials of these, which are to be compared, batch by batch: the speed of a machine
    that others share changes from one minute to the next."""
    for _ in zip_longest(
        *(profiler.essentials(limit_s / len(profilers)) for profiler in profilers)
    ):
        pass

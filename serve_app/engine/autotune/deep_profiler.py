"""Measures what batches take longer the more tokens stand in the cache before them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.profiler import ProfiledContext
from serve_app.engine.autotune.trials import Trials

# Tokens before a batch, at most: keys and values are in no cache of the processor any more, and from there
# on the time grows straight.
DEPTH = 2048
ROOM = 64
"""Cells besides, for the rows of a batch."""
# Rows of a prompt's chunk, the most telling ones first. Flash attention has another kernel from 64 on.
_CHUNKS, _MORE_CHUNKS = (16, 64), (56, 32)
# More than this is noise. Less is measured here, where all masked cells lie in one piece, but is not true
# of a server, where they lie between a sequence's own: with flash attention and 16 sequences (0.6B, Q4_0),
# batches took as long as 0.2 says, while 0.0 to 0.04 was measured.
_MOST_MASKED, _LEAST_MASKED = 4.0, 0.2


class DeepContext(ProfiledContext, Protocol):
    """What is needed of a context with a unified cache besides."""

    def append(self, source: int, target: int) -> None:
        """Have sequence `target` attend to the cells of sequence `source`, besides its own."""


@dataclass(frozen=True, slots=True)
class Depth:
    """What a depth adds to batches, in seconds."""

    n_tokens: int = 0
    decode_s: Mapping[int, float] = field(default_factory=dict)
    """By sequences that get one token each and attend to the same cells."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """By a prompt's rows."""
    masked: float = 1.0
    """See `Profile.masked`."""

    def added_to(self, profile: Profile, *, unified: bool) -> Profile:
        """A profile of what has the same kind of attention, with this depth. In a split cache, each
        sequence attends to cells of its own: `n` take `n` times as long."""
        decode_s = dict(self.decode_s)
        if not unified and 1 in decode_s:
            decode_s = {n: n * decode_s[1] for n in profile.decode_s}
        return replace(
            profile,
            depth=self.n_tokens,
            deep_decode_s=_sum(profile.decode_s, decode_s),
            deep_prefill_s=_sum(profile.prefill_s, self.prefill_s),
            masked=self.masked,
        )


class DeepProfiler:
    """Measures a depth in an empty, unified context. Decoder thread only.

    Nothing is computed to get deep: a few tokens are saved and restored again and again, each time into
    other cells, which are all given to one sequence. Its positions repeat, but kernels take as long.
    """

    def __init__(
        self,
        context: DeepContext,
        *,
        n_slots: int,
        depth: int,
        n_batch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`depth` are the cells to be filled, a multiple of `ROOM`; the context has room for another batch,
        and two sequences at least."""
        self._context = context
        self._counts = sorted({1, n_slots})
        self._depth = depth
        self._n_batch = n_batch
        self._trials = Trials(clock)
        self._n_begun = 0
        """Tokens that the sequences have by their positions."""
        self._decode: dict[int, float] = {}
        self._prefill: dict[int, float] = {}
        self._deep_decode: dict[int, float] = {}
        self._deep_prefill: dict[int, float] = {}
        self._masked_s: dict[int, float] = {}

    @property
    def depth(self) -> Depth:
        """What was measured so far."""
        decode_s = _difference(self._deep_decode, self._decode)
        masked = 1.0
        if 1 in self._masked_s and decode_s.get(1):
            others_s = max(0.0, self._masked_s[1] - self._decode[1])
            masked = min(_MOST_MASKED, max(_LEAST_MASKED, others_s / decode_s[1]))
        prefill_s = _difference(self._deep_prefill, self._prefill)
        return Depth(self._depth if decode_s else 0, decode_s, prefill_s, masked)

    def essentials(self, limit_s: float) -> Iterator[None]:
        """What tells one kind of attention from another, in about `limit_s`: a batch is run when the next
        is asked for."""
        self._trials.left_s = limit_s
        yield from self._trials.measure(self._decode, self._counts, self._decoded)
        yield from self._trials.measure(self._prefill, self._fitting(_CHUNKS), self._prefilled)
        self._fill()
        yield from self._trials.measure(self._deep_decode, self._counts, self._decoded)
        chunks = [n for n in self._fitting(_CHUNKS) if n in self._prefill]
        yield from self._trials.measure(self._deep_prefill, chunks, self._prefilled)
        yield from self._measure_masked()

    def rest(self, limit_s: float) -> None:
        """After all essentials, more chunks, in about `limit_s`."""
        self._trials.left_s = limit_s
        chunks, n_begun = self._fitting(_MORE_CHUNKS), self._n_begun
        for _ in self._trials.measure(self._deep_prefill, chunks, self._prefilled):
            pass
        self._empty()
        chunks = [n for n in chunks if n in self._deep_prefill]
        for _ in self._trials.measure(self._prefill, chunks, self._prefilled):
            pass
        self._n_begun = n_begun

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        return [n for n in sizes if n <= self._n_batch] or [self._n_batch]

    def _empty(self) -> None:
        self._n_begun = 0
        for seq_id in range(self._counts[-1]):
            self._context.truncate(seq_id, 0)

    def _fill(self) -> None:
        """Give sequence 0 all cells of the depth, and share them."""
        n_tokens = max(self._prefill)
        self._context.decode([(0, i, 1, i == n_tokens - 1) for i in range(n_tokens)])
        state = self._context.save(1)
        for _ in range(self._depth // n_tokens):
            self._context.restore(1, state)
            self._context.append(1, 0)
        self._n_begun = n_tokens
        self._context.truncate(1, 0)
        for seq_id in range(1, self._counts[-1]):
            self._context.copy(0, seq_id)

    def _measure_masked(self) -> Iterator[None]:
        """One row of a sequence that has nothing, beside all cells of another one."""
        self._context.truncate(1, 0)
        yield from self._trials.measure(self._masked_s, [1], self._beside)

    def _beside(self, n_rows: int) -> float:
        seconds = self._trials.timed(lambda: self._context.decode([(0, 0, 1, True)]))
        self._context.truncate(1, 0)
        return seconds

    def _decoded(self, n_rows: int) -> float:
        begin = self._n_begun
        rows = [(0, begin, seq_id, True) for seq_id in range(n_rows)]
        seconds = self._trials.timed(lambda: self._context.decode(rows))
        for seq_id in range(n_rows):
            self._context.truncate(seq_id, begin)
        return seconds

    def _prefilled(self, n_rows: int) -> float:
        begin, end = self._n_begun, self._n_begun + n_rows
        rows = [(0, i, 0, i == end - 1) for i in range(begin, end)]
        seconds = self._trials.timed(lambda: self._context.decode(rows))
        self._context.truncate(0, begin)
        return seconds


def _difference(deep: Mapping[int, float], shallow: Mapping[int, float]) -> dict[int, float]:
    return {n: max(0.0, deep[n] - shallow[n]) for n in deep if n in shallow}


def _sum(shallow: Mapping[int, float], added: Mapping[int, float]) -> dict[int, float]:
    return {n: shallow[n] + added[n] for n in shallow if n in added}

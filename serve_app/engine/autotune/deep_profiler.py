"""Measures what batches take longer the more tokens stand in the cache before them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.profiler import ProfiledContext
from serve_app.engine.autotune.trials import Trials, doubtful

# Tokens before a batch, at most: keys and values are in no cache of the processor any more, and from there
# on the time grows straight.
DEPTH = 2048
ROOM = 64
"""Cells besides, for the rows of a batch."""
# Rows of a prompt's chunk, the most telling ones first. Flash attention has another kernel from 64 on.
_CHUNKS, _MORE_CHUNKS = (16, 64), (56, 32)
# More than this is noise.
_MOST_MASKED = 4.0
# Rows that a sequence writes until it is another one's turn: cells of others lie between its own, as on a
# server. In one piece they cost a fifth of that with flash attention (0.6B, Q4_0, 16 sequences).
_TURN = 4
# All is measured so often, and so often more if it breaks a physical order.
_ROUNDS, _DOUBTED_ROUNDS = 2, 1
# The part of the time that must be left for another round.
_LEFT = 0.4


_Measure = Callable[[dict[int, float], Sequence[int], Callable[[int], float]], Iterator[None]]


class DeepContext(ProfiledContext, Protocol):
    """The further methods needed of a context with a unified cache."""

    def append(self, source: int, target: int) -> None:
        """Have sequence `target` attend to the cells of sequence `source`, besides its own."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The seconds that a depth adds to batches."""

    n_tokens: int = 0
    decode_s: Mapping[int, float] = field(default_factory=dict)
    """By sequences that get one token each and attend to the same cells."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """By a prompt's rows."""
    masked: float = 1.0
    """The cost of a cell of others, as a part of that of a cell of the row's own sequence."""

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
    other cells, which are given to the sequences in turns, and later to all of them. Their positions
    repeat, but kernels take as long.
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
        """`depth` are the cells to be filled, a multiple of `ROOM`; the context has room for another
        batch, and two sequences more than slots."""
        self._context = context
        self._counts = sorted({1, n_slots})
        self._n_turns = max(2, n_slots)
        """Sequences that have the cells in turns, before they share them."""
        self._depth = depth
        self._n_batch = n_batch
        self._trials = Trials(clock)
        self._n_begun = 0
        """Tokens that the sequences have by their positions."""
        self._decode: dict[int, float] = {}
        self._prefill: dict[int, float] = {}
        self._deep_decode: dict[int, float] = {}
        self._deep_prefill: dict[int, float] = {}
        self._turns_s: dict[int, float] = {}
        """Measure batches whose sequences have cells in turns."""

    @property
    def depth(self) -> Depth:
        """The measurements so far."""
        decode_s = _difference(self._deep_decode, self._decode)
        prefill_s = _difference(self._deep_prefill, self._prefill)
        masked = min(_MOST_MASKED, max(0.0, self._masked))
        return Depth(self._depth if decode_s else 0, decode_s, prefill_s, masked)

    @property
    def noise(self) -> float:
        """The part by which the same batches differed."""
        return self._trials.noise

    @property
    def _masked(self) -> float:
        """The cost of other sequences' cells, as a part of the cost of own ones; 1 if it was not
        measured. Below 0 if something else computed meanwhile. A row has its part of all cells, the
        others' are masked."""
        n, whole_s = self._counts[-1], _difference(self._deep_decode, self._decode)
        if n not in self._turns_s or not whole_s.get(n):
            return 1.0
        part = (self._turns_s[n] - self._decode[n]) / whole_s[n]
        return (self._n_turns * part - 1) / (self._n_turns - 1)

    @property
    def _is_doubtful(self) -> bool:
        depths = (self.depth.decode_s, self.depth.prefill_s)
        falls = any(not added for depth in depths for added in depth.values())
        return falls or self._masked < 0 or any(doubtful(depth) for depth in depths)

    def essentials(self, limit_s: float) -> Iterator[None]:
        """Measures the differences between kinds of attention, in about `limit_s`: each `next` runs
        a batch."""
        self._trials.left_s = limit_s
        yield from self._round(self._trials.measure)
        for n_more in range(1, _ROUNDS + _DOUBTED_ROUNDS):
            if not self._trials.time_for(_LEFT * limit_s):
                break
            if n_more < _ROUNDS or self._is_doubtful:
                yield from self._round(self._trials.once_more)

    def _round(self, measure: _Measure) -> Iterator[None]:
        """All batches, from an empty cache on."""
        self._empty()
        yield from measure(self._decode, self._counts, self._decoded)
        yield from measure(self._prefill, self._fitting(_CHUNKS), self._prefilled)
        self._trials.timed(self._fill)
        yield from measure(self._turns_s, self._counts[-1:], self._decoded)
        self._share()
        yield from measure(self._deep_decode, self._counts, self._decoded)
        chunks = [n for n in self._fitting(_CHUNKS) if n in self._prefill]
        yield from measure(self._deep_prefill, chunks, self._prefilled)

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
        for seq_id in range(self._n_turns):
            self._context.truncate(seq_id, 0)

    def _fill(self) -> None:
        """Give the sequences all cells of the depth, in turns."""
        writer, n_tokens = self._n_turns, min(_TURN, self._n_batch)
        self._context.decode([(0, i, writer, i == n_tokens - 1) for i in range(n_tokens)])
        state = self._context.save(writer)
        for turn in range(self._depth // n_tokens):
            self._context.restore(writer, state)
            self._context.append(writer, turn % self._n_turns)
        self._n_begun = n_tokens
        self._context.truncate(writer, 0)

    def _share(self) -> None:
        """Give each sequence what the others have."""
        for seq_id in range(1, self._n_turns):
            self._context.append(seq_id, 0)
        for seq_id in range(1, self._n_turns):
            self._context.copy(0, seq_id)

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

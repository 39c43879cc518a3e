"""Measures whether batches of few rows, which wait for memory, are faster with fewer threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from serve_app.engine.backends.base import Row
from serve_app.engine.options import EngineOptions
from serve_app.llama.formats import FEW_ROWS, Threads

# With no more threads than this, each of them is worth having.
_FEW_THREADS = 4
# A smaller part of a batch's time is noise.
_LEAST_GAIN = 0.05
_MOST_ROUNDS = 5


class TimedContext(Protocol):
    """The methods needed of a context; see `serve_app.llama.context.Context`."""

    def decode(self, rows: Sequence[Row]) -> None:
        """One forward pass."""

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop the sequence's tokens from position n_past on."""

    def use_threads(self, threads: Threads) -> None:
        """Compute with these from now on."""


class Cycle(NamedTuple):
    """Seconds of a batch of few rows and of one of many after it."""

    batch_s: float
    both_s: float
    """OpenMP ends threads that a batch does not need, and starts them again for the next: that counts."""


def candidates(most: int) -> list[int]:
    """Numbers of threads that are tried, the largest first; only one if there is nothing to try."""
    return [most] if most <= _FEW_THREADS else [most, 3 * most // 4, most // 2]


def tries_fewer(options: EngineOptions) -> tuple[str, ...]:
    """Not empty if there is something to try: what a profile's key then says besides."""
    tried = options.fewer_threads and len(candidates(options.threads)) > 1
    return ("fewer",) if tried else ()


def choose(cycles: Mapping[int, Cycle]) -> int:
    """By number of threads: the fastest, or the most threads if that gains little."""
    most, best = max(cycles), min(cycles, key=lambda n: cycles[n].both_s)
    gain_s = cycles[most].both_s - cycles[best].both_s
    return best if gain_s > _LEAST_GAIN * cycles[most].batch_s else most


class ThreadTrial:
    """Tries numbers of threads in an empty cache, in turns, and leaves it empty. Decoder thread only."""

    def __init__(
        self,
        context: TimedContext,
        *,
        n_slots: int,
        n_ctx_slot: int,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context = context
        self._n_slots = n_slots
        self._n_ctx_slot = n_ctx_slot
        self._most = most
        self._clock = clock

    def run(self, limit_s: float) -> Threads:
        """The threads that are best, all of them if there is nothing to choose or no time for it."""
        tried, most = candidates(self._most), self._most
        if len(tried) == 1 or self._n_ctx_slot <= FEW_ROWS:
            return Threads.alike(most, None)
        sizes = sorted({1, min(self._n_slots, FEW_ROWS)})
        self._cycle(most, sizes[-1])  # the first one is slow
        round_s = len(tried) * len(sizes) * self._cycle(most, sizes[-1]).both_s
        n_rounds = min(_MOST_ROUNDS, int(limit_s / round_s))
        if not n_rounds:
            return Threads(most, most, most, "for every batch: trying others would take too long")
        found = {n_rows: self._measured(tried, n_rows, n_rounds) for n_rows in sizes}
        chosen = {n_rows: choose(cycles) for n_rows, cycles in found.items()}
        reason = "; ".join(_told(n_rows, chosen[n_rows], found[n_rows]) for n_rows in sizes)
        return Threads(chosen[1], chosen[sizes[-1]] if len(sizes) > 1 else most, most, reason)

    def _measured(self, tried: Sequence[int], n_rows: int, n_rounds: int) -> dict[int, Cycle]:
        rounds = [{n: self._cycle(n, n_rows) for n in tried} for _ in range(n_rounds)]
        return {
            n: Cycle(
                median(cycles[n].batch_s for cycles in rounds),
                median(cycles[n].both_s for cycles in rounds),
            )
            for n in tried
        }

    def _cycle(self, n_threads: int, n_rows: int) -> Cycle:
        self._context.use_threads(Threads(n_threads, n_threads, self._most, "tried"))
        began = self._clock()
        self._context.decode([(0, 0, seq_id, True) for seq_id in range(n_rows)])
        middle = self._clock()
        for seq_id in range(n_rows):
            self._context.truncate(seq_id, 0)
        again = self._clock()
        n_many = FEW_ROWS + 1
        self._context.decode([(0, i, 0, i == n_many - 1) for i in range(n_many)])
        end = self._clock()
        self._context.truncate(0, 0)
        return Cycle(middle - began, middle - began + end - again)


def _told(n_rows: int, chosen: int, cycles: Mapping[int, Cycle]) -> str:
    rows = "1 row" if n_rows == 1 else f"2 to {FEW_ROWS} rows"
    times = ", ".join(
        f"{cycle.batch_s * 1e3:.1f} and {cycle.both_s * 1e3:.1f} ms with {n}"
        for n, cycle in cycles.items()
    )
    return f"{chosen} for {rows} (alone, and with a prompt's after it: {times})"

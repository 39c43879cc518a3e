"""Measures whether batches of few rows, which wait for memory, are faster with fewer threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, Protocol

from serve_app.engine.backends.base import Row
from serve_app.llama.formats import FEW_ROWS, Threads

# With no more threads than this, each is worth having.
_FEW_THREADS = 4
# A smaller part of a batch's time is noise.
_LEAST_GAIN = 0.05
_MOST_ROUNDS = 5


class TimedContext(Protocol):
    """The methods needed of a context; see `serve_app.llama.context.Context`."""

    def decode(self, rows: Sequence[Row]) -> None: ...

    def truncate(self, seq_id: int, n_past: int) -> None: ...

    def use_threads(self, threads: Threads) -> None: ...


class Cycle(NamedTuple):
    """Seconds of a batch of few rows and of one of many after it."""

    batch_s: float
    both_s: float
    """OpenMP ends threads that a batch does not need, and starts them again for the next: that counts."""


def candidates(most: int) -> list[int]:
    """Numbers of threads that are tried, the largest first; only one if there is nothing to try."""
    return [most] if most <= _FEW_THREADS else [most, 3 * most // 4, most // 2]


def choose(cycles: Mapping[int, Cycle]) -> int:
    """The number of threads whose cycle is the fastest, or the most threads if that gains little."""
    most, best = max(cycles), min(cycles, key=lambda n: cycles[n].both_s)
    gain_s = cycles[most].both_s - cycles[best].both_s
    return best if gain_s > _LEAST_GAIN * cycles[most].batch_s else most


def best_threads(
    context: TimedContext,
    *,
    n_slots: int,
    n_ctx_slot: int,
    most: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Threads:
    """The threads that are best, all of them if there is nothing to choose or no time for it. They are
    tried in turns in an empty cache, which is left empty. Decoder thread only."""
    tried = candidates(most)
    if len(tried) == 1 or n_ctx_slot <= FEW_ROWS:
        return Threads.alike(most, None)

    def batch_s(rows: Sequence[Row]) -> float:
        began = clock()
        context.decode(rows)
        ended = clock()
        for seq_id in {row[2] for row in rows}:
            context.truncate(seq_id, 0)
        return ended - began

    def cycle(n_threads: int, n_rows: int) -> Cycle:
        context.use_threads(Threads(n_threads, n_threads, most, "tried"))
        few_s = batch_s([(0, 0, seq_id, True) for seq_id in range(n_rows)])
        return Cycle(
            few_s, few_s + batch_s([(0, i, 0, i == FEW_ROWS) for i in range(FEW_ROWS + 1)])
        )

    sizes = sorted({1, min(n_slots, FEW_ROWS)})
    cycle(most, sizes[-1])  # the first one is slow
    n_rounds = int(limit_s / (len(tried) * len(sizes) * cycle(most, sizes[-1]).both_s))
    if not n_rounds:
        return Threads(most, most, most, "for every batch: trying others would take too long")
    chosen, reasons = {}, []
    for n_rows in sizes:
        rounds = [{n: cycle(n, n_rows) for n in tried} for _ in range(min(_MOST_ROUNDS, n_rounds))]
        medians = {n: Cycle(*map(median, zip(*(r[n] for r in rounds), strict=True))) for n in tried}
        chosen[n_rows] = choose(medians)
        reasons.append(_reason(n_rows, chosen[n_rows], medians))
    few_rows = chosen[sizes[-1]] if len(sizes) > 1 else most
    return Threads(chosen[1], few_rows, most, "; ".join(reasons))


def _reason(n_rows: int, chosen: int, cycles: Mapping[int, Cycle]) -> str:
    rows = "1 row" if n_rows == 1 else f"2 to {FEW_ROWS} rows"
    times = ", ".join(
        f"{cycle.batch_s * 1e3:.1f} and {cycle.both_s * 1e3:.1f} ms with {n}"
        for n, cycle in cycles.items()
    )
    return f"{chosen} for {rows} (alone, and with a prompt's after it: {times})"

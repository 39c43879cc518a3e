"""Measures whether batches of few rows, which wait for memory, are faster with fewer threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from serve_app.base.formats import FEW_ROWS, Threads
from serve_app.engine.backends.base import Row
from serve_app.engine.choice.rating import fastest

# With no more threads than this, each is worth having.
_FEW_THREADS = 4
# Threads with which a cycle takes up to so much longer, as a part, are as fast.
_SAME = 0.025
_MOST_ROUNDS = 5


class TimedContext(Protocol):
    """The methods needed of a context; see `serve_app.kernels.llama.context.Context`."""

    def decode(self, rows: Sequence[Row]) -> None: ...

    def truncate(self, seq_id: int, n_past: int) -> None: ...

    def use_threads(self, threads: Threads) -> None: ...


def candidates(most: int) -> list[int]:
    """Numbers of threads that are tried, the largest first; only one if there is nothing to try."""
    return [most] if most <= _FEW_THREADS else [most, 3 * most // 4, most // 2]


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

    def cycle_s(n_threads: int, n_rows: int) -> float:
        """The seconds of a batch of few rows and of one of many after it: OpenMP ends threads that a batch
        does not need, and starts them again for the next."""
        context.use_threads(Threads(n_threads, n_threads, most, "tried"))
        few = [(0, 0, seq_id, True) for seq_id in range(n_rows)]
        many = [(0, i, 0, i == FEW_ROWS) for i in range(FEW_ROWS + 1)]
        began = clock()
        for rows in (few, many):
            context.decode(rows)
            for seq_id in {row[2] for row in rows}:
                context.truncate(seq_id, 0)
        return clock() - began

    sizes = sorted({1, min(n_slots, FEW_ROWS)})
    cycle_s(most, sizes[-1])  # the first one is slow
    n_rounds = int(limit_s / (len(tried) * len(sizes) * cycle_s(most, sizes[-1])))
    if not n_rounds:
        return Threads(most, most, most, "for every batch: trying others would take too long")
    chosen, reasons = {}, []
    for n_rows in sizes:
        rounds = [
            {n: cycle_s(n, n_rows) for n in tried} for _ in range(min(_MOST_ROUNDS, n_rounds))
        ]
        times = {n: [median(found[n] for found in rounds)] for n in tried}
        chosen[n_rows], _ = fastest(times, _SAME, "")
        what = "1 row" if n_rows == 1 else f"2 to {FEW_ROWS} rows"
        listed = ", ".join(f"{1e3 * time_s:.1f} ms with {n}" for n, (time_s,) in times.items())
        reasons.append(f"{chosen[n_rows]} for {what} (with a prompt's after it: {listed})")
    few_rows = chosen[sizes[-1]] if len(sizes) > 1 else most
    return Threads(chosen[1], few_rows, most, "; ".join(reasons))

"""Times batches by two clocks, which tell what other programs took of the threads' time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from serve_app.base.sharing import turns

# A batch whose threads had this part of their time was not disturbed: the kernel counts CPU time in ticks.
UNDISTURBED = 0.9
# No batch has a smaller share: something must have computed it.
_LEAST = 0.1


class Clocks:
    """The time that passes, and the CPU time of this process. A batch is timed in the engine's turn, if
    others share its cores, and waits for turns do not count.

    Threads that wait for each other spin, so they use all of their time, unless other programs have the
    cores. Without `threads_of`, the number of threads by rows, nothing is known of others, and every share
    is 1.
    """

    def __init__(
        self,
        threads_of: Callable[[int], int] | None = None,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._threads_of, self._wall, self._cpu = threads_of, wall, cpu
        self._n_cores = len(os.sched_getaffinity(0))
        self._began = 0.0, 0.0

    def begin(self) -> None:
        turn = turns.current()
        turn.take()
        self._began = self._wall() - turn.waited_s, self._cpu()

    def end(self, n_rows: int) -> tuple[float, float]:
        """Seconds since a batch of so many rows began, and the share of them that its threads had."""
        began, computed = self._began
        turn = turns.current()
        seconds = self._wall() - turn.waited_s - began
        turn.give()
        if self._threads_of is None or seconds <= 0:
            return seconds, 1.0
        n_threads = min(self._n_cores, self._threads_of(n_rows))
        share = (self._cpu() - computed) / (seconds * n_threads)
        return seconds, min(1.0, max(_LEAST, share))

    def time(self, run: Callable[[], None], n_rows: int) -> tuple[float, float]:
        """Time a call: the seconds and the share that `end` returns."""
        self.begin()
        run()
        return self.end(n_rows)

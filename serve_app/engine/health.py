"""The health of the decoder thread: whether its batch takes longer than was forecast.

llama.cpp can hang inside a decode (llama.cpp issue 27388): the thread lives, and nothing comes any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A batch may take so many times its forecast. Neighbours, a throttled quota or a lost page cache make one
# slower than it was measured, but not as slow as that for a minute.
_MOST_TIMES = 20
# Forecasts of short batches say nothing of what else may hold a machine up, so they get so many seconds.
_LEAST_S = 60.0
# The same where nothing was measured: a batch of thousands of tokens of a large model on a slow machine.
_UNMEASURED_S = 600.0
# Between two looks, so many seconds count at most: for the rest, the process may have been stopped.
_MOST_BETWEEN_S = 10.0


def is_overdue(ran_s: float, forecast_s: float) -> bool:
    """Whether a batch that has run for so many seconds hangs; 0 is no forecast. Pure."""
    return ran_s > (max(_LEAST_S, _MOST_TIMES * forecast_s) if forecast_s else _UNMEASURED_S)


@dataclass(frozen=True, slots=True, eq=False)
class RunningBatch:
    """A batch that is being computed."""

    began: float
    forecast_s: Callable[[], float]
    """Seconds that the batch may take: any thread may ask, while it is computed."""


class Progress:
    """The batch that the decoder thread computes. It alone may call `computing`; any thread may
    read `batch`.

    Profiling, and slots that are saved and restored, are none of its batches: nothing forecasts them.
    """

    def __init__(self) -> None:
        self.batch: RunningBatch | None = None

    @contextmanager
    def computing(self, forecast_s: Callable[[], float]) -> Iterator[None]:
        """A batch, with its forecast, which only a watcher asks for."""
        self.batch = RunningBatch(time.monotonic(), forecast_s)
        try:
            yield
        finally:
            self.batch = None


class HangWatch:
    """Adds up how long a batch runs. One thread only, which looks every few seconds.

    A process that was stopped, or a machine that was suspended, has not computed meanwhile. So what counts
    is the time in which this looked, too, and not what a clock says at the end.
    """

    def __init__(self) -> None:
        self._batch: RunningBatch | None = None
        self._looked = 0.0
        self._ran_s = 0.0

    def hangs(self, batch: RunningBatch | None, now: float) -> bool:
        """Whether this batch, which is being computed at `now`, is overdue."""
        if batch is None:
            self._batch = None
            return False
        if batch is not self._batch:
            self._batch, self._looked, self._ran_s = batch, batch.began, 0.0
        self._ran_s += min(now - self._looked, _MOST_BETWEEN_S)
        self._looked = now
        return is_overdue(self._ran_s, batch.forecast_s())

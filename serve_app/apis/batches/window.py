"""The lines of batches that one ingress asks for at once: how many, and whose is next.

Nobody tells how many places the engines have for what is in the background, and replicas come and go. So
the window grows until a line is refused, and shrinks then, as TCP's does. It doubles with each round of
answers until the first refusal. From then on it grows by one a round (Jacobson, "Congestion Avoidance and
Control", SIGCOMM 1988).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from serve_app.server.workers.fair_semaphore import FairSemaphore

FIRST = 8.0
MAX_BYTES = 64 * 2**20
"""The most bytes of lines that are asked for at once."""
_SHRINK = 0.8
_PAUSE_S = 0.5
"""The window shrinks once in so long: lines that are refused together were asked for together."""


@dataclass(slots=True)
class LinePlace:
    refused: bool = False
    """Whether the engines had no room for the line."""


class LineWindow:
    """The window of one event loop. The next place is the owner's that has fewest lines inside."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(FIRST, most)
        self._places = FairSemaphore(self.size, max_weight=MAX_BYTES)
        self._shrunk = float("-inf")

    @property
    def size(self) -> int:
        return max(1, int(self._size))

    @asynccontextmanager
    async def place(self, owner: str, n_bytes: int) -> AsyncIterator[LinePlace]:
        """Wait for a place for this owner's line, and keep it for as long as the block runs."""
        line = LinePlace()
        await self._places.enter(owner, n_bytes)
        try:
            yield line
        finally:
            self._resize(was_refused=line.refused)
            self._places.leave(owner, n_bytes)

    def _resize(self, *, was_refused: bool) -> None:
        now = asyncio.get_running_loop().time()
        if not was_refused:
            has_shrunk = self._shrunk > float("-inf")
            self._size = min(self._most, self._size + (1 / self._size if has_shrunk else 1.0))
        elif now >= self._shrunk + _PAUSE_S:
            self._size, self._shrunk = max(1.0, _SHRINK * self._size), now
        self._places.n_places = self.size


_LOOK_BACK_S = 10.0
"""The shortest time over which a pace is measured."""
_MARGIN = 1.5
"""The factor by which the rest may take longer than at the best pace so far."""
_LAST = 0.1
"""The last part of its time, in which a batch is promoted whatever its pace."""
_UNKNOWN = 0.5
"""The last part of its time, in which a batch is promoted if its pace is not known yet."""
_PATIENT = 0.25
"""The first part of its time, in which a batch is never promoted: its first answers come late, and all
together."""


class BatchPace:
    """The pace of one batch. Times are seconds of one clock.

    The best pace counts, and not the average: a batch that gets nothing done by day may be done by night.
    """

    def __init__(self, now: float, deadline: float, n_left: int) -> None:
        self._deadline = deadline
        self._window_s = deadline - now
        self._n_left = n_left
        self._best = 0.0
        """Lines a second."""
        self._since = now, n_left
        """The beginning of the time that is measured, and the lines that were left then."""

    def on_answers(self, n: int, now: float) -> None:
        self._n_left -= n
        began, n_before = self._since
        if now - began >= _LOOK_BACK_S:
            self._best = max(self._best, (n_before - self._n_left) / (now - began))
            self._since = now, self._n_left

    def runs_out(self, now: float) -> bool:
        """Whether the deadline is nearer than the last answer would be at that pace."""
        left_s = self._deadline - now
        if left_s > (1 - _PATIENT) * self._window_s:
            return False
        if not self._best:
            return left_s < _UNKNOWN * self._window_s
        return left_s < max(_MARGIN * self._n_left / self._best, _LAST * self._window_s)

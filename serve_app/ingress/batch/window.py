"""The lines of batches that one ingress asks for at once: how many, and whose is next.

Nobody tells how many places the engines have for what is in the background, and replicas come and go. So
the window grows until a line is refused, and shrinks then, as TCP's does. It doubles with each round of
answers until the first refusal, and grows by one a round from then on (Jacobson, "Congestion Avoidance and
Control", SIGCOMM 1988).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

FIRST = 8.0
MAX_BYTES = 64 * 2**20
"""The most bytes of lines that are asked for at once."""
_SHRINK = 0.8
_PAUSE_S = 0.5
"""The window shrinks once in so long: lines that are refused together were asked for together."""


@dataclass(slots=True)
class LinePlace:
    n_bytes: int
    refused: bool = False
    """Whether the engines had no room for the line."""


@dataclass(slots=True)
class _Owner:
    """An owner whose lines are in the window or wait for it."""

    spent_s: float
    """The seconds that lines which have left were inside, all of them together."""
    n_inside: int = 0
    entered_s: float = 0.0
    """The sum of the times at which those inside have entered."""
    waiting: deque[tuple[asyncio.Future[float], int]] = field(default_factory=deque)
    """The lines that wait, with their bytes."""

    def due_s(self, now: float) -> float:
        """The seconds that all of its lines were inside."""
        return self.spent_s + self.n_inside * now - self.entered_s


class LineWindow:
    """The window of one event loop. Lines enter in turns by owner.

    The next place is the owner's whose lines were inside for the least time. An owner that comes starts
    with the least time of those who are there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(FIRST, most)
        self._n_inside = self._n_bytes = 0
        self._owners: dict[str, _Owner] = {}
        self._shrunk = float("-inf")

    @property
    def size(self) -> int:
        return max(1, int(self._size))

    @asynccontextmanager
    async def place(self, owner: str, n_bytes: int) -> AsyncIterator[LinePlace]:
        """Wait for a place for this owner's line, and keep it for as long as the block runs."""
        line = LinePlace(n_bytes)
        entered = await self._enter(owner, n_bytes)
        try:
            yield line
        finally:
            self._leave(owner, line, entered)

    async def _enter(self, owner: str, n_bytes: int) -> float:
        now = asyncio.get_running_loop().time()
        if owner not in self._owners:
            others = [other.due_s(now) for other in self._owners.values()]
            self._owners[owner] = _Owner(min(others, default=0.0))
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._owners[owner].waiting.append((turn, n_bytes))
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(owner, LinePlace(n_bytes), turn.result())
            else:
                self._owners[owner].waiting.remove((turn, n_bytes))
                self._forget(owner)
            raise

    def _admit(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._n_inside < self.size:
            waiting = [owner for owner in self._owners.values() if owner.waiting]
            if not waiting:
                return
            owner = min(waiting, key=lambda owner: (owner.due_s(now), owner.n_inside))
            turn, n_bytes = owner.waiting[0]
            if self._n_inside and self._n_bytes + n_bytes > MAX_BYTES:
                return
            owner.waiting.popleft()
            owner.n_inside += 1
            owner.entered_s += now
            self._n_inside += 1
            self._n_bytes += n_bytes
            turn.set_result(now)

    def _leave(self, owner: str, line: LinePlace, entered: float) -> None:
        now = asyncio.get_running_loop().time()
        account = self._owners[owner]
        account.n_inside -= 1
        account.entered_s -= entered
        account.spent_s += now - entered
        self._n_inside -= 1
        self._n_bytes -= line.n_bytes
        if not line.refused:
            has_been_refused = self._shrunk > float("-inf")
            growth = 1 / self._size if has_been_refused else 1.0
            self._size = min(self._most, self._size + growth)
        elif now >= self._shrunk + _PAUSE_S:
            self._size, self._shrunk = max(1.0, _SHRINK * self._size), now
        self._forget(owner)
        self._admit()

    def _forget(self, owner: str) -> None:
        account = self._owners[owner]
        if not account.waiting and not account.n_inside:
            del self._owners[owner]


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
        self._seen = deque([(now, n_left)])

    def answered(self, n: int, now: float) -> None:
        self._n_left -= n
        self._seen.append((now, self._n_left))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _LOOK_BACK_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if now - since >= _LOOK_BACK_S:
            self._best = max(self._best, (before - self._n_left) / (now - since))

    def runs_out(self, now: float) -> bool:
        """Whether the deadline is nearer than the last answer would be at that pace."""
        left_s = self._deadline - now
        if left_s > (1 - _PATIENT) * self._window_s:
            return False
        if not self._best:
            return left_s < _UNKNOWN * self._window_s
        return left_s < max(_MARGIN * self._n_left / self._best, _LAST * self._window_s)

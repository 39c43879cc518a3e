"""A semaphore that clients enter in turns. Pure but for asyncio's futures."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """A semaphore for `n_places` at once, of which each client has `most_each` at most. Together they weigh
    no more than `max_weight`; one alone may weigh more.

    The client that has fewest places enters next. Clients that have as many take turns, and each client's
    tasks enter in order. Event loop only.
    """

    def __init__(
        self, n_places: int, most_each: int | None = None, max_weight: float = math.inf
    ) -> None:
        self.n_places = n_places
        """May change. `leave` gives more places to those who wait."""
        self._most_each = math.inf if most_each is None else most_each
        self._max_weight = max_weight
        self._inside: Counter[str] = Counter()
        self._n_inside = self._weight = 0
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """The tasks that wait, with their weights, by client. The client whose turn is next is first."""

    def try_enter(self, client: str, weight: int = 0) -> bool:
        """Enter if that needs no waiting; whoever entered must `leave`."""
        is_full = self._n_inside >= self.n_places or self._inside[client] >= self._most_each
        if is_full or (self._n_inside and self._weight + weight > self._max_weight):
            return False
        self._count(client, 1, weight)
        return True

    def _count(self, client: str, n: int, weight: int) -> None:
        self._n_inside += n
        self._weight += weight
        self._inside[client] += n
        if not self._inside[client]:
            del self._inside[client]

    async def enter(self, client: str, weight: int = 0) -> None:
        """Wait for a place. Call `leave` after it; a cancelled call has not entered."""
        if not self._waiting and self.try_enter(client, weight):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((turn, weight))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(client, weight)
            elif (turn, weight) in (turns := self._waiting.get(client, deque())):
                turns.remove((turn, weight))
                if not turns:
                    del self._waiting[client]
                self._admit()  # a light one may have waited for it
            raise

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        await self.enter(client)
        try:
            yield
        finally:
            self.leave(client)

    def leave(self, client: str, weight: int = 0) -> None:
        """Gives the place to the next in turn."""
        self._count(client, -1, -weight)
        self._admit()

    def _admit(self) -> None:
        while clients := [one for one in self._waiting if self._inside[one] < self._most_each]:
            client = min(clients, key=self._inside.__getitem__)
            turns = self._waiting[client]
            turn, weight = turns[0]
            if not turn.done():  # else it was cancelled, which costs no turn
                if not self.try_enter(client, weight):
                    return
                turn.set_result(None)
                del self._waiting[client]
            turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all other clients, if one has entered
            else:
                self._waiting.pop(client, None)

    @property
    def n_tasks(self) -> int:
        """The tasks inside, and those that wait."""
        return self._n_inside + sum(map(len, self._waiting.values()))

    def n_waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

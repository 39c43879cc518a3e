"""A semaphore that clients enter in turns. Pure but for asyncio's futures."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """A semaphore for `n_places` at once, of which each client has `most_each` at most. Those who wait
    enter in turns by client, each client's in order.

    Event loop only.
    """

    def __init__(self, n_places: int, most_each: int | None = None) -> None:
        self._n_free = n_places
        self._most_each = n_places if most_each is None else most_each
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The tasks that wait, by client. The client whose turn is next is first."""

    def try_enter(self, client: str) -> bool:
        """Enter if that needs no waiting; whoever entered must `leave`."""
        if not self._n_free or self._inside[client] >= self._most_each:
            return False
        self._n_free -= 1
        self._inside[client] += 1
        return True

    async def enter(self, client: str) -> None:
        """Wait for a place. Call `leave` after it; a cancelled call has not entered."""
        if self.try_enter(client):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(client)
            else:
                self._forget(client, turn)
            raise

    @asynccontextmanager
    async def entered(self, client: str) -> AsyncIterator[None]:
        await self.enter(client)
        try:
            yield
        finally:
            self.leave(client)

    def leave(self, client: str) -> None:
        """Gives the place to the next in turn."""
        self._n_free += 1
        self._inside[client] -= 1
        if not self._inside[client]:
            del self._inside[client]
        for other, turns in list(self._waiting.items()):
            while turns and turns[0].done():  # it was cancelled
                turns.popleft()
            if turns and not self.try_enter(other):
                continue
            del self._waiting[other]
            if not turns:
                continue
            turns.popleft().set_result(None)
            if turns:
                self._waiting[other] = turns  # behind all other clients
            return

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def n_waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

"""A semaphore that clients enter in turns. Pure but for asyncio's futures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """So many may be inside at once; those who wait enter in turns by client, each client's in order.

    Event loop only.
    """

    def __init__(self, n_places: int) -> None:
        self._n_free = n_places
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client; whose turn is next is first."""

    def try_enter(self) -> bool:
        """Enter if nobody has to wait; whoever entered must `leave`."""
        if not self._n_free:
            return False
        self._n_free -= 1
        return True

    async def enter(self, client: str) -> None:
        """Wait for a place. Whoever entered must `leave`; who is cancelled has not entered."""
        if self.try_enter():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self._forget(client, turn)
            raise

    @asynccontextmanager
    async def entered(self, client: str) -> AsyncIterator[None]:
        """A place, for as long as the block runs."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Give the place to whose turn it is."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all other clients
            if not turn.done():
                turn.set_result(None)
                return
        self._n_free += 1

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(client, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def n_waiting(self, client: str) -> int:
        """How many of this client wait."""
        return len(self._waiting.get(client, ()))

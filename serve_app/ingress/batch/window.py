"""How many lines of batches one ingress asks for at once. Pure but for the event loop's turns.

Nobody tells how many places the engines have for what is in the background, and replicas come and go: so
the window grows until one is refused, and shrinks then, as TCP's does. It doubles with each round of
answers until the first refusal, and grows by one a round from then on (Jacobson, "Congestion Avoidance and
Control", SIGCOMM 1988).
"""

from __future__ import annotations

import asyncio

FIRST = 8.0
_SHRINK = 0.8
_PAUSE_S = 0.5
"""It shrinks once in so long: what is refused together was asked together."""


class LineWindow:
    """For one event loop, and one model or all of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(FIRST, most)
        self._n_asking = 0
        self._shrunk = float("-inf")
        self._changed = asyncio.Condition()

    @property
    def size(self) -> int:
        """As many may be asked for at once."""
        return max(1, int(self._size))

    async def enter(self) -> None:
        """Wait until one more may be asked for; `leave` ends it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._n_asking < self.size)
            self._n_asking += 1

    async def leave(self, *, refused: bool) -> None:
        """It has an answer, or there was no place for it."""
        async with self._changed:
            self._n_asking -= 1
            now = asyncio.get_running_loop().time()
            if not refused:
                has_been_refused = self._shrunk > float("-inf")
                growth = 1 / self._size if has_been_refused else 1.0
                self._size = min(self._most, self._size + growth)
            elif now >= self._shrunk + _PAUSE_S:
                self._size, self._shrunk = max(1.0, _SHRINK * self._size), now
            self._changed.notify_all()

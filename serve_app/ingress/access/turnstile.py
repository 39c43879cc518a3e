"""Requests begin one after the other, in turns among those who send them.

Sources: J. Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985, for the turns; and for
the rule of who is slowed down: S. Floyd and V. Jacobson, "Link-sharing and Resource Management
Models for Packet Networks", IEEE/ACM Transactions on Networking 3(4), 1995.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve_app.errors import RateLimitError
from serve_app.ingress.workers.fair_semaphore import FairSemaphore

Clock = Callable[[], float]

WINDOW_S = 1.0
"""The seconds for which senders' requests are counted."""
FEW = 10
"""A sender of no more requests in that time is never slowed down."""
MOST_PAUSE_S = 0.05
"""A sender that is slowed down still begins one request in this time."""
_LOOK_S = MOST_PAUSE_S / 10
"""The seconds between two looks whether a sender that is slowed down may go on."""


class Turnstile:
    """Spreads what begins, for one event loop.

    Each turn of the loop begins one request at most, so that tokens, and answers to whoever else asks, come
    in between however many requests come at once. Waiting requests go in turns by sender. If there
    are several senders, the one that begins more than its share is slowed down until the loop has nothing
    to do for half of the time: what its requests cost besides, in other processes, is bounded by that, too.
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        cpu: Clock = time.thread_time,
        look_s: float = _LOOK_S,
    ) -> None:
        self._clock, self._cpu, self._look_s = clock, cpu, look_s
        self._next_of_each = FairSemaphore(sys.maxsize, most_each=1)
        self._turns = FairSemaphore(1)
        self._last: dict[str, tuple[float, float]] = {}
        """The times by both clocks at which each sender's last request began."""
        self._began: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        """Requests of each sender that began in this window, and in the one before."""
        self._window_end = clock() + WINDOW_S

    async def turn(self, sender: str) -> None:
        """Returns when a request of this sender may begin."""
        async with self._next_of_each.entered(sender):
            while not self._may_begin(sender):  # noqa: ASYNC110  # time passes, and nobody tells
                await asyncio.sleep(self._look_s)
            await self._turns.enter(sender)
            if self._turns.has_waiting:  # who wakes up in the next turn of the loop
                self._turns.leave(sender)
            else:
                asyncio.get_running_loop().call_soon(self._turns.leave, sender)
            self._last[sender] = self._clock(), self._cpu()
            self._began[0][sender] += 1

    def _may_begin(self, sender: str) -> bool:
        self._slide()
        if not self._has_more_than_its_share(sender):
            return True
        began, began_cpu = self._last[sender]
        return self._clock() - began > min(MOST_PAUSE_S, 2 * (self._cpu() - began_cpu))

    def _has_more_than_its_share(self, sender: str) -> bool:
        began = self._began[0][sender] + self._began[1][sender]
        if began <= FEW:
            return False
        senders = self._began[0].keys() | self._began[1].keys() | {sender}
        total = self._began[0].total() + self._began[1].total()
        return len(senders) * (began - 1) > total  # senders that take turns are one ahead at most

    def _slide(self) -> None:
        now = self._clock()
        if now < self._window_end:
            return
        before = self._began[0] if now < self._window_end + WINDOW_S else Counter[str]()
        self._began, self._window_end = (Counter(), before), now + WINDOW_S
        self._last = {sender: self._last[sender] for sender in before}


_TIMES_FREE = 4


class OpenRequests:
    """Counts them by client, for one event loop.

    A client may have four times as many open as places are free: four fifths of all if it is alone. So no
    client takes the last places, and one that comes later still finds some.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_client: Counter[str] = Counter()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @contextmanager
    def entered(self, client: str) -> Iterator[None]:
        """Count one more request of the client, for as long as the block runs. Raises RateLimitError if the
        client has too many."""
        n_own = self._by_client[client]
        n_free = self.limit - self._n
        if n_own >= max(1, _TIMES_FREE * n_free) or not n_free:
            raise RateLimitError(
                f"You have {n_own} open requests. All clients together have {self._n} of at most "
                f"{self.limit}.",
                1,
            )
        self._by_client[client] += 1
        self._n += 1
        try:
            yield
        finally:
            self._n -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

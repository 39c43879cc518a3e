"""Requests begin one after the other, in turns among those who send them.

Sources: J. Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985, for the turns; and for
the rule of who is slowed down: S. Floyd and V. Jacobson, "Link-sharing and Resource Management
Models for Packet Networks", IEEE/ACM Transactions on Networking 3(4), 1995.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.base.errors import RateLimitError

Clock = Callable[[], float]

WINDOW_S = 1.0
"""The time in which the count of a sender's requests decays to a third."""
FEW = 10
"""A sender with a count of no more is never slowed down."""
MOST_PAUSE_S = 0.05
"""A sender that is slowed down still begins one request in this time."""
LOOK_S = MOST_PAUSE_S / 10
"""The time between two looks whether a sender that is slowed down may go on."""
_FORGOTTEN = 0.01
"""A sender with a smaller count is forgotten."""


@dataclass(slots=True)
class _Sender:
    """Somebody whose requests wait, or began lately."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The turn of the sender's requests, which begin in order."""
    count: float = 0.0
    began: float = 0.0
    began_cpu: float = 0.0

    def count_at(self, now: float) -> float:
        """The requests that began lately, of which the newest count most."""
        return self.count * math.exp((self.began - now) / WINDOW_S)


class Turnstile:
    """Spreads what begins, for one event loop.

    Each turn of the loop begins one request at most. So tokens and other answers come in between, however
    many requests come at once. Waiting requests go in turns by sender. If there are several senders, the
    one that begins more than its share is slowed down. It is so until the loop has nothing to do for half
    of the time. That also bounds what its requests cost in other processes.
    """

    def __init__(self, clock: Clock = time.monotonic, cpu: Clock = time.thread_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._senders: dict[str, _Sender] = {}
        self._forget_at = clock()
        self._turn = asyncio.Lock()
        """The turn of the loop in which a request begins."""

    async def turn(self, name: str) -> None:
        """Returns when a request of the sender with this name may begin."""
        self._forget()
        sender = self._senders.setdefault(name, _Sender())
        async with sender.turn:
            while not self._may_begin(sender):  # noqa: ASYNC110  # nothing tells when there is time
                await asyncio.sleep(LOOK_S)
            async with self._turn:
                now = self._clock()
                sender.count = sender.count_at(now) + 1
                sender.began, sender.began_cpu = now, self._cpu()
                await asyncio.sleep(0)

    def _may_begin(self, sender: _Sender) -> bool:
        now = self._clock()
        count = sender.count_at(now)
        if count <= FEW:
            return True
        total = sum(other.count_at(now) for other in self._senders.values())
        if len(self._senders) * count <= total:
            return True
        return now - sender.began > min(MOST_PAUSE_S, 2 * (self._cpu() - sender.began_cpu))

    def _forget(self) -> None:
        """Forget senders that have not asked for long; seldom, as that looks at all."""
        now = self._clock()
        if now >= self._forget_at:
            self._forget_at = now + WINDOW_S
            self._senders = {
                name: sender
                for name, sender in self._senders.items()
                if sender.turn.locked() or sender.count_at(now) > _FORGOTTEN
            }


_TIMES_FREE = 4


class OpenRequests:
    """Counts them by client, for one event loop.

    A client may have four times as many open as places are free: four fifths of all if it is alone. So no
    client takes the last places, and one that comes later still finds some.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_draining = False
        """Whether those that run may end, and no other may begin."""
        self._by_client: Counter[str] = Counter()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @contextmanager
    def count(self, client: str) -> Iterator[None]:
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

"""Requests begin one after the other, in turns among those who send them.

Sources: J. Nagle, "On Packet Switches with Infinite Storage", RFC 970, 1985, for the turns; and for
the rule of who is slowed down: S. Floyd and V. Jacobson, "Link-sharing and Resource Management
Models for Packet Networks", IEEE/ACM Transactions on Networking 3(4), 1995.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_app.errors import RateLimitError

Clock = Callable[[], float]

WINDOW_S = 1.0
"""The seconds for which senders' requests are counted."""
FEW = 10
"""A sender of no more requests in that time is never slowed down."""
MOST_PAUSE_S = 0.05
"""A sender that is slowed down still begins one request in this time."""
_LOOK_S = MOST_PAUSE_S / 10
"""The seconds between two looks whether senders that are slowed down may go on."""


@dataclass(slots=True)
class _Sender:
    """Somebody whose requests wait, or began lately."""

    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    began: float = 0.0
    began_cpu: float = 0.0


class Turnstile:
    """Spreads what begins, for one event loop.

    Each turn of the loop begins one request at most, so that tokens, and answers to whoever else asks, come
    in between however many requests come at once. Waiting requests go in turns by sender. If there
    are several senders, the one that begins more than its share is slowed down until the loop has nothing
    to do for half of the time: what its requests cost besides, in other processes, is bounded by that, too.
    """

    def __init__(self, clock: Clock = time.monotonic, cpu: Clock = time.thread_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._senders: dict[str, _Sender] = {}
        self._began: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        """Requests of each sender that began in this window, and in the one before."""
        self._window_end = clock() + WINDOW_S
        self._next: asyncio.Handle | None = None
        """The callback that lets the next request begin: it is set if one began in this turn, or waits."""

    async def turn(self, sender: str) -> None:
        """Returns when a request of this sender may begin."""
        self._slide()
        known = self._senders.setdefault(sender, _Sender())
        if self._next is None and self._may_begin(sender, known):
            self._begin(sender, known)
            self._schedule(0.0)
            return
        future = asyncio.get_running_loop().create_future()
        known.waiting.append(future)
        if self._next is None:
            self._schedule(_LOOK_S)
        await future

    def _schedule(self, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._next = (
            loop.call_later(pause_s, self._let_one_begin)
            if pause_s
            else loop.call_soon(self._let_one_begin)
        )

    def _let_one_begin(self) -> None:
        self._next = None
        self._slide()
        waiting = [entry for entry in self._senders.items() if _waits(entry[1].waiting)]
        for sender, known in waiting:
            if self._may_begin(sender, known):
                self._begin(sender, known)
                known.waiting.popleft().set_result(None)
                self._senders[sender] = self._senders.pop(sender)  # the others go first
                self._schedule(0.0)
                return
        if waiting:
            self._schedule(_LOOK_S)

    def _begin(self, sender: str, known: _Sender) -> None:
        known.began, known.began_cpu = self._clock(), self._cpu()
        self._began[0][sender] += 1

    def _may_begin(self, sender: str, known: _Sender) -> bool:
        if not self._has_more_than_its_share(sender):
            return True
        passed_s = self._clock() - known.began
        return passed_s > min(MOST_PAUSE_S, 2 * (self._cpu() - known.began_cpu))

    def _has_more_than_its_share(self, sender: str) -> bool:
        began = self._began[0][sender] + self._began[1][sender]
        if began <= FEW:
            return False
        senders = self._began[0].keys() | self._began[1].keys() | {sender}
        total = self._began[0].total() + self._began[1].total()
        return len(senders) * began > total

    def _slide(self) -> None:
        now = self._clock()
        if now < self._window_end:
            return
        before = self._began[0] if now < self._window_end + WINDOW_S else Counter[str]()
        self._began = Counter(), before
        self._window_end = now + WINDOW_S
        self._senders = {
            sender: known
            for sender, known in self._senders.items()
            if _waits(known.waiting) or sender in before
        }


def _waits(futures: deque[asyncio.Future[None]]) -> bool:
    """Whether anybody is left of those who came; those who left go."""
    while futures and futures[0].done():
        futures.popleft()
    return bool(futures)


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

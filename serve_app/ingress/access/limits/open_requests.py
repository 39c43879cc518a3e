"""Requests that are open in one ingress replica: bounded, with room left for those who have few.

Source of the bound: A. K. Choudhury and E. L. Hahne, "Dynamic queue length thresholds for shared-memory
packet switches", IEEE/ACM Transactions on Networking 6(2), 1998.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import RateLimitError

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
        """One more, for as long as the block runs. Raises RateLimitError if the client has too many."""
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

"""Whether there is a place to wait. Pure: no threads, no clock."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Places(Generic[KeyT]):
    """The places of requests that wait or run, or of texts. `n_places` in all, and up to `n_extra` more for
    clients that hold none.

    While all are taken, a newcomer gets one of the client that holds most, if that has at least as many as
    the newcomer's afterwards. That client loses its newest request that never had a slot. If nobody who
    holds more has such a request, a client that holds none gets extra places beside one that holds several.

    A list of texts is never cut. So it loses no place, and with `by_share`, a client that holds some gets
    more up to its share.
    """

    def __init__(self, n_places: int, n_extra: int, *, by_share: bool = False) -> None:
        self._n_places, self._n_extra, self._by_share = n_places, n_extra, by_share
        self.held: Counter[str] = Counter()
        """How many places each client has; only those that have one."""
        self.holders: dict[KeyT, tuple[str, int]] = {}
        """The client of each request that has places, and how many."""
        self._waiting: dict[KeyT, str] = {}
        """The client of each request that may lose its place, in the order in which they came."""

    def ask(self, client: str, n: int = 1) -> tuple[bool, KeyT | None]:
        """Whether the client's next `n` would have places, and the request that would lose its own."""
        n_taken, n_own = self.held.total(), self.held[client]
        if n_taken < self._n_places:
            return True, None
        newest = {owner: key for key, owner in self._waiting.items()}
        greediest = max(newest, key=lambda owner: self.held[owner], default=None)
        if greediest is not None and self.held[greediest] >= n_own + 2:
            return True, newest[greediest]
        if n_own:
            return self._by_share and n_own + n <= self._n_places // len(self.held), None
        several = max(self.held.values(), default=0) >= 2
        return several and n_taken < self._n_places + self._n_extra, None

    def take(self, key: KeyT, client: str, n: int = 1, *, may_lose: bool = False) -> None:
        """Give a request its places, which it `may_lose` as long as it has no slot."""
        self.holders[key] = client, n
        self.held[client] += n
        if may_lose:
            self._waiting[key] = client

    def start(self, key: KeyT) -> bool:
        """Whether a request still has its place, which it keeps from now on."""
        self._waiting.pop(key, None)
        return key in self.holders

    def leave(self, key: KeyT) -> None:
        """Free the places of a request, if it still has them."""
        self._waiting.pop(key, None)
        client, n = self.holders.pop(key, ("", 0))
        self.held[client] -= n
        if not self.held[client]:
            del self.held[client]

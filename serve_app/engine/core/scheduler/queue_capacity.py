"""Decides which requests may wait in a full queue, fairly. Pure: no model, no threads, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CapacityVerdict:
    """Whether a request gets a place, and who loses one for that."""

    accepted: bool
    displaced: str | None = None
    """The request that is to end."""


class QueueCapacity:
    """The places of requests that wait or run. `n_places` in all, and up to `n_extra` more, one each for
    clients that hold none.

    While all are taken, a newcomer gets one of the client that holds most, if that has at least as many as
    the newcomer's afterwards: it loses its newest request that never had a slot. If nobody who holds more
    has such a one, a client that holds none gets an extra place beside one that holds several.
    """

    def __init__(self, n_places: int, n_extra: int) -> None:
        self._n_places = n_places
        self._n_extra = n_extra
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, str] = {}
        """The client of each request that never had a slot, in the order in which they came."""
        self._displaced: set[str] = set()

    @property
    def held(self) -> Mapping[str, int]:
        """How many places each client has; only those that have one."""
        return self._held

    def ask(self, client: str) -> CapacityVerdict:
        """Whether the client's next request would get a place. Changes nothing."""
        n_taken, n_own = self._held.total(), self._held[client]
        if n_taken < self._n_places:
            return CapacityVerdict(True)
        newest = {owner: request_id for request_id, owner in self._waiting.items()}
        greediest = max(newest, key=lambda owner: self._held[owner], default=None)
        if greediest is not None and self._held[greediest] >= n_own + 2:
            return CapacityVerdict(True, newest[greediest])
        several = max(self._held.values(), default=0) >= 2
        return CapacityVerdict(n_own == 0 and several and n_taken < self._n_places + self._n_extra)

    def take(self, request_id: str, client: str, *, may_be_displaced: bool = True) -> None:
        """Give a request a place."""
        self._held[client] += 1
        if may_be_displaced:
            self._waiting[request_id] = client

    def displace(self, request_id: str) -> None:
        """Free the place of a request that is to end."""
        self._displaced.add(request_id)
        self._free(self._waiting.pop(request_id))

    def started(self, request_id: str, client: str) -> None:
        """Keep the place of a request that has got a slot, even if it was just to lose it."""
        self._waiting.pop(request_id, None)
        if request_id in self._displaced:
            self._displaced.discard(request_id)
            self._held[client] += 1

    def leave(self, request_id: str, client: str) -> None:
        """Free the place of a request that has ended."""
        self._waiting.pop(request_id, None)
        if request_id in self._displaced:
            self._displaced.discard(request_id)
        else:
            self._free(client)

    def _free(self, client: str) -> None:
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]

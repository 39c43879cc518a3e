"""The seconds that each client has had of the decoder. Pure: no threads, no clock."""

from __future__ import annotations

from collections import Counter


class Accounts:
    """Seconds of the decoder by client, as far as they can be compared.

    A client is active while it has requests, or texts to embed; waiting costs nothing. One that comes back
    starts at the least account of the active ones, if its own is below that. So nobody saves up by being
    away, and nobody loses a debt by it while others are active. With the last active client all debts are
    gone.
    """

    def __init__(self) -> None:
        self._n_active: Counter[str] = Counter()
        self._spent_s: dict[str, float] = {}

    def __getitem__(self, client: str) -> float:
        return self._spent_s.get(client, 0.0)

    def __contains__(self, client: str) -> bool:
        return client in self._n_active

    @property
    def active(self) -> int:
        """How many clients have something to do."""
        return len(self._n_active)

    def enter(self, client: str) -> None:
        """Count one more request of a client."""
        if client not in self._n_active:
            self._spent_s[client] = max(self[client], self._least())
        self._n_active[client] += 1

    def leave(self, client: str) -> None:
        """Count one request less of a client."""
        self._n_active[client] -= 1
        if self._n_active[client]:
            return
        del self._n_active[client]
        least = self._least()
        self._spent_s = {
            one: spent_s
            for one, spent_s in self._spent_s.items()
            if one in self._n_active or (self._n_active and spent_s > least)
        }

    def charge(self, client: str, seconds: float) -> None:
        """Add seconds of service to a client's account, if it is active."""
        if client in self._n_active:
            self._spent_s[client] += seconds

    def _least(self) -> float:
        return min((self._spent_s[client] for client in self._n_active), default=0.0)

"""Slots that stay free for clients who will probably be back at once. Pure: no model, no threads, no clock.

Source: S. Iyer and P. Druschel, "Anticipatory scheduling: A disk scheduling framework to overcome deceptive
idleness in synchronous I/O", SOSP 2001.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from serve_app.engine.core.sequence import Sequence

EXPECTED_S = 0.5
"""So long after its last answer a client is expected to ask again."""


class Anticipation:
    """A client that asks for one answer after the other has nothing waiting when its slot gets
    free. If a client that has its share already took that slot, it would have to give it back a
    moment later, and the next first token would wait for that. So the slot stays free for a while:
    half of the slots at most."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._left: dict[str, float] = {}

    def came(self, client: str) -> None:
        """It has a request."""
        self._left.pop(client, None)

    def left(self, client: str, now: float) -> None:
        """The last one of its requests has ended, and had a slot."""
        self._left[client] = now

    def n_kept(self, client: str, running: SequenceOf[Sequence], now: float) -> int:
        """How many idle slots are not for this client's next request."""
        self._left = {one: at for one, at in self._left.items() if now < at + EXPECTED_S}
        if not self._left:
            return 0
        held = Counter(
            one.request.client for one in running if not one.finished and not one.request.background
        )
        n_clients = len(held.keys() | self._left.keys() | {client})
        if held[client] < max(1, self._n_slots // n_clients):
            return 0
        return min(len(self._left), self._n_slots // 2)

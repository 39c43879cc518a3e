"""Decides which running sequence loses its slot, and which slots stay free. Pure: no threads, no clock.

Source for the free slots: S. Iyer and P. Druschel, "Anticipatory scheduling: A disk scheduling framework to
overcome deceptive idleness in synchronous I/O", SOSP 2001.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from serve_app.engine.core.scheduler.fair_queue import FairQueue
from serve_app.engine.core.sequence import Sequence

# After a preemption, the next one may so many times later as that took: slots change hands for a tenth of
# the decoder's time at most.
_PAUSE = 9
# A client with but one slot more than the one that waits keeps it until it has had so many seconds more.
_QUANTUM_S = 2.0


class PreemptionPolicy:
    """Chooses the sequences to preempt, one at a time.

    A client that has at least two slots more than the one whose request is next gives one of them
    back, unless it has less due all the same: then the other has had more for its slots. With one
    slot more, it does so when it is ahead by a quantum, so that clients take turns where slots are
    fewer than they. Slots so get equal, and nobody gives back what it would get again at once.
    Background requests are preempted only for each other here; for all others always.
    """

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def find(
        self,
        waiting: FairQueue,
        running: SequenceOf[Sequence],
        cost_s: Callable[[Sequence], float | None],
        now: float,
    ) -> Sequence | None:
        """The sequence to preempt for the first one that waits; None if there is none. `cost_s` is what
        it takes to store one and to have it back, None if it must not be stored. All slots are taken."""
        first = next(iter(waiting), None)
        if first is None or now < self._quiet_until:
            return None
        held = Counter(seq.request.account for seq in running if not seq.finished)
        own = first.request.account
        due_s = waiting.due_s(own)
        for client in sorted(held, key=waiting.due_s, reverse=True):
            n_more = held[client] - held[own]
            candidate = self._youngest(client, first, running, cost_s) if n_more > 0 else None
            if candidate is None:
                continue
            sequence, seconds = candidate
            ahead_s = waiting.due_s(client, without=sequence) - due_s
            if ahead_s > (0.0 if n_more > 1 else max(_QUANTUM_S, _PAUSE * seconds)):
                self._quiet_until = now + _PAUSE * seconds
                return sequence
        return None

    @staticmethod
    def _youngest(
        client: str,
        first: Sequence,
        running: SequenceOf[Sequence],
        cost_s: Callable[[Sequence], float | None],
    ) -> tuple[Sequence, float] | None:
        """The client's newest sequence that may be preempted, and what that costs."""
        may = [
            seq
            for seq in running
            if seq.request.account == client
            and seq.request.background == first.request.background
            and seq.request.priority >= first.request.priority
            and not seq.finished
        ]
        for seq in sorted(may, key=lambda seq: seq.trace.admitted or 0.0, reverse=True):
            seconds = cost_s(seq)
            if seconds is not None:
                return seq, seconds
        return None


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
        """Note that a client has a request."""
        self._left.pop(client, None)

    def left(self, client: str, now: float) -> None:
        """Note that a client's last request has ended, and had a slot."""
        self._left[client] = now

    def n_kept(self, client: str, running: SequenceOf[Sequence], now: float) -> int:
        """How many idle slots are not for this client's next request."""
        self._left = {seq: at for seq, at in self._left.items() if now < at + EXPECTED_S}
        if not self._left:
            return 0
        held = Counter(
            seq.request.client for seq in running if not seq.finished and not seq.request.background
        )
        n_clients = len(held.keys() | self._left.keys() | {client})
        if held[client] < max(1, self._n_slots // n_clients):
            return 0
        return min(len(self._left), self._n_slots // 2)

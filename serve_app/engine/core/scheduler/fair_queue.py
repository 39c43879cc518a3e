"""Decides which request is next for a slot, fairly among clients. Pure: no model, no threads, no clock.

Each client has an account: a virtual token counter whose tokens are seconds of the decoder, and the client
that had least is served next. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024
(arXiv 2401.00588).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from serve_app.engine.core.sequence import Sequence


class Accounts:
    """Seconds of the decoder by client, as far as they can be compared.

    A client is active while it has requests, or texts to embed; waiting costs nothing. One that comes back
    starts at the least account of the active ones, if its own is below that: nobody saves up by being away,
    and nobody loses a debt by it while others are active. With the last active client all debts are gone.
    """

    def __init__(self) -> None:
        self._n_active: Counter[str] = Counter()
        self._spent_s: dict[str, float] = {}

    def __getitem__(self, client: str) -> float:
        return self._spent_s.get(client, 0.0)

    def __contains__(self, client: str) -> bool:
        """Whether the client is active."""
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
            seq: spent_s
            for seq, spent_s in self._spent_s.items()
            if seq in self._n_active or (self._n_active and spent_s > least)
        }

    def charge(self, client: str, seconds: float) -> None:
        """Add seconds of service to a client's account, if it is active."""
        if client in self._n_active:
            self._spent_s[client] += seconds

    def _least(self) -> float:
        return min((self._spent_s[client] for client in self._n_active), default=0.0)


Cost = Callable[[int, int], float]
"""The cost of so many prompt tokens and so many generated ones, in seconds, or in any unit if
nothing was measured."""

# Generated tokens that a request is taken to cost before it has ended.
_EXPECTED_TOKENS = 128


class _Rank(NamedTuple):
    """A sequence's place in the order of admission: the smallest rank goes first."""

    background: bool
    """Whether nobody waits for it."""
    is_new: bool
    """A request that lost its slot because the cache was full, or with another engine, goes before
    all others."""
    priority: int
    due_s: float
    n_running: int
    """Slots of its client: one that comes starts with the account of who is there."""
    arrival: int


class FairQueue:
    """The sequences that wait for a slot. A client is what requests name; all that name none are one, and
    what a client has in the background is another one.

    Background requests come last. Otherwise, a lower `priority` goes first, whatever was served.
    Among equals, the request goes first whose client has least due: the seconds that it was charged,
    and the probable cost of its running requests and of those that go before this one. Of clients
    with as much due, the one with fewer slots goes first. So a client with one short
    request does not wait for all of another's.
    """

    def __init__(self, cost: Cost, accounts: Accounts) -> None:
        self._cost = cost
        self.accounts = accounts
        """The measured seconds of each client."""
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unordered(self) -> Iterable[Sequence]:
        """The sequences that wait, in any order."""
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences in the order of admission."""
        ahead_s: dict[str, float] = {}
        n_running = Counter(seq.request.account for seq in self._running)
        for sequence in self._running:
            client = sequence.request.account
            ahead_s[client] = ahead_s.get(client, 0.0) + sequence.outstanding_s
        ranked: list[tuple[_Rank, Sequence]] = []
        had_slot_first = sorted(self._waiting, key=lambda seq: seq.trace.admitted is None)
        for arrival, sequence in enumerate(had_slot_first):
            client, request = sequence.request.account, sequence.request
            ahead = ahead_s.get(client, 0.0)
            ahead_s[client] = ahead + sequence.outstanding_s
            due_s = self.accounts[client] + ahead
            is_new = sequence.preempted or not (
                sequence.trace.admitted is not None or request.n_failovers
            )
            rank = _Rank(
                request.background, is_new, request.priority, due_s, n_running[client], arrival
            )
            ranked.append((rank, sequence))
        return iter([sequence for _, sequence in sorted(ranked, key=lambda entry: entry[0])])

    def due_s(self, client: str, without: Sequence | None = None) -> float:
        """The seconds charged to a client, and those that its running requests will probably still
        cost; as if `without` did not run."""
        running = (seq for seq in self._running if seq.request.account == client)
        outstanding_s = sum(seq.outstanding_s for seq in running if seq is not without)
        return self.accounts[client] + outstanding_s

    def extend(self, sequences: Iterable[Sequence]) -> None:
        """Have new sequences wait."""
        for sequence in sequences:
            self.accounts.enter(sequence.request.account)
            most = sequence.request.sampling.max_tokens
            most = _EXPECTED_TOKENS if most is None else min(most, _EXPECTED_TOKENS)
            sampling_s = most * sequence.sampling_cost.token_s
            sequence.expected_s = self._cost(sequence.n_prompt, most) + sampling_s
            self._waiting.append(sequence)

    def put_back(self, sequence: Sequence, *, for_another: bool = False) -> None:
        """Have a sequence wait that lost its slot: before everybody new because the cache was full, or
        when its client's turn comes, if it was preempted `for_another` client."""
        self._running.remove(sequence)
        sequence.preempted = for_another
        self._waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence that got a slot out of the queue."""
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """Charge a sequence's client for seconds of the decoder."""
        sequence.spent_s += seconds
        self.accounts.charge(sequence.request.account, seconds)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, with a slot or without."""
        (self._waiting if sequence in self._waiting else self._running).remove(sequence)
        self.accounts.leave(sequence.request.account)

"""Decides which request is next for a slot, fairly. Pure: no model, no threads, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from serve_app.engine.core.scheduler.accounts import Accounts
from serve_app.engine.core.sequence import Sequence

Cost = Callable[[int, int], float]
"""The cost of so many prompt tokens and so many generated ones, in seconds, or in any unit if
nothing was measured."""

# Generated tokens that a request is taken to cost before it has ended.
_EXPECTED_TOKENS = 128


class _Rank(NamedTuple):
    """The smallest goes first."""

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
        self._accounts = accounts
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unordered(self) -> Iterable[Sequence]:
        """All that wait."""
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission."""
        ahead_s: dict[str, float] = {}
        n_running = Counter(one.request.account for one in self._running)
        for sequence in self._running:
            client = sequence.request.account
            ahead_s[client] = ahead_s.get(client, 0.0) + sequence.outstanding_s
        ranked: list[tuple[_Rank, Sequence]] = []
        had_slot_first = sorted(self._waiting, key=lambda one: one.trace.admitted is None)
        for arrival, sequence in enumerate(had_slot_first):
            client, request = sequence.request.account, sequence.request
            ahead = ahead_s.get(client, 0.0)
            ahead_s[client] = ahead + sequence.outstanding_s
            due_s = self._accounts[client] + ahead
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
        running = (one for one in self._running if one.request.account == client)
        outstanding_s = sum(one.outstanding_s for one in running if one is not without)
        return self._accounts[client] + outstanding_s

    def extend(self, sequences: Iterable[Sequence]) -> None:
        """Requests came."""
        for sequence in sequences:
            self._accounts.enter(sequence.request.account)
            most = sequence.request.sampling.max_tokens
            most = _EXPECTED_TOKENS if most is None else min(most, _EXPECTED_TOKENS)
            sampling_s = most * sequence.sampling_cost.token_s
            sequence.expected_s = self._cost(sequence.n_prompt, most) + sampling_s
            self._waiting.append(sequence)

    def put_back(self, sequence: Sequence, *, for_another: bool = False) -> None:
        """It lost its slot, and waits for another one: before everybody new because the cache was full, or
        when its client's turn comes, if it was preempted `for_another` client."""
        self._running.remove(sequence)
        sequence.preempted = for_another
        self._waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """It got a slot."""
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """The decoder worked for it for so long."""
        sequence.spent_s += seconds
        self._accounts.charge(sequence.request.account, seconds)

    def end(self, sequence: Sequence) -> None:
        """It ended, with a slot or without."""
        (self._waiting if sequence in self._waiting else self._running).remove(sequence)
        self._accounts.leave(sequence.request.account)

"""Decides which request is next for a slot, and which loses its slot. Pure: no model, no threads, no clock.

Each client has an account: a virtual token counter whose tokens are seconds of the decoder, and the client
that had least is served next. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024
(arXiv 2401.00588).

Source for slots that stay free: S. Iyer and P. Druschel, "Anticipatory scheduling: A disk scheduling
framework to overcome deceptive idleness in synchronous I/O", SOSP 2001.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from serve_app.engine.core.sequence import Sequence
from serve_app.types import account

Cost = Callable[[int, int], float]
"""The cost of prompt tokens and generated tokens: seconds, or any unit if nothing was measured."""
# Generated tokens that a request is taken to cost before it has ended.
_EXPECTED_TOKENS = 128
# After a preemption, the next one may so many times later as that took: slots change hands for a tenth of
# the decoder's time at most.
_PAUSE = 9
# A client with but one slot more than the one that waits keeps it until it has had so many seconds more.
_QUANTUM_S = 2.0
EXPECTED_S = 0.5
"""The seconds after a client's last answer in which it is expected to ask again."""


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


@dataclass(slots=True, eq=False)
class FairQueue:
    """The sequences that wait for a slot. A client is what requests name; all that name none are one, and
    what a client has in the background is another one.

    Background requests come last, unless `SlotShares` counts them as others. Otherwise, a lower `priority`
    goes first, whatever was served. Among equals, the request goes first whose client has least due: the
    seconds that it was charged, and the probable cost of its running requests and of those that go before
    this one. Of clients with as much due, the one with fewer slots goes first. So a client with one short
    request does not wait for all of another's.
    """

    _cost: Cost
    accounts: Accounts
    waiting: list[Sequence] = field(default_factory=list)
    """The sequences that wait, in any order."""
    _running: list[Sequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Sequence]:
        ahead_s: dict[str, float] = {}
        n_running = Counter(seq.request.account for seq in self._running)
        for sequence in self._running:
            client = sequence.request.account
            ahead_s[client] = ahead_s.get(client, 0.0) + sequence.outstanding_s
        ranked: list[tuple[tuple[bool, bool, int, float, int, int], Sequence]] = []
        had_slot_first = sorted(self.waiting, key=lambda seq: seq.trace.admitted is None)
        for arrival, sequence in enumerate(had_slot_first):
            client, request = sequence.request.account, sequence.request
            ahead = ahead_s.get(client, 0.0)
            ahead_s[client] = ahead + sequence.outstanding_s
            due_s = self.accounts[client] + ahead
            # Who lost a slot because the cache was full, or with another engine, goes before all others.
            had_slot = sequence.trace.admitted is not None or request.n_failovers > 0
            is_new = sequence.preempted or not had_slot
            # Clients that come start with the account of who is there: so the number of slots counts, too.
            order = request.priority, due_s, n_running[client], arrival
            ranked.append(((sequence.is_behind, is_new, *order), sequence))
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
            self.waiting.append(sequence)

    def put_back(self, sequence: Sequence, *, for_another: bool = False) -> None:
        """Have a sequence wait that lost its slot: before everybody new because the cache was full, or
        when its client's turn comes, if it was preempted `for_another` client."""
        self._running.remove(sequence)
        sequence.preempted = for_another
        self.waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Take a sequence that got a slot out of the queue."""
        self.waiting.remove(sequence)
        self._running.append(sequence)

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """Charge a sequence's client for seconds of the decoder."""
        sequence.spent_s += seconds
        self.accounts.charge(sequence.request.account, seconds)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, with a slot or without."""
        (self.waiting if sequence in self.waiting else self._running).remove(sequence)
        self.accounts.leave(sequence.request.account)


class PreemptionPolicy:
    """Chooses the sequences to preempt, one at a time.

    A client that has at least two slots more than the one whose request is next gives one of them
    back, unless it has less due all the same: then the other has had more for its slots. With one
    slot more, it does so when it is ahead by a quantum, so that clients take turns where slots are
    fewer than they. Slots so get equal, and nobody gives back what it would get again at once.
    Requests behind all others are preempted only for each other here; for all others always.
    """

    _quiet_until = 0.0

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
        may = [
            seq
            for seq in running
            if seq.request.account == client
            and seq.is_behind == first.is_behind
            and seq.request.priority >= first.request.priority
            and not seq.finished
        ]
        for seq in sorted(may, key=lambda seq: seq.trace.admitted or 0.0, reverse=True):
            seconds = cost_s(seq)
            if seconds is not None:
                return seq, seconds
        return None


def _names_of(client: str) -> tuple[str, str]:
    """The names by which a client asks: a batch that has risen asks as the account."""
    return client, account(client, background=True)


def others_go_beyond(share: int, n_asked: Mapping[str, int], client: str) -> bool:
    """Whether a client other than this one asks for more than its share."""
    return any(n > share and other not in _names_of(client) for other, n in n_asked.items())


class SlotShares:
    """Each client's share of the slots: as many as any other client's that has requests, or will
    probably have one at once.

    A client that asks for one answer after the other has nothing waiting when its slot gets free. If a
    client that has its share already took that slot, it would have to give it back a moment later, and the
    next first token would wait for that. So the slot stays free for a while: half of the slots at most.

    A client's requests in the background are behind all others' requests. But while another client
    asks for more than its share, as many are not behind as the client's share has room for: what goes
    beyond a share takes nothing from anybody's.
    """

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
        expected = self._expected(now)
        if not expected:
            return 0
        held = Counter(
            seq.request.client for seq in running if not seq.finished and not seq.request.background
        )
        if held[client] < self._share(held.keys() | expected | {client}):
            return 0
        return min(len(expected), self._n_slots // 2)

    def rank_background(self, live: Iterable[Sequence], now: float) -> None:
        """Set `is_behind` of all that are live: those that run, and behind them those that wait. Of a
        client's requests in the background, the first ones have its share, and had a slot if others had
        none."""
        background = list[Sequence]()
        n_asked = Counter[str]()
        for sequence in live:
            if sequence.request.background:
                background.append(sequence)
            elif not sequence.finished:
                n_asked[sequence.request.client] += 1
        if not background:
            return
        background.sort(key=lambda sequence: sequence.trace.admitted is None)
        clients = {sequence.request.client for sequence in background}
        n_shared = Counter[str]()
        lefts = {client: self._n_left(client, clients, n_asked, now) for client in clients}
        for sequence in background:
            client = sequence.request.client
            n_shared[client] += 1
            sequence.is_behind = n_shared[client] > lefts[client]

    def has_share_left(self, client: str, live: Iterable[Sequence], now: float) -> bool:
        """Whether a client's other work in the background is not behind all others, either."""
        asking = (seq.request for seq in live if not (seq.request.background or seq.finished))
        n_asked = Counter(request.client for request in asking)
        return self._n_left(client, {client}, n_asked, now) > 0

    def _n_left(self, client: str, clients: Set[str], n_asked: Counter[str], now: float) -> int:
        """How many slots of the client's share are for its requests in the background: none, unless
        another client asks for more than its share. `clients` have such requests."""
        share = self._share(clients | n_asked.keys() | self._expected(now))
        if not others_go_beyond(share, n_asked, client):
            return 0
        return share - sum(n_asked[name] for name in _names_of(client))

    def _expected(self, now: float) -> Set[str]:
        """The clients that are expected to ask again at once."""
        self._left = {client: at for client, at in self._left.items() if now < at + EXPECTED_S}
        return self._left.keys()

    def _share(self, clients: Collection[str]) -> int:
        return max(1, self._n_slots // len(clients))

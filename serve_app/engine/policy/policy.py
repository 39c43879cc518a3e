"""Says who gets a slot, who may wait for one, and who gives one back. Pure: no threads, no clock.

**The invariant.** A free slot goes to the client that has had the fewest seconds of the decoder. Of one
client's requests, the first one is next. What nobody waits for comes last. While a client waits, another
one that has had more seconds and more slots gives one back: its youngest sequence goes on later. Those that
wait are bounded, in number and by the forecast of their time. When all places are taken, the client that
holds most loses one to who comes. So whatever a client sends, it waits for that itself, and others keep
their shares.

Changing the policy touches this folder alone: all others call `SlotPolicy`, and know nothing of its rules.

Sources: accounts are virtual token counters whose tokens are seconds (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024, arXiv 2401.00588). Slots stay free for clients that will be back at once
(S. Iyer and P. Druschel, "Anticipatory scheduling: A disk scheduling framework to overcome deceptive
idleness in synchronous I/O", SOSP 2001).
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from operator import attrgetter, itemgetter
from typing import Protocol, TypeVar

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import (
    CorralError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RateLimitError,
)
from serve_app.base.values.requests import NO_DEADLINE, GenerationRequest, account
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.policy.accounts import Accounts
from serve_app.engine.policy.forecast import Expected, Forecast
from serve_app.engine.policy.places import Places

BACKGROUND_PLACES = 2
"""Requests in the background that may wait or run, for each slot: those that fill it, and the next ones."""
# Texts that may wait to be embedded before clients are held to their shares, and in all.
_MAX_TEXTS, _MOST_TEXTS = 2048, 8192
EXPECTED_S = 0.5
"""The seconds after a client's last answer in which it is expected to ask again."""
# The pause after a preemption, in times as long as that took. So slots change hands for a tenth of the
# decoder's time at most.
_PAUSE = 9
# A client with but one slot more than the one that waits keeps it until it has had so many seconds more.
_QUANTUM_S = 2.0


class Asker(Protocol):
    """A request, as far as it says whose it is. All that name no client are one, and what a client has in
    the background is another account."""

    @property
    def client(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def background(self) -> bool: ...
    @property
    def priority(self) -> int: ...


class Candidate(Protocol):
    """A sequence that wants or has a slot, or a text that wants a place in a batch."""

    @property
    def request(self) -> Asker: ...

    is_behind: bool
    """Whether all others go first, as the policy decides for what is in the background."""
    lost_slot: bool
    """Whether it had a slot, and lost it for no other client's sake."""
    spent_s: float
    """Seconds that the decoder worked for it, and those that it was expected to work in all."""
    expected_s: float


class SlotRoom(Protocol):
    """The slots, and what they have room for."""

    @property
    def n_idle(self) -> int: ...

    def fits(self, sequence: Sequence) -> bool:
        """Whether a slot is long enough for a sequence, in the present kind of cache."""

    def has_room(self, sequence: Sequence, held: Sequence | None = None) -> bool:
        """Whether the cache has room for it beside the running ones, and for `held`, which came before."""


CandidateT = TypeVar("CandidateT", bound=Candidate)
Cost = Callable[[Sequence], float | None]
"""The seconds to store a sequence and to have it back; None if streams cannot wait for that."""


class _Shares:
    """Each client's share of slots, or of a batch of texts. All clients that have requests, or will
    probably have one at once, have equal shares.

    A client's requests in the background are behind all others' requests. But while another client asks
    for more than its share, as many are not behind as the client's share has room for. What goes beyond a
    share takes nothing from anybody's.
    """

    def __init__(
        self, n_slots: int, live: SequenceOf[Candidate], left: Set[str] = frozenset()
    ) -> None:
        """`left` are the clients that had a slot a moment ago."""
        self._n_slots = n_slots
        self._background = [item for item in live if item.request.background]
        requests = (item.request for item in live)
        self._n_asked = Counter(asker.client for asker in requests if not asker.background)
        self.expected = left - self._n_asked.keys()
        """The clients that will probably ask again at once."""
        self._clients = {item.request.client for item in self._background}

    def n_left(self, client: str) -> int:
        """How many slots of a client's share are for its requests in the background."""
        clients = {client} | self._clients | self._n_asked.keys() | self.expected
        share = max(1, self._n_slots // len(clients))
        own = client, account(client, background=True)  # as which a batch asks that has risen
        if all(n <= share or other in own for other, n in self._n_asked.items()):
            return 0
        return share - sum(self._n_asked[name] for name in own)

    def rank(self, is_raised: Callable[[str], bool] = lambda client: False) -> None:
        """Set `is_behind` of what is in the background. The first ones of each client have its share.
        Nothing of a raised client is behind."""
        lefts = {
            client: sys.maxsize if is_raised(client) else self.n_left(client)
            for client in self._clients
        }
        for item in self._background:
            lefts[item.request.client] -= 1
            item.is_behind = lefts[item.request.client] < 0


class SlotPolicy:
    """All decisions about slots, and what they are made by. Decoder thread only, but for what decides who
    may wait: any thread, with the lock of the queue that it asks for."""

    def __init__(self, options: EngineOptions) -> None:
        n_slots = self._n_slots = options.n_slots
        most_s = options.max_first_token_s
        self._max_first_token_s = math.inf if most_s is None else most_s
        self._places = {
            False: Places[str](n_slots + options.max_waiting, n_slots),
            True: Places[str](BACKGROUND_PLACES * n_slots, n_slots),
        }
        self._text_places = {
            False: Places[Asker](_MAX_TEXTS, _MOST_TEXTS - _MAX_TEXTS, by_share=True),
            True: Places[Asker](_MAX_TEXTS // 2, 0, by_share=True),
        }
        self._accounts = Accounts()
        self._left: dict[str, float] = {}
        """The time when each client's last request ended that had a slot, if that was a moment ago."""
        self._expected: Set[str] = set()
        """The clients of these that have not asked again."""
        self._quiet_until = 0.0
        self._is_full = self._is_full_of_background = False
        """Whether nobody, or nothing in the background, is admitted as long as all run that do: the cache
        was full, and one lost its slot."""

    # -- who may wait -------------------------------------------------------------------------------

    def accepts(
        self, sequence: Sequence, forecast: Forecast, arrived: Iterable[Sequence]
    ) -> CorralError | Mapping[str, QueueFullError]:
        """Have a sequence wait, or say why not. `arrived` are those that the forecast lacks. Returns the
        requests that lose their places for it, with the errors that they end with.

        A request that another engine had accepted is never refused for lack of room. One in the background
        that has a deadline leaves the background if it is accepted only so."""
        outcome = self._accepts(sequence, forecast, arrived)
        has_deadline = sequence.request.deadline != NO_DEADLINE
        if isinstance(outcome, CorralError) and sequence.is_behind and has_deadline:
            sequence.leave_background()
            outcome = self._accepts(sequence, forecast, arrived)
        return outcome

    def _accepts(
        self, sequence: Sequence, forecast: Forecast, arrived: Iterable[Sequence]
    ) -> CorralError | Mapping[str, QueueFullError]:
        request, places = sequence.request, self._places[sequence.request.background]
        held, displaced = places.held, dict[str, QueueFullError]()
        live = held + self._places[False].held if request.background else held
        expected = sequence.expected = forecast.expect(sequence, live, arrived)
        if not request.n_failovers:
            has_place, loser = places.ask(request.account)
            if not has_place:
                retry_after_s = forecast.place_free_s(request.account, held, arrived)
                return QueueFullError("All slots and the waiting queue are full.", retry_after_s)
            if refusal := self._too_late(request, expected, forecast):
                return refusal
            if loser is not None:
                retry_after_s = forecast.place_free_s(places.holders[loser][0], held, arrived)
                displaced[loser] = QueueFullError(
                    "All slots and the waiting queue are full, and others have fewer requests there.",
                    retry_after_s,
                )
                places.leave(loser)
        places.take(request.id, request.account, may_lose=not request.n_failovers)
        return displaced

    def _too_late(
        self, request: GenerationRequest, expected: Expected, forecast: Forecast
    ) -> CorralError | None:
        """Refuse a request that would wait too long, or be answered later than it may be."""
        first, end = math.prod(forecast.first_token), math.prod(forecast.end)
        margin = forecast.first_token.margin
        alone_s, likely_s = first * expected.alone_s, first * expected.first_token_s
        if not request.background:  # what takes long by itself may take twice as long
            bound_s = max(self._max_first_token_s, 2 * alone_s)
            if refusal := self._late("first token", likely_s, bound_s, margin, QueueFullError):
                return refusal
        first_within_s, end_within_s = request.deadline
        if alone_s > first_within_s or end * expected.end_alone_s > end_within_s:
            return InvalidRequestError(
                f"Even alone, the request would have its first token after {expected.alone_s:.2f} seconds, "
                f"and its end after {expected.end_alone_s:.2f}, by the forecast."
            )
        end_s, end_margin = end * expected.end_s, forecast.end.margin
        return self._late(
            "first token", likely_s, first_within_s, margin, DeadlineError
        ) or self._late("end", end_s, end_within_s, end_margin, DeadlineError)

    def _late(
        self, what: str, likely_s: float, bound_s: float, margin: float, kind: type[RateLimitError]
    ) -> RateLimitError | None:
        """Refuses what would take too long. `likely_s` has that margin, so in each second of work that gets
        done, it falls by so many. All who wait now begin within the bound on first tokens."""
        if likely_s <= bound_s:
            return None
        wait_s = min((likely_s - bound_s) / margin, self._max_first_token_s)
        return kind(
            f"By the forecast, the {what} would come after up to {likely_s:.2f} seconds. It may come after "
            f"{bound_s:.2f} at most.",
            max(1, math.ceil(wait_s)),
        )

    def start(self, sequence: Sequence) -> bool:
        """Whether a sequence that is to get a slot still has its place, which it does not lose any more."""
        return self._places[sequence.request.background].start(sequence.id)

    def forget(self, request_id: str) -> None:
        """Free the place of a request that has ended."""
        for places in self._places.values():
            places.leave(request_id)

    def accepts_texts(self, request: Asker, n_texts: int) -> QueueFullError | None:
        """Have a request's texts wait to be embedded, or say why not."""
        places = self._text_places[request.background]
        has_places, _ = places.ask(request.account, n_texts)
        if not has_places:
            return QueueFullError("Too many texts wait to be embedded.", 1)
        places.take(request, request.account, n_texts)
        return None

    def forget_texts(self, request: Asker) -> None:
        """Free the places of a request's texts."""
        self._text_places[request.background].leave(request)

    # -- what clients have had ----------------------------------------------------------------------

    def enter(self, request: Asker) -> None:
        """Count one more request of a client, for sequences or for texts."""
        self._accounts.enter(request.account)

    def charge(self, item: Candidate, seconds: float) -> None:
        """Charge a client for seconds of the decoder."""
        item.spent_s += seconds
        self._accounts.charge(item.request.account, seconds)

    def leave(self, request: Asker, now: float | None = None) -> None:
        """Count one request less of a client; `now` is the time, if it had a slot."""
        self._accounts.leave(request.account)
        if now is not None:
            self._is_full = self._is_full_of_background = False
            if not request.background and request.client not in self._accounts:
                self._left[request.client] = now

    def had_less(self, item: Candidate, other: Candidate) -> bool:
        """Whether an item's client has had no more of the decoder than the other's."""
        return self._accounts[item.request.account] <= self._accounts[other.request.account]

    # -- who is next --------------------------------------------------------------------------------

    def next(
        self, waiting: SequenceOf[Sequence], running: SequenceOf[Sequence], room: SlotRoom
    ) -> Iterator[Sequence]:
        """The sequences that may have a slot now, one after the other, while slots are idle. The caller
        moves each into one, or leaves it waiting, before it asks for the next.

        A sequence that has no room lets those pass with which it would fit all the same. A client that asks
        for one answer after the other has nothing waiting when its slot gets free. A client that has its
        share would have to give that slot back a moment later, and the next first token would wait for
        that. So the slot stays free for a while: half of the slots at most."""
        if self._is_full or not waiting or not room.n_idle:
            return
        held: Sequence | None = None
        for sequence in self._order(waiting, running):
            if not room.n_idle:
                return
            if sequence.is_finished:
                continue
            if sequence.is_behind:
                if self._is_full_of_background or (held is not None and not held.is_behind):
                    continue  # it would have to give its room back in the next step
            elif room.n_idle <= self._n_kept(sequence.request.client, running):
                continue
            if room.fits(sequence) and room.has_room(sequence, held):
                yield sequence
            else:
                held = held or sequence

    def next_texts(
        self, waiting: SequenceOf[CandidateT], n_most: int, live: SequenceOf[Candidate]
    ) -> list[CandidateT]:
        """The texts that wait, the next one first: of each account, as many as a batch has at most. Those
        in the background are behind, but for their client's share of a batch, or of the slots that `live`
        sequences have or want."""
        if any(text.request.background for text in waiting):
            slots = _Shares(self._n_slots, live, self._left.keys())
            _Shares(n_most, waiting).rank(lambda client: slots.n_left(client) > 0)
        return self._order(waiting, n_each=n_most)

    def _order(
        self,
        waiting: Iterable[CandidateT],
        running: Iterable[Candidate] = (),
        n_each: int = sys.maxsize,
    ) -> list[CandidateT]:
        """The sequences that wait, or the first `n_each` of each account, the next one first.

        What is behind all others comes last. Who lost a slot because the cache was full, or with another
        engine, goes before everybody new. Then a lower `priority` goes first, whatever was served. Among
        equals, the one goes first whose client has least due. That is the seconds that it was charged, and
        the probable cost of its requests that run or go before. Of clients with as much due, the one with
        fewer requests before goes first. So a client with one short request does not wait for all of
        another's.
        """
        ahead_s, n_ahead, n_ranked = defaultdict[str, float](float), Counter[str](), Counter[str]()
        for item in running:
            ahead_s[item.request.account] += _outstanding_s(item)
            n_ahead[item.request.account] += 1
        ranked: list[tuple[tuple[bool, bool, int, float, int, int], CandidateT]] = []
        for arrival, candidate in enumerate(waiting):
            owner = candidate.request.account
            if n_ranked[owner] == n_each:
                continue
            due_s = self._accounts[owner] + ahead_s[owner]
            rank = candidate.is_behind, not candidate.lost_slot, candidate.request.priority
            ranked.append(((*rank, due_s, n_ahead[owner] + n_ranked[owner], arrival), candidate))
            ahead_s[owner] += _outstanding_s(candidate)
            n_ranked[owner] += 1
        return [candidate for _, candidate in sorted(ranked, key=itemgetter(0))]

    def _n_kept(self, client: str, running: Iterable[Sequence]) -> int:
        """How many idle slots are not for this client's next request."""
        expected = self._expected
        if not expected:
            return 0
        askers = (item.request for item in running if not item.is_finished)
        n_running = Counter(asker.client for asker in askers if not asker.background)
        share = max(1, self._n_slots // len(n_running.keys() | expected | {client}))
        return min(len(expected), self._n_slots // 2) if n_running[client] >= share else 0

    # -- who gives a slot back ----------------------------------------------------------------------

    def gives_back(
        self,
        waiting: SequenceOf[Sequence],
        running: SequenceOf[Sequence],
        room: SlotRoom,
        cost_s: Cost,
        now: float,
    ) -> list[Sequence]:
        """The running sequences that are preempted now for others that wait. To be asked before `next`:
        this decides what of the background is behind all others.

        Of those that are behind, the youngest lose their slots, as many as others lack, and one if others
        lack room. For each other, they are preempted as all others are."""
        self._is_full &= bool(running)
        self._is_full_of_background &= bool(running)
        self._left = {client: at for client, at in self._left.items() if now < at + EXPECTED_S}
        if waiting or any(item.request.background for item in running):
            live = [item for item in (*running, *waiting) if not item.is_finished]
            shares = _Shares(self._n_slots, live, self._left.keys())
            shares.rank()
            self._expected = shares.expected
        if self._is_full or not waiting:
            return []
        behind = [item for item in running if item.is_behind and not item.is_finished]
        if behind:
            ahead = [item for item in waiting if not (item.is_behind or item.is_finished)]
            n_lacking = len(ahead) - room.n_idle
            if not all(map(room.has_room, ahead)):
                n_lacking = max(1, n_lacking)
            if n_lacking > 0:
                return sorted(behind, key=attrgetter("admitted_at"))[-n_lacking:]
        if self._accounts.active < 2 or room.n_idle or now < self._quiet_until:
            return []
        return self._fair(self._order(waiting, running)[0], running, cost_s, now)

    def _fair(
        self, first: Sequence, running: Iterable[Sequence], cost_s: Cost, now: float
    ) -> list[Sequence]:
        """The sequence to preempt for the first one that waits, if that is fair.

        A client that has at least two slots more than the one whose request is next gives one of them
        back. It does not if it has less due all the same: then the other has had more for its slots. With
        one slot more, it does so when it is ahead by a quantum. So clients take turns where slots are
        fewer. Slots so get equal, and nobody gives back what it would get again at once."""
        own, running = first.request.account, [item for item in running if not item.is_finished]
        n_slots = Counter(item.request.account for item in running)
        due_s = {owner: self._accounts[owner] for owner in (own, *n_slots)}
        youngest = dict[str, tuple[Sequence, float]]()
        for sequence in sorted(running, key=attrgetter("admitted_at")):
            owner = sequence.request.account
            due_s[owner] += _outstanding_s(sequence)
            is_less_urgent = sequence.request.priority >= first.request.priority
            if n_slots[owner] > n_slots[own] and sequence.is_behind == first.is_behind:
                seconds = cost_s(sequence) if is_less_urgent else None
                if seconds is not None:
                    youngest[owner] = sequence, seconds
        for owner in sorted(youngest, key=due_s.__getitem__, reverse=True):
            sequence, seconds = youngest[owner]
            ahead_s = due_s[owner] - _outstanding_s(sequence) - due_s[own]
            has_two_more = n_slots[owner] > n_slots[own] + 1
            if ahead_s > (0.0 if has_two_more else max(_QUANTUM_S, _PAUSE * seconds)):
                self._quiet_until = now + _PAUSE * seconds
                return [sequence]
        return []

    def gives_room(self, running: SequenceOf[Sequence]) -> Sequence:
        """The one of these sequences that is preempted because the cache is full: the youngest, of those
        that are behind if there are any. Nothing that could take its room is admitted until one ends."""
        behind = [sequence for sequence in running if sequence.is_behind]
        self._is_full, self._is_full_of_background = not behind, True
        return max(behind or running, key=attrgetter("admitted_at"))


def _outstanding_s(item: Candidate) -> float:
    """Seconds of what was expected that the decoder has not worked for it yet."""
    return max(0.0, item.expected_s - item.spent_s)

"""Decides which request gets a slot, and which loses one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from serve_app.engine.backends.base import Backend
from serve_app.engine.core.postprocessor import Outbox
from serve_app.engine.core.scheduler.fair_queue import FairQueue, PreemptionPolicy, SlotShares
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import NO_SLOT, Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.kv_cache.manager import KVCacheManager, Place
from serve_app.engine.kv_cache.slots import PrefixPending
from serve_app.engine.metrics.stats import Counts
from serve_app.errors import DecodeError
from serve_app.types import FinishReason

logger = logging.getLogger("corral.engine")


@dataclass(eq=False)
class Admission:
    """Moves sequences into slots, and back where another client's turn has come or the cache is full.
    Requests that are behind all others give their slots back to any of these. Decoder thread only."""

    _backend: Backend
    _cache: KVCacheManager
    _scheduler: Scheduler
    _queue: FairQueue
    _budget: StepBudget
    _counts: Counts
    _outbox: Outbox
    _paused: bool = False
    """Whether nothing is admitted until a sequence ends: the cache was full, and one lost its slot."""
    _background_paused: bool = False
    """Whether nothing in the background is admitted until a sequence ends."""
    changed: bool = False
    """Whether a sequence has got a slot or lost one since this was last set to False."""

    def __post_init__(self) -> None:
        self._preemption_policy = PreemptionPolicy()
        self._shares = SlotShares(sum(not slot.pinned for slot in self._cache.table.slots))

    def enqueue(self, sequences: SequenceOf[Sequence]) -> None:
        """Have new sequences wait."""
        self._queue.extend(sequences)
        for sequence in sequences:
            if not sequence.request.background:
                self._shares.came(sequence.request.client)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into idle slots, in the order that is fair to clients; whoever waits for
        a prefix, or for room, lets others pass. Returns those that have got their first slot."""
        self._budget.reserved_s = 0.0
        for sequence in self._scheduler.running:
            sequence.n_awaited = 0
        self._shares.rank_background(self._live, time.monotonic())
        if self._paused or not self._queue:
            return []
        self._preempt_fairly()
        n_awaiting, started = 0, list[Sequence]()
        held: Sequence | None = None
        for sequence in self._queue:
            if not self._cache.table.n_idle:
                break
            if sequence.finished or self._is_held_back(sequence):
                continue
            if held is not None and sequence.is_behind and not held.is_behind:
                continue  # it would have to give its room back in the next step
            too_long = len(sequence.tokens) > self._cache.table.room  # until the cache is changed
            if too_long or not self._cache.has_room(sequence, held):
                held = held or sequence
                continue
            place = self._cache.place(sequence)
            if place is None:
                continue
            if isinstance(place, PrefixPending):
                n_awaiting += 1
                if (owner := place.slot.sequence) is not None:
                    owner.n_awaited = max(owner.n_awaited, place.n_tokens)
                continue
            is_new = sequence.trace.admitted is None
            if self._occupy(sequence, place) and is_new:
                started.append(sequence)
        else:
            self._cache.make_way(n_awaiting)
        return started

    def _occupy(self, sequence: Sequence, place: Place) -> bool:
        """Let a sequence run in its slot. False if no sampler can be made for it: that is its end."""
        sampler = None
        if sequence.trace.admitted is None:  # one that was preempted goes on with its own
            try:
                sampler = self._backend.sampler(
                    sequence.request.sampling, sequence.request.given, sequence.constraint
                )
            except Exception as error:
                logger.exception("No sampler could be made for %s.", sequence.id)
                refusal = DecodeError(f"No sampler could be made for this request: {error}")
                self._outbox.end(sequence, FinishReason.ERROR, refusal)
                return False
        self.changed = True
        self._queue.admit(sequence)
        sequence.admit(place.slot.id, place.n_cached, sampler, self._cache.table.room)
        place.slot.occupy(sequence)
        self._scheduler.add(sequence)
        self._counts.cached_tokens += place.n_cached
        self._counts.restored_tokens += place.n_restored
        return True

    def has_share_left(self, client: str) -> bool:
        """Whether a client's texts in the background are not behind all others: see `SlotShares`."""
        return self._shares.has_share_left(client, self._live, time.monotonic())

    @property
    def _live(self) -> Iterator[Sequence]:
        return chain(self._scheduler.running, self._queue.waiting)

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that has ended and is in the queue no more."""
        client, background = sequence.request.client, sequence.request.background
        if (
            sequence.trace.admitted is not None
            and client not in self._queue.accounts
            and not background
        ):
            self._shares.left(client, time.monotonic())
        if sequence.slot_id == NO_SLOT:
            return
        self._paused = self._background_paused = False
        self._scheduler.remove(sequence)
        self._cache.release(sequence)

    # -- when the cache is full -------------------------------------------------------------------

    def make_room(self) -> bool:
        """Free the cells of the least used idle slot, or else of the sequence that got its slot last, of
        those in the background if there are any, which waits then. False if there is but one sequence."""
        if self._cache.evict_idle():
            return True
        running = [seq for seq in self._scheduler.running if not seq.finished]
        if len(running) < len(self._scheduler.running):
            return True  # some have just ended
        if len(running) == 1:
            return False
        behind = [seq for seq in running if seq.is_behind]
        self._preempt(max(behind or running, key=attrgetter("admitted_at")))
        self._background_paused = True
        self._paused = not behind
        return True

    def interrupt(self) -> None:
        """Take all slots away, and what is in them: the sequences wait for others, before all new ones."""
        for sequence in self._scheduler.running:
            if not sequence.finished:
                self._preempt(sequence, stored=False)
        self._paused = self._background_paused = False

    def _preempt(
        self, sequence: Sequence, *, for_another: bool = False, stored: bool = True
    ) -> None:
        self._scheduler.remove(sequence)
        self._cache.preempt(sequence, stored=stored)
        self._queue.put_back(sequence, for_another=for_another)
        self.changed = True
        self._counts.preemptions += 1

    # -- when somebody else needs a slot ----------------------------------------------------------

    def _preempt_background(self) -> None:
        """Have as many sequences in the background lose their slots as others lack, and one if others
        lack room. Their part of the cache is stored, unless that takes too long."""
        behind = [seq for seq in self._scheduler.running if seq.is_behind]
        behind = sorted((seq for seq in behind if not seq.finished), key=attrgetter("admitted_at"))
        if not behind:
            return
        ahead = [seq for seq in self._queue.waiting if not (seq.is_behind or seq.finished)]
        n_lacking = len(ahead) - self._cache.table.n_idle
        if not all(map(self._cache.has_room, ahead)):
            n_lacking = max(1, n_lacking)
        for sequence in behind[len(behind) - max(0, min(n_lacking, len(behind))) :]:
            is_stored = self._preemption_s(sequence) is not None
            self._preempt(sequence, for_another=True, stored=is_stored)

    def _preempt_fairly(self) -> None:
        """Preempt a sequence for another client's request if that is fair and pays."""
        self._preempt_background()
        if self._queue.accounts.active < 2 or self._cache.table.n_idle:
            return
        running, now = self._scheduler.running, time.monotonic()
        sequence = self._preemption_policy.find(self._queue, running, self._preemption_s, now)
        if sequence is not None:
            self._preempt(sequence, for_another=True)

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Whether the slots that are idle are for others, who will probably be back at once. Background
        requests may have them, unless the cache was too small for them: they give them back."""
        client, running = sequence.request.client, self._scheduler.running
        if sequence.is_behind:
            return self._background_paused
        n_kept = self._shares.n_kept(client, running, time.monotonic())
        return self._cache.table.n_idle <= n_kept

    def _preemption_s(self, sequence: Sequence) -> float | None:
        """Seconds to store a sequence and have it back; None if streams would wait too long for it."""
        n_kept, save_s = self._cache.would_keep(sequence)
        if not self._budget.allows(save_s):
            return None
        return 2 * save_s + self._scheduler.costs.prefill_s(sequence.n_past - n_kept, n_kept)

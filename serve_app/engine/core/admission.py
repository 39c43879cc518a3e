"""Moves sequences into slots, and out of them, as the policy decides."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.base.errors import DecodeError
from serve_app.base.values.answers import FinishReason
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.manager import KVCacheManager, Place
from serve_app.engine.cache.slots import PrefixPending
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.postprocessor import Outbox
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import NO_SLOT, Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.policy.policy import SlotPolicy

logger = logging.getLogger("corral.engine")


@dataclass(eq=False)
class Admission:
    """The way of sequences into slots, and back. Decoder thread only."""

    _backend: Backend
    _cache: KVCacheManager
    _scheduler: Scheduler
    _command_queue: CommandQueue
    _budget: StepBudget
    _counts: Counts
    _outbox: Outbox
    waiting: list[Sequence] = field(default_factory=list)
    """The sequences without a slot, in the order in which they came, those that lost one first."""
    changed: bool = False
    """Whether anything but the number of tokens has changed since this was last set to False."""

    @property
    def _policy(self) -> SlotPolicy:
        return self._command_queue.policy

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Have new sequences wait."""
        for sequence in sequences:
            self._policy.enter(sequence.request)
            self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Preempt those whose slots others need more, and move waiting sequences into idle slots; whoever
        waits for a prefix lets others pass. Returns those that have got their first slot."""
        self._budget.reserved_s = 0.0
        running, n_awaiting, started = self._scheduler.running, 0, list[Sequence]()
        for sequence in running:
            sequence.n_awaited = 0
        for sequence in self._policy.gives_back(
            self.waiting, running, self._cache, self._preemption_s, time.monotonic()
        ):
            self._preempt(sequence, for_another=True)
        for sequence in self._policy.next(self.waiting, running, self._cache):
            place = self._cache.place(sequence)
            if isinstance(place, PrefixPending):
                n_awaiting += 1
                if (owner := place.slot.sequence) is not None:
                    owner.n_awaited = max(owner.n_awaited, place.n_tokens)
            elif place is not None:
                is_new = sequence.trace.admitted is None
                if self._occupy(sequence, place) and is_new:
                    started.append(sequence)
        if n_awaiting:
            self._cache.make_way(n_awaiting)
        return started

    def _occupy(self, sequence: Sequence, place: Place) -> bool:
        """Let a sequence run in its slot. False if it has just lost its place, or no sampler can be made
        for it: that is its end."""
        if not self._command_queue.start(sequence):
            return False
        sampler = None
        if sequence.trace.admitted is None:  # one that was preempted goes on with its own
            try:
                sampler = self._backend.sampler(
                    sequence.request.sampling, sequence.request.all_tokens, sequence.constraint
                )
            except Exception as error:
                logger.exception("No sampler could be made for %s.", sequence.id)
                refusal = DecodeError(f"No sampler could be made for this request: {error}")
                self._outbox.end(sequence, FinishReason.ERROR, refusal)
                return False
        self.changed = True
        self.waiting.remove(sequence)
        sequence.admit(place.slot.id, place.n_cached, sampler, self._cache.table.room)
        place.slot.occupy(sequence)
        self._scheduler.running.append(sequence)
        self._counts.cached_tokens += place.n_cached
        self._counts.restored_tokens += place.n_restored
        return True

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and take its slot."""
        self.changed, had_slot = True, sequence.trace.admitted is not None
        self._policy.leave(sequence.request, time.monotonic() if had_slot else None)
        if sequence.slot_id == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self._scheduler.running.remove(sequence)
            self._cache.release(sequence)

    def make_room(self) -> bool:
        """Free the cells of the least used idle slot, or else of a sequence, which waits then. False if but
        one runs."""
        if self._cache.evict_idle():
            return True
        running = [seq for seq in self._scheduler.running if not seq.is_finished]
        if len(running) < len(self._scheduler.running):
            return True  # some have just ended
        if len(running) == 1:
            return False
        self._preempt(self._policy.gives_room(running))
        return True

    def interrupt(self) -> None:
        """Take all slots away, and what is in them: the sequences wait for others, before all new ones."""
        for sequence in self._scheduler.running[::-1]:
            if not sequence.is_finished:
                self._preempt(sequence, stored=False)
        self.changed = True

    def _preempt(
        self, sequence: Sequence, *, for_another: bool = False, stored: bool = True
    ) -> None:
        """Take a sequence's slot. Its part of the cache is stored, unless another one needs the slot and
        streams would wait too long for that."""
        if for_another:
            stored = self._preemption_s(sequence) is not None
        self._scheduler.running.remove(sequence)
        self._cache.preempt(sequence, stored=stored)
        sequence.lost_slot = not for_another
        self.waiting.insert(0, sequence)
        self.changed = True
        self._counts.preemptions += 1

    def _preemption_s(self, sequence: Sequence) -> float | None:
        """Seconds to store a sequence and have it back; None if streams would wait too long for it."""
        n_kept, save_s = self._cache.would_keep(sequence)
        if not self._budget.allows(save_s):
            return None
        return 2 * save_s + self._scheduler.costs.prefill_s(sequence.n_past - n_kept, n_kept)

"""Changes the kind of cache when the traffic says that the other one pays, or a request needs it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import DecodeError, PromptTooLongError
from serve_app.base.formats import State
from serve_app.base.sharing import turns
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.manager import KVCacheManager, min_copy, slot_room
from serve_app.engine.cache.slots import Slot
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.scheduler.batch import Batch
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import NO_SLOT, Sequence
from serve_app.engine.costs.traffic import Load, Traffic

logger = logging.getLogger("corral.engine")

# What a change must have saved, by what it costs, while somebody waits; and at least, in seconds: forecasts
# of less are noise.
_WHILE_BUSY, _LEAST_S = 4, 0.5
# The longest that streams wait for a change, in seconds, whatever the bound is.
_LONGEST_PAUSE_S = 2.0
# After a change, the next one may so many times later as that took.
_PAUSE = 10
# Steps from one look whether a change pays to the next.
_EVERY = 64
# Steps are alike if no sequence has so many tokens more.
_ALIKE = 64
# A request that is longer than a slot's share waits so long at most for a moment in which nobody streams.
_PATIENCE_S = 5.0
# After the last such request, its chat probably goes on within so many seconds.
_CHAT_GOES_ON_S = 600.0


class CacheModeSwitcher(Guest):
    """Watches what steps compute, and has the other kind of cache made when that pays. Decoder thread only.

    Best while nobody waits. Streams are interrupted only for what would have saved several times as much,
    and if by the forecast they wait no longer than `max_stall_ms`. Never, if the options say what kind of
    cache it is to be, or the model forgets.

    A request that is longer than a slot's share of a split cache needs a unified one. Streams are
    interrupted for it if they leave no gap within a few seconds.
    """

    def __init__(
        self,
        options: EngineOptions,
        backend: Backend,
        cache: KVCacheManager,
        scheduler: Scheduler,
        steps: Steps,
    ) -> None:
        self._options, self._backend, self._cache = options, backend, cache
        self._scheduler, self._costs = scheduler, scheduler.costs
        self._steps = steps
        self._longest_pause_s = min(steps.budget.max_stall_s, _LONGEST_PAUSE_S)
        can_change = backend.cache_plan.profile.decode_s and not backend.traits.forgets
        self._modes = backend.modes if can_change else None
        self._traffic = self._comparison()
        self._not_before = 0.0
        self._long_until = 0.0
        """The time until which the cache stays unified for requests longer than a slot's share."""
        self._n_steps = 0

    def _comparison(self) -> Traffic | None:
        """The comparison of the present kind with the other one, if there is another."""
        plan = self._backend.cache_plan
        if self._modes is None or plan.other is None:
            return None
        share = min(plan.profile.share, plan.other[1].share)
        return Traffic((plan.mode, self._costs), plan.other, share)

    def before_schedule(self) -> None:
        """Change the cache if a request needs that; or if it pays, and streams can wait for it."""
        too_long = self._too_long()
        if too_long and self._traffic is None:
            for sequence in too_long:
                n_most = self._cache.table.room
                self._steps.end(
                    [sequence], PromptTooLongError(len(sequence.tokens), n_most, "prompt")
                )
        elif self._needs_change(too_long):
            longest = max(len(sequence.tokens) for sequence in too_long)
            self.carry_out(f"a request of {longest} tokens is longer than a slot's share")
            self._steps.admit()
        elif not self._steps.is_draining and self.pays():
            self.carry_out()
            self._steps.admit()

    def before_decode(self, batches: SequenceOf[Batch]) -> None:
        """Watch what the step computes."""
        if self._traffic is None or not batches:
            return
        self._n_steps += 1
        n_cells = self._cache.table.n_cells
        for together in _together(batches):
            self._traffic.observe(_load(together, n_cells))

    @property
    def rest_at(self) -> float:
        """0, for at once, if it pays to change now that nobody is there."""
        if self._traffic is None or self._stays_unified:
            return math.inf
        return 0.0 if self._traffic.regret_s() > max(_LEAST_S, self._cost_s()) else math.inf

    def at_rest(self) -> None:
        """Change the cache while nobody waits."""
        if not self._steps.is_draining:
            self.carry_out()

    def _too_long(self) -> list[Sequence]:
        """The live sequences for which a slot has no room in the present kind of cache."""
        if not self._options.is_pooled:
            return []
        live = (*self._steps.running, *self._steps.waiting)
        share = self._options.n_ctx_share
        longer = [seq for seq in live if len(seq.tokens) > share and not seq.is_finished]
        if longer:
            self._long_until = time.monotonic() + _CHAT_GOES_ON_S
        return [seq for seq in longer if not self._cache.fits(seq)]

    def _needs_change(self, too_long: list[Sequence]) -> bool:
        """Whether to change now for sequences that have no room: at once if a slot is full. Else one of
        them must fit beside the running sequences, and streams can wait for it, or have been waited for."""
        running = self._steps.running
        if not too_long or any(sequence.is_finished for sequence in running):
            return False
        if any(sequence.slot_id != NO_SLOT for sequence in too_long):
            return True
        if not any(map(self._cache.has_room, too_long)):
            return False
        if not any(sequence.n_generated for sequence in running):
            return True
        waited_s = time.monotonic() - min(sequence.trace.submitted for sequence in too_long)
        return waited_s >= _PATIENCE_S or self._cost_s() <= self._longest_pause_s

    @property
    def _stays_unified(self) -> bool:
        """Whether a long chat is there, or was there lately."""
        unified = self._backend.cache_plan.mode.kv_unified
        return unified and time.monotonic() < self._long_until

    def pays(self) -> bool:
        """Whether to change now, for what was there lately."""
        if self._traffic is None or not self._cache.is_settled or self._n_steps % _EVERY:
            return False
        if time.monotonic() < self._not_before or self._stays_unified:
            return False
        running, cost_s = self._steps.running, self._cost_s()
        if any(sequence.is_finished for sequence in running):
            return False
        somebody_streams = any(sequence.n_generated for sequence in running)
        if (somebody_streams or self._steps.budget.is_shared) and cost_s > min(
            self._steps.budget.left_s, self._longest_pause_s
        ):
            return False
        return self._traffic.regret_s() > _WHILE_BUSY * max(_LEAST_S, cost_s)

    # -- the change -------------------------------------------------------------------------------

    def _cost_s(self) -> float:
        """Seconds until all is as it was. The cache is made, and what is worth it is stored. What running
        sequences had, and what is pinned, is there again."""
        copies, tier = self._cache.copies, self._cache.memory_tier
        seconds, n_kept = self._modes.change_s if self._modes else 0.0, 0
        for slot in reversed(self._in_turn):  # what is stored last does not give way to others
            n_bytes = self._backend.memory.state_bytes(slot.n_past)
            is_saved = slot.pinned or (self._is_worth_storing(slot) and tier.fits(n_bytes))
            if is_saved:
                seconds += copies.saves.forecast_s(n_bytes)
                n_kept += 0 if slot.pinned else n_bytes
            if slot.idle:
                continue
            if is_saved and (slot.pinned or tier.fits(n_kept)):
                seconds += copies.restores.forecast_s(n_bytes)
            else:
                n_computed = slot.n_past - min(slot.n_shared, slot.n_past)
                seconds += n_computed * self._costs.prompt_token_s
        return seconds

    @property
    def _in_turn(self) -> list[Slot]:
        """All slots, in the order in which they are stored."""
        slots = self._cache.table.slots
        return sorted(slots, key=lambda one: (one.sequence is not None, one.last_used))

    def _is_worth_storing(self, slot: Slot) -> bool:
        """Whether the slot is stored before the change. What comes back from a store into a unified cache
        shares no cells: what is mostly another slot's is better copied from there."""
        turns_unified = not self._backend.cache_plan.mode.kv_unified
        mostly_shared = turns_unified and 2 * slot.n_shared > slot.n_past
        return bool(slot.n_past) and not (slot.pinned or mostly_shared)

    def carry_out(self, need: str = "") -> None:
        """Have the other kind of cache, because of that `need` or else by the traffic. Running sequences
        lose their slots, and wait for others. Raises ConfigError if there is no memory for either kind: the
        backend is broken then."""
        if self._traffic is None or self._modes is None:
            return
        began = time.monotonic()
        cache, table = self._cache, self._cache.table
        for slot in self._in_turn:
            if self._is_worth_storing(slot):
                turns.current().take()  # others on these cores compute between two copies
                cache.store_now(slot)
        pinned = {slot.id: self._pinned_state(slot) for slot in table.slots if slot.pinned}
        reason = self._traffic.reason(need)
        self._steps.interrupt()
        self._modes.change(reason, self._costs.learned_profile())
        self._modes, plan = self._backend.modes, self._backend.cache_plan
        self._costs.begin(plan.profile)
        self._traffic, mode = self._comparison(), plan.mode
        self._scheduler.mix(mode.kv_unified)
        room = slot_room(self._options, mode)
        table.begin(min_copy(self._options, mode), room, consecutive=not mode.kv_unified)
        for slot_id, state in pinned.items():
            self._restore_pinned(slot_id, state)
        took_s = time.monotonic() - began
        self._not_before = time.monotonic() + _PAUSE * took_s
        logger.info("%s. The change took %.2f s.", plan.reason, took_s)

    def _pinned_state(self, slot: Slot) -> State | None:
        return (
            None
            if slot.id in self._backend.slots_with_pending_copy
            else self._backend.states.save(slot.id)
        )

    def _restore_pinned(self, slot_id: int, state: State | None) -> None:
        try:
            if state is not None:
                self._backend.states.restore(slot_id, state)
                return
        except DecodeError as error:
            logger.warning("A system prompt is computed again: %s", error)
        self._cache.pin(self._options.n_batch, slot_id)


def _together(batches: SequenceOf[Batch]) -> Iterator[SequenceOf[Batch]]:
    """The batches that a unified cache computes as one: all of a step's but those of tiles."""
    rest = [batch for batch in batches if batch.span is None]
    if rest:
        yield rest
    for batch in batches:
        if batch.span is not None:
            yield [batch]


def _load(batches: SequenceOf[Batch], n_cells: int) -> Load:
    """The rows and cells that a step computes. It is rounded where it grows with every step: most
    are like the step before."""
    n_decoding, n_past = 0, 0.0
    prompts: list[tuple[int, float]] = []
    for batch in batches:
        n_own = len(batch.chunks)
        if batch.prefills:
            pending = [chunk for chunk in batch.chunks if chunk.sequence.n_pending > 1]
            prompts += [(chunk.n_rows, chunk.sequence.n_past) for chunk in pending]
            n_own -= len(pending)
            decoding = (chunk for chunk in batch.chunks if chunk.sequence.n_pending == 1)
            n_past += sum(chunk.sequence.n_past for chunk in decoding)
        else:
            n_past += n_own * batch.depth
        n_decoding += n_own
    n_alike = _ALIKE * max(1, n_decoding)
    cells = n_alike * round(n_cells / n_alike)
    depth = _ALIKE * round(n_past / n_alike)
    return Load(n_decoding, depth, tuple(prompts), cells)

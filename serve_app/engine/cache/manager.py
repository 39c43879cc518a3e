"""The KV cache's manager: what happens to slots when sequences come, grow and go."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from dataclasses import replace
from typing import NamedTuple

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import (
    DecodeCancelledError,
    DecodeError,
    EngineUnavailableError,
    InvalidRequestError,
)
from serve_app.base.sharing import turns
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.chunk_reuse import ChunkReuse
from serve_app.engine.cache.contents import Checkpoints, SlotContents, StoredPrefix
from serve_app.engine.cache.files import DiskTier
from serve_app.engine.cache.memory_tier import MemoryTier
from serve_app.engine.cache.packing import TokenArray, token_array
from serve_app.engine.cache.prefixes import Prefix
from serve_app.engine.cache.slots import PrefixPending, Slot, SlotTable
from serve_app.engine.choice.plan import Mode
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.copy_budget import CopyBudget
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.metrics.stats import CachedPrompt

# Prompts by which it is known what others begin with: half a megabyte with a thousand tokens each.
_BEGUN_KEPT = 128
# Fewer tokens than this are not worth copying, however short the slot.
_LEAST_COPY = 16
# Cells that are copied in the time in which one token of a prompt is computed.
_COPIED_CELLS = 200


class Place(NamedTuple):
    slot: Slot
    n_cached: int
    """First tokens of the sequence that are in the slot already."""
    n_restored: int
    """The part of `n_cached` that came from the memory tier."""


class PrefixStorage(Guest):
    """Stores what idle slots have, while nobody waits for the decoder, and at the end."""

    def __init__(self, cache: KVCacheManager, steps: Steps) -> None:
        self._cache, self._steps = cache, steps

    @property
    def rest_at(self) -> float:
        """0, for at once, if a slot has a prefix that is not stored."""
        return math.inf if self._cache.behind is None else 0.0

    def at_rest(self) -> None:
        """Store one prefix, unless a request comes meanwhile."""
        with self._steps.resting():
            self._cache.store_ahead()

    def close(self, *, healthy: bool) -> None:
        """Store everything for the next start, if there is one."""
        if self._cache.disk_tier is not None:
            if healthy:
                self._cache.store_all()
            self._cache.disk_tier.close()


class KVCacheManager:
    """Carries out in the backend what `SlotTable` decides. Decoder thread only."""

    def __init__(
        self,
        backend: Backend,
        table: SlotTable,
        memory_tier: MemoryTier,
        budget: StepBudget | None = None,
        checkpoints: Checkpoints | None = None,
        disk_tier: DiskTier | None = None,
        n_pool: int | None = None,
    ) -> None:
        """`disk_tier` are the files that the memory tier is kept in for the next start. `n_pool` are the
        tokens that all slots hold together, if one of them may have more than its share."""
        self.table = table
        self.memory_tier = memory_tier
        self.checkpoints = Checkpoints(backend) if checkpoints is None else checkpoints
        self.disk_tier, self._n_pool = disk_tier, n_pool
        self.backend = backend
        self.copies = CopyBudget(budget or StepBudget())
        self.contents = SlotContents(backend, self.checkpoints, self.copies)
        self._chunk_reuse = ChunkReuse(backend, table, self.contents)
        self.begun: deque[Prefix] = deque(maxlen=_BEGUN_KEPT)
        """The last prompts that got a slot."""
        self.transferred: Counter[str] = Counter()
        """The amounts sent to other engines and received from them, by the names of `EngineStats`."""

    def pin(self, n_batch: int, slot_id: int | None = None) -> None:
        """Compute what is pinned, everywhere or in one slot."""
        for slot in self.table.slots:
            if slot.pinned and slot_id in (None, slot.id):
                rows = [(token, i, slot.id, False) for i, token in enumerate(slot.idle_tokens)]
                for start in range(0, len(rows), n_batch):
                    with turns.current().turn():
                        self.backend.decode(rows[start : start + n_batch])

    @property
    def is_settled(self) -> bool:
        """Whether the next decode has nothing to do besides."""
        return not self.backend.slots_with_pending_copy

    @property
    def prompts(self) -> list[CachedPrompt]:
        """The prefixes that prompts could start from: pinned, in slots, then stored; in each, the
        most recently used first. Nobody changes their tokens any more."""
        slots = sorted(self.table.slots, key=lambda one: (not one.pinned, one.idle, -one.last_used))
        return [
            *(CachedPrompt(slot.group, slot.prompt) for slot in slots),
            *self.memory_tier.prompts,
        ]

    # -- coming and going -------------------------------------------------------------------------

    @property
    def n_idle(self) -> int:
        """How many slots could take a sequence."""
        return self.table.n_idle

    def fits(self, sequence: Sequence) -> bool:
        """Whether a slot has cells enough for a sequence, in the kind of cache that is there."""
        return len(sequence.tokens) <= self.table.room

    def has_room(self, sequence: Sequence, held: Sequence | None = None) -> bool:
        """Whether all slots together have room for a sequence beside the running ones. It must not keep
        `held` waiting, which has waited for room before it: both fit beside what runs since then."""
        if self._n_pool is None:
            return True
        running = [slot for slot in self.table.slots if slot.sequence is not None]
        n_new, n_used = len(sequence.tokens), self.table.n_tokens_of(running)
        if not running or (held is None and n_used + n_new <= self._n_pool):
            return True
        n_new -= self.table.n_shared_with(running, sequence)
        if n_used + n_new > self._n_pool:
            return False
        if held is None:
            return True
        since = held.trace.submitted
        later = [slot for slot in running if slot.sequence and slot.sequence.admitted_at > since]
        return self.table.n_tokens_of(later) + n_new + len(held.tokens) <= self._n_pool

    def place(self, sequence: Sequence) -> Place | PrefixPending | None:
        """Put a sequence into an idle slot, with the longest prefix of its cache group there. Do nothing
        if it should wait for one that is being computed. Tokens that lose their place are stored first.

        While others generate, what would keep them waiting for too long is neither restored nor stored;
        None if it is only too much for this step."""
        if sequence.prefix_pending is not None and self.table.lasts(sequence.prefix_pending):
            return sequence.prefix_pending
        group, tokens = sequence.request.content_group, sequence.packed_tokens(sequence.n_reusable)
        n_stored, stored = self._restorable(group, tokens)
        wanted = self._chunk_reuse.slot_for(sequence, tokens)
        background = sequence.request.background
        choice = self.table.choose(group, tokens, n_stored, wanted, background=background)
        sequence.prefix_pending = choice if isinstance(choice, PrefixPending) else None
        if isinstance(choice, PrefixPending):
            if self.checkpoints.is_needed and choice.slot.sequence is not None:
                stops = {*choice.slot.sequence.stops, choice.n_tokens}
                choice.slot.sequence.stops = tuple(sorted(stops))
            return choice
        choice = replace(choice, n_cached=sequence.n_whole(choice.n_cached))
        lost, restore_s = self.table.loses(choice), 0.0
        if choice.stored and stored is not None:
            restore_s = self.copies.restores.forecast_s(len(stored.state))
        n_bytes = self.contents.n_bytes(choice.slot, len(lost)) if lost else 0
        save_s = self.copies.saves.forecast_s(n_bytes)
        if self.table.streams and self.copies.can_wait(restore_s, save_s):
            return None
        if choice.stored and stored is not None:
            self.memory_tier.used(stored)
        self.store(choice.slot, lost, restore_s)
        if choice.in_place and choice.n_cached == len(choice.slot.idle_tokens):
            self._mark_end(choice.slot)
        n_cached = self._chunk_reuse.fill(sequence, choice, tokens)
        if n_cached is None:
            n_cached = self.contents.fill(choice, stored)
        n_cached = self._keep_whole(sequence, choice.slot, n_cached)
        if self.checkpoints.is_needed:
            n_known = max(choice.n_known, self.memory_tier.n_known(group, tokens))
            sequence.stops = self.checkpoints.stops(n_cached, n_known, len(sequence.tokens))
        if sequence.trace.admitted is None:  # one that was preempted was counted before
            self.begun.append(Prefix(group, sequence.packed_prompt))
        return Place(choice.slot, n_cached, n_cached if choice.stored else 0)

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves its slot, which keeps what others may start from."""
        self._drop_part_of_span(sequence)
        slot = self.table.slots[sequence.slot_id]
        self.table.release(slot)
        if sequence.n_exact is not None:
            n_kept = self.contents.keep(slot, len(slot.idle_tokens))
            slot.idle_tokens = slot.idle_tokens[:n_kept]

    def evict_idle(self) -> bool:
        """Empty the idle slot that nobody has used for longest; False if there is none with tokens."""
        slot = self.table.least_used()
        if slot is None:
            return False
        self._empty(slot)
        return True

    def make_way(self, n_sequences: int) -> None:
        """Empty the idle slots that so many sequences will get, if the cache is unified. Until then every
        row would be computed with what is there."""
        if self.backend.cache_plan.mode.kv_unified:
            n_empty = sum(slot.idle and not slot.idle_tokens for slot in self.table.slots)
            while n_empty < n_sequences and self.evict_idle():
                n_empty += 1

    def preempt(self, sequence: Sequence, *, stored: bool = True) -> None:
        """Take a sequence's slot away; what it has in the cache is `stored`."""
        self._drop_part_of_span(sequence)
        slot = self.table.slots[sequence.slot_id]
        if stored:
            self.store(slot, slot.tokens[: slot.n_past])
        self.contents.keep(slot, 0)
        sequence.preempt()
        self.table.release(slot)

    def store_now(self, slot: Slot) -> None:
        """Save what a slot has, whoever waits for that, unless the store does not want it."""
        tokens = slot.tokens[: slot.n_past]
        if self._is_worth_saving(slot, tokens, self.contents.n_bytes(slot, len(tokens))):
            self._put(slot, tokens)

    def store(self, slot: Slot, tokens: TokenArray, beside_s: float = 0.0) -> None:
        """Save a slot's first tokens, unless the store has them or they are not really there yet. Nor is
        it done if streams would wait too long for that and `beside_s` seconds of other copies."""
        if not tokens:
            return
        n_bytes = self.contents.n_bytes(slot, len(tokens))
        if self._is_worth_saving(slot, tokens, n_bytes) and self._may_save(n_bytes, beside_s):
            self._put(slot, tokens)

    def _put(self, slot: Slot, tokens: TokenArray, *, cancellable: bool = False) -> None:
        prefix = self.contents.save(slot, tokens, cancellable=cancellable)
        self.memory_tier.put(slot.group, tokens, prefix.state, prefix.checkpoints)

    def _is_worth_saving(self, slot: Slot, tokens: TokenArray, n_bytes: int) -> bool:
        settled = slot.id not in self.backend.slots_with_pending_copy
        return settled and self.memory_tier.wants(
            slot.group, slot.packed_tokens(len(tokens)), n_bytes
        )

    def _may_save(self, n_bytes: int, beside_s: float = 0.0) -> bool:
        saves = self.copies.saves
        return not self.table.streams or (
            self.copies.allows(saves, n_bytes)
            and self.copies.fits(saves.forecast_s(n_bytes) + beside_s)
        )

    def _restorable(self, group: str, prompt: bytes) -> tuple[int, StoredPrefix | None]:
        """The longest stored prefix of a prompt; nothing if streams would wait too long for it."""
        n_stored, stored = self.memory_tier.longest(group, prompt)
        if stored is not None and len(stored.tokens) > self.table.room:
            return 0, None
        if stored is None or not self.table.streams:
            return n_stored, stored
        may_wait = self.copies.allows(self.copies.restores, len(stored.state))
        return (n_stored, stored) if may_wait else (0, None)

    def would_keep(self, sequence: Sequence) -> tuple[int, float]:
        """The number of a running sequence's tokens that would be stored if it lost its slot now, and the
        seconds that this would take."""
        slot = self.table.slots[sequence.slot_id]
        n_bytes = self.contents.n_bytes(slot, slot.n_past)
        if slot.id in self.backend.slots_with_pending_copy or not self.memory_tier.fits(n_bytes):
            return 0, 0.0
        return slot.n_past, self.copies.saves.forecast_s(n_bytes)

    @property
    def behind(self) -> Slot | None:
        """The idle slot used last of those that could be stored without another prefix giving way."""
        for slot in sorted(self.table.slots, key=lambda slot: -slot.last_used):
            n_bytes = self.contents.n_bytes(slot, len(slot.idle_tokens))
            free = (
                slot.idle
                and slot.idle_tokens
                and slot.id not in self.backend.slots_with_pending_copy
            )
            if (
                free
                and not slot.spare
                and self.memory_tier.has_room(n_bytes)
                and self.memory_tier.wants(slot.group, slot.packed_tokens(slot.n_past), n_bytes)
            ):
                return slot
        return None

    def store_ahead(self) -> None:
        """Save what one idle slot has, so that it need not be when somebody wants the slot. A request
        that comes meanwhile does not wait for it."""
        slot = self.behind
        if slot is not None:
            with contextlib.suppress(DecodeCancelledError):
                self._put(slot, slot.idle_tokens, cancellable=True)

    def store_all(self) -> None:
        """Save what every idle slot has and is not spare, the least used first."""
        for slot in sorted(self.table.slots, key=lambda slot: slot.last_used):
            if slot.idle and not slot.spare:
                self.store(slot, slot.idle_tokens)

    # -- when somebody asks -----------------------------------------------------------------------

    def save(self, slot_id: int) -> StoredPrefix:
        """The tokens of an idle slot, for a file. Raises InvalidRequestError, EngineUnavailableError."""
        slot = self._at_rest(slot_id)
        return self.contents.whole(self.contents.save(slot, slot.idle_tokens))

    def restore(self, slot_id: int, prefix: StoredPrefix) -> None:
        """Have a prefix in an idle slot, for its cache group; what is lost by that is stored first."""
        slot = self._at_rest(slot_id)
        if len(prefix.tokens) > self.table.room:
            raise InvalidRequestError(
                f"The slot cannot be filled with {len(prefix.tokens)} tokens: the KV cache is split now, "
                f"with {self.table.room} tokens for each slot. It is unified for requests that are longer, "
                "or always with engine.kv_unified: true.",
                "filename",
            )
        self.erase(slot_id)
        try:
            self.contents.restore(slot, prefix)
        except DecodeError as error:
            raise InvalidRequestError(f"The slot cannot be filled: {error}", "filename") from error
        slot.idle_tokens, slot.group, slot.spare = prefix.tokens, prefix.group, False

    def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns the tokens that it had. The memory tier may have them still."""
        slot = self._at_rest(slot_id)
        n_tokens = len(slot.idle_tokens)
        self._empty(slot)
        return n_tokens

    def _at_rest(self, slot_id: int) -> Slot:
        slots = self.table.slots
        if slot_id not in range(len(slots)) or slots[slot_id].pinned:
            raise InvalidRequestError(f"There is no slot {slot_id}.", "id_slot")
        if not slots[slot_id].idle or slot_id in self.backend.slots_with_pending_copy:
            raise EngineUnavailableError(f"Slot {slot_id} is busy.")
        return slots[slot_id]

    # -- in a slot --------------------------------------------------------------------------------

    def _empty(self, slot: Slot) -> None:
        self.store(slot, slot.idle_tokens)
        self.contents.keep(slot, 0)
        slot.n_shared, slot.idle_tokens = 0, token_array()

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens behind a sequence's first `n_keep`. If the backend cannot move the
        rest up, all is to be computed again."""
        slot = self.table.slots[sequence.slot_id]
        try:
            if slot.id in self.backend.slots_with_pending_copy:
                raise DecodeError("The slot is still to be written.")
            self.backend.shift(slot.id, [(n_keep, n_discard)])
        except DecodeError:
            self.contents.keep(slot, 0)
            sequence.shift(n_keep, n_discard, cached=False)
            return
        slot.n_shared = 0
        self.checkpoints.cut(slot.id, n_keep)
        sequence.shift(n_keep, n_discard, cached=True)

    def on_progress(self, sequence: Sequence) -> None:
        """Some more of a prompt is in its slot: make a checkpoint if there is to be one. It is left
        out if streams would wait too long for it."""
        slot = self.table.slots[sequence.slot_id]
        due = self.checkpoints.is_due(slot, sequence.n_past, sequence.stops)
        if due and sequence.n_exact is None and not sequence.within_span:
            self._mark(slot, sequence.n_past)

    def _mark_end(self, slot: Slot) -> None:
        n_tokens = len(slot.idle_tokens)
        if slot.id not in self.backend.slots_with_pending_copy and self.checkpoints.is_worth(
            slot, n_tokens
        ):
            self._mark(slot, n_tokens)

    def _mark(self, slot: Slot, n_tokens: int) -> None:
        n_bytes = self.backend.memory.checkpoint_bytes(n_tokens)
        if self._may_save(n_bytes):
            with self.copies.making(self.copies.saves, n_bytes):
                self.checkpoints.make(slot.id, n_tokens)

    def drop_rows(self, sequence: Sequence) -> bool:
        """Drop what a failed batch, or a wrong draft, has left in a sequence's slot behind its tokens.
        False if more is lost by that: it goes on from where it still can."""
        slot = self.table.slots[sequence.slot_id]
        n_kept = self.contents.keep(slot, sequence.n_whole(sequence.n_past))
        n_kept = self._keep_whole(sequence, slot, n_kept)
        lost, sequence.n_past = n_kept < sequence.n_past, n_kept
        return not lost

    def _drop_part_of_span(self, sequence: Sequence) -> None:
        """A sequence stops here: of a tile that it has not all of, nobody could have a part."""
        if sequence.within_span:
            self.drop_rows(sequence)

    def _keep_whole(self, sequence: Sequence, slot: Slot, n_kept: int) -> int:
        """Drop, of what was kept for a sequence, a part of a picture: another one may begin alike,
        and some are computed in one batch. Returns what is left."""
        while (n_whole := sequence.n_whole(n_kept)) < n_kept:
            n_kept = self.contents.keep(slot, n_whole)
        return n_kept


def min_copy(options: EngineOptions, mode: Mode) -> int:
    """Tokens from which on copying a slot takes less than computing them. In a split cache llama.cpp copies
    all of a slot's cells, or their state."""
    return _LEAST_COPY if mode.mixes else max(_LEAST_COPY, options.n_ctx_share // _COPIED_CELLS)


def slot_room(options: EngineOptions, mode: Mode) -> int:
    """Tokens that a slot has cells for in a cache of that kind."""
    return options.n_ctx_slot if mode.mixes else options.n_ctx_share


def open_cache(
    backend: Backend, costs: CostModel, options: EngineOptions, budget: StepBudget
) -> KVCacheManager:
    """The manager, with a disk tier if there is a folder for one. Decoder thread only; waits for the disk.
    Raises ConfigError if the folder cannot be used."""
    checkpoint_bytes = max(0, options.checkpoint_ram_bytes - backend.memory.rewind_bytes)
    checkpoints = Checkpoints(backend, checkpoint_bytes)
    table = SlotTable(
        options.n_slots,
        min_copy(options, backend.cache_plan.mode),
        options.pinned,
        room=slot_room(options, backend.cache_plan.mode),
        consecutive=not backend.cache_plan.mode.mixes,
        resumable=checkpoints.resumable,
    )
    disk_tier = None
    if options.prefix_folder is not None and options.cache_ram_bytes:
        disk_tier = DiskTier(options.prefix_folder, backend.states.key)
    kept = disk_tier.load(options.cache_ram_bytes) if disk_tier else ()
    memory_tier = MemoryTier(
        options.cache_ram_bytes, kept, disk_tier, forgets=backend.traits.forgets
    )
    n_pool = options.n_ctx if options.is_pooled else None
    return KVCacheManager(
        backend, table, memory_tier, budget, checkpoints, disk_tier=disk_tier, n_pool=n_pool
    )

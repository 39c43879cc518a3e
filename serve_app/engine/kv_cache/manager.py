"""The KV cache's manager: what happens to slots when sequences come, grow and go."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import NamedTuple

from serve_app.engine.autotune.copy_budget import CopyBudget
from serve_app.engine.backends.base import Backend, State
from serve_app.engine.kv_cache.hot_prefixes import Prefix
from serve_app.engine.kv_cache.memory_tier import MemoryTier, StoredPrefix
from serve_app.engine.kv_cache.packing import TokenArray, Tokens, packed, token_array
from serve_app.engine.kv_cache.slot import Slot
from serve_app.engine.kv_cache.slots import Choice, SlotTable, Wait
from serve_app.engine.metrics.stats import HeldPrompt
from serve_app.engine.sequence import Sequence
from serve_app.errors import DecodeError, EngineUnavailableError, InvalidRequestError

logger = logging.getLogger("corral.engine")

# Prompts by which it is known what others begin with: half a megabyte with a thousand tokens each.
_BEGUN_KEPT = 128


class Place(NamedTuple):
    """Where a sequence was put."""

    slot: Slot
    n_cached: int
    """Its first tokens that are in the slot already."""
    n_restored: int
    """Of them, those that came from the memory tier."""


class KVCacheManager:
    """Carries out in the backend what `SlotTable` decides. Decoder thread only."""

    def __init__(
        self,
        backend: Backend,
        table: SlotTable,
        memory_tier: MemoryTier,
        max_stall_s: float | None = None,
    ) -> None:
        self.table = table
        self.memory_tier = memory_tier
        self._backend = backend
        self.copies = CopyBudget(max_stall_s)
        self.begun: deque[Prefix] = deque(maxlen=_BEGUN_KEPT)
        """The last prompts that got a slot."""
        self.transferred: Counter[str] = Counter()
        """What went to other engines and came from them, by the names that `EngineStats` has for it."""

    def pin(self, n_batch: int, slot_id: int | None = None) -> None:
        """Compute what is pinned, everywhere or in one slot."""
        for slot in self.table.slots:
            if slot.pinned and slot_id in (None, slot.id):
                rows = [(token, i, slot.id, False) for i, token in enumerate(slot.idle_tokens)]
                for start in range(0, len(rows), n_batch):
                    self._backend.decode(rows[start : start + n_batch])

    @property
    def settled(self) -> bool:
        """Whether the next decode has nothing to do besides."""
        return not self._backend.unsettled

    @property
    def prompts(self) -> list[HeldPrompt]:
        """What prompts could start from: pinned, in slots, then stored; of each, what was used last first.
        Nobody changes their tokens any more."""
        slots = sorted(self.table.slots, key=lambda one: (not one.pinned, one.idle, -one.last_used))
        return [
            *(HeldPrompt(slot.group, slot.prompt) for slot in slots),
            *self.memory_tier.prompts,
        ]

    # -- coming and going -------------------------------------------------------------------------

    def place(self, sequence: Sequence) -> Place | Wait | None:
        """Put a sequence into an idle slot, with the longest prefix of its cache group there, unless it
        should wait for one that is being computed. What is lost by that is stored first.

        While others generate, what would keep them waiting for too long is neither restored nor stored;
        None if it is only too much for this step."""
        if sequence.waits is not None and self.table.lasts(sequence.waits):
            return sequence.waits
        group, tokens = sequence.request.cache_group, sequence.packed(sequence.n_reusable)
        n_stored, stored = self._restorable(group, tokens)
        choice = self.table.choose(group, tokens, n_stored)
        sequence.waits = choice if isinstance(choice, Wait) else None
        if isinstance(choice, Wait):
            return choice
        lost, restore_s = self.table.loses(choice), 0.0
        if choice.stored and stored is not None:
            restore_s = self.copies.restores.forecast_s(len(stored.state))
        save_s = self.copies.saves.forecast_s(self._n_bytes(lost))
        if self.table.streams and self.copies.can_wait(restore_s, save_s):
            return None
        if choice.stored and stored is not None:
            self.memory_tier.used(stored)
        self.store(choice.slot, lost, restore_s)
        n_cached = self._fill(choice, stored)
        if sequence.trace.admitted is None:  # one that was preempted was counted before
            self.begun.append(Prefix(group, sequence.packed_prompt))
        return Place(choice.slot, n_cached, n_cached if choice.stored else 0)

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves its slot, which keeps what others may start from."""
        slot = self.table.slots[sequence.slot_id]
        self.table.release(slot)
        if sequence.n_exact is not None:
            self._hold(slot, slot.idle_tokens[: self._keep(slot, len(slot.idle_tokens))])

    def evict_idle(self) -> bool:
        """Empty the idle slot that nobody has used for longest; False if there is none with tokens."""
        slot = self.table.least_used()
        if slot is None:
            return False
        self._empty(slot)
        return True

    def make_way(self, n_sequences: int) -> None:
        """Empty the idle slots that so many sequences will get, if the cache is unified: until then every
        row would be computed with what is there."""
        if self._backend.mode.kv_unified:
            n_empty = sum(slot.idle and not slot.idle_tokens for slot in self.table.slots)
            while n_empty < n_sequences and self.evict_idle():
                n_empty += 1

    def preempt(self, sequence: Sequence, *, stored: bool = True) -> None:
        """Take a sequence's slot away; what it has in the cache is `stored`."""
        slot = self.table.slots[sequence.slot_id]
        if stored:
            self.store(slot, slot.tokens[: slot.n_past])
        self._backend.truncate(slot.id, 0)
        sequence.preempt()
        self.table.release(slot)

    def store_now(self, slot: Slot) -> None:
        """Save what a slot has, whoever waits for that, unless the store does not want it."""
        tokens = slot.tokens[: slot.n_past]
        if self._is_worth_saving(slot, tokens):
            self.memory_tier.put(slot.group, tokens, self._save(slot, self._n_bytes(tokens)))

    def store(self, slot: Slot, tokens: TokenArray, beside_s: float = 0.0) -> None:
        """Save a slot's first tokens, unless there are none, or the store has them, or they are not really
        there yet, or streams would wait too long for it, and for `beside_s` seconds of other copies."""
        n_bytes = self._n_bytes(tokens)
        if self._is_worth_saving(slot, tokens) and self._may_save(n_bytes, beside_s):
            self.memory_tier.put(slot.group, tokens, self._save(slot, n_bytes))

    def _is_worth_saving(self, slot: Slot, tokens: TokenArray) -> bool:
        settled = slot.id not in self._backend.unsettled
        return bool(tokens and settled) and self.memory_tier.wants(
            slot.group, slot.packed(len(tokens)), self._n_bytes(tokens)
        )

    def _may_save(self, n_bytes: int, beside_s: float) -> bool:
        saves = self.copies.saves
        return not self.table.streams or (
            self.copies.allows(saves, n_bytes)
            and self.copies.fits(saves.forecast_s(n_bytes) + beside_s)
        )

    def _save(self, slot: Slot, n_bytes: int) -> State:
        with self.copies.making(self.copies.saves, n_bytes):
            return self._backend.save(slot.id)

    def _n_bytes(self, tokens: TokenArray) -> int:
        """Of the state that so many tokens have."""
        return len(tokens) * self._backend.memory.cache_bytes_per_token

    def _restorable(self, group: str, prompt: bytes) -> tuple[int, StoredPrefix | None]:
        """See `MemoryTier.longest`; nothing if streams would wait too long for it."""
        n_stored, stored = self.memory_tier.longest(group, prompt)
        if stored is None or not self.table.streams:
            return n_stored, stored
        may_wait = self.copies.allows(self.copies.restores, len(stored.state))
        return (n_stored, stored) if may_wait else (0, None)

    def would_keep(self, sequence: Sequence) -> tuple[int, float]:
        """Of the tokens that a running sequence has in the cache, how many would be stored if it lost its
        slot now, and the seconds that this would take."""
        slot = self.table.slots[sequence.slot_id]
        n_bytes = slot.n_past * self._backend.memory.cache_bytes_per_token
        if slot.id in self._backend.unsettled or not self.memory_tier.fits(n_bytes):
            return 0, 0.0
        return slot.n_past, self.copies.saves.forecast_s(n_bytes)

    @property
    def behind(self) -> Slot | None:
        """The idle slot used last of those that could be stored without another prefix giving way."""
        per_token = self._backend.memory.cache_bytes_per_token
        for slot in sorted(self.table.slots, key=lambda slot: -slot.last_used):
            n_bytes = len(slot.idle_tokens) * per_token
            free = slot.idle and slot.idle_tokens and slot.id not in self._backend.unsettled
            if (
                free
                and self.memory_tier.has_room(n_bytes)
                and self.memory_tier.wants(slot.group, slot.packed(slot.n_past), n_bytes)
            ):
                return slot
        return None

    def store_ahead(self) -> None:
        """Save what one idle slot has, so that it need not be when somebody wants the slot."""
        slot = self.behind
        if slot is not None:
            self.store(slot, slot.idle_tokens)

    def store_all(self) -> None:
        """Save what every idle slot has, the least used first."""
        for slot in sorted(self.table.slots, key=lambda slot: slot.last_used):
            if slot.idle:
                self.store(slot, slot.idle_tokens)

    # -- when somebody asks -----------------------------------------------------------------------

    def save(self, slot_id: int) -> StoredPrefix:
        """What an idle slot has. Raises InvalidRequestError, EngineUnavailableError like all of these."""
        slot = self._at_rest(slot_id)
        return StoredPrefix(slot.idle_tokens, self._backend.save(slot.id), slot.group)

    def restore(self, slot_id: int, prefix: StoredPrefix) -> None:
        """Have a prefix in an idle slot, for the cache group that it was saved of; what is lost by that is
        stored first."""
        slot = self._at_rest(slot_id)
        self.erase(slot_id)
        try:
            self._backend.restore(slot.id, prefix.state)
        except DecodeError as error:
            raise InvalidRequestError(f"The slot cannot be filled: {error}", "filename") from error
        slot.group = prefix.group
        self._hold(slot, prefix.tokens)

    def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns the tokens that it had. The memory tier may have them still."""
        slot = self._at_rest(slot_id)
        n_tokens = len(slot.idle_tokens)
        self._empty(slot)
        return n_tokens

    # -- for other engines ------------------------------------------------------------------------

    @property
    def held(self) -> list[tuple[HeldPrompt, int]]:
        """What prompts could start from now, and the bytes of its state, saved or not."""
        per_token = self._backend.memory.cache_bytes_per_token
        return [
            *(
                (HeldPrompt(one.group, one.tokens[: one.n_past]), one.n_past * per_token)
                for one in self.table.slots
            ),
            *((HeldPrompt(one.group, one.tokens), len(one.state)) for one in self.memory_tier),
        ]

    def export_prefix(
        self, group: str, tokens: Tokens, most_s: float | None
    ) -> StoredPrefix | None:
        """The cache group's shortest prefix that begins with these tokens. None if there is none any more,
        or if saving it would probably keep running sequences waiting for longer than that."""
        slots = [
            one
            for one in self.table.having(group, packed(tokens))
            if one.group == group and one.id not in self._backend.unsettled
        ]
        found = self.memory_tier.beginning(group, tokens)
        slot = min(slots, key=lambda one: one.n_past, default=None)
        if slot is not None and (found is None or slot.n_past < len(found.tokens)):
            most_s = most_s if self.table.busy else None
            found = self._saved(slot, most_s) or found
        if found is not None:
            self.transferred["sent_prefixes"] += 1
            self.transferred["sent_bytes"] += len(found.state)
        return found

    def _saved(self, slot: Slot, most_s: float | None) -> StoredPrefix | None:
        """What a slot has, unless that would take too long."""
        n_bytes = slot.n_past * self._backend.memory.cache_bytes_per_token
        if most_s is not None and self.copies.saves.forecast_s(n_bytes) > most_s:
            return None
        return StoredPrefix(slot.tokens[: slot.n_past], self._save(slot, n_bytes), slot.group)

    def import_prefix(self, prefix: StoredPrefix, n_wanted: int) -> StoredPrefix | None:
        """Store another engine's prefix for its cache group; returns what is stored, None if the store does
        not want it. If a slot is empty and nobody runs, what is behind the first `n_wanted` tokens is cut
        off. Raises DecodeError if the backend refuses the state then; else that shows when it is needed."""
        empty = [
            slot
            for slot in self.table.slots
            if slot.idle and not slot.idle_tokens and slot.id not in self._backend.unsettled
        ]
        if n_wanted < len(prefix.tokens) and empty and not self.table.busy:
            prefix = self._cut(empty[0], prefix, n_wanted)
        if not self.memory_tier.wants(prefix.group, prefix.tokens, len(prefix.state)):
            return None
        self.memory_tier.put(prefix.group, prefix.tokens, prefix.state)
        self.transferred["received_prefixes"] += 1
        self.transferred["received_bytes"] += len(prefix.state)
        return prefix

    def _cut(self, slot: Slot, prefix: StoredPrefix, n_wanted: int) -> StoredPrefix:
        """Its first tokens, by way of an empty slot; all if the model's memory cannot be cut there."""
        self._backend.restore(slot.id, prefix.state)
        n_kept = self._keep(slot, n_wanted)
        if n_kept:
            state = self._backend.save(slot.id)
            prefix = StoredPrefix(prefix.tokens[:n_kept], state, prefix.group)
            self._backend.truncate(slot.id, 0)
        return prefix

    def _at_rest(self, slot_id: int) -> Slot:
        slots = self.table.slots
        if slot_id not in range(len(slots)) or slots[slot_id].pinned:
            raise InvalidRequestError(f"There is no slot {slot_id}.", "id_slot")
        if not slots[slot_id].idle or slot_id in self._backend.unsettled:
            raise EngineUnavailableError(f"Slot {slot_id} is busy.")
        return slots[slot_id]

    # -- in a slot --------------------------------------------------------------------------------

    def _empty(self, slot: Slot) -> None:
        """Store what an idle slot has, and drop it."""
        self.store(slot, slot.idle_tokens)
        self._backend.truncate(slot.id, 0)
        slot.n_shared = 0
        self._hold(slot, token_array())

    def _hold(self, slot: Slot, tokens: TokenArray) -> None:
        """These are what an idle slot has now."""
        slot.idle_tokens = tokens
        self.table.index.tell(slot)

    def shift(self, sequence: Sequence, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens behind a sequence's first `n_keep`. If the backend cannot move the rest
        up, all is to be computed again."""
        slot = self.table.slots[sequence.slot_id]
        try:
            if slot.id in self._backend.unsettled:
                raise DecodeError("The slot is still to be written.")
            self._backend.shift(slot.id, n_keep, n_discard)
        except DecodeError:
            self._backend.truncate(slot.id, 0)
            sequence.shift(n_keep, n_discard, cached=False)
            self.table.index.tell(slot)
            return
        slot.n_shared = 0
        sequence.shift(n_keep, n_discard, cached=True)
        self.table.index.tell(slot)

    def _fill(self, choice: Choice, stored: StoredPrefix | None) -> int:
        """Have the chosen prefix in the chosen slot, and nothing else; returns its tokens."""
        slot = choice.slot
        slot.n_shared = min(slot.n_shared, choice.n_cached) if choice.in_place else 0
        if choice.stored and stored is not None:
            if slot.id in self._backend.unsettled:  # a copy would be of what is written now
                return self._keep(slot, 0)
            try:
                with self.copies.making(self.copies.restores, len(stored.state)):
                    self._backend.restore(slot.id, stored.state)
            except DecodeError as error:
                logger.warning("A stored prefix is computed again: %s", error)
                return self._keep(slot, 0)
        elif choice.copy_from is not None:
            self._backend.copy(choice.copy_from.id, slot.id)
            slot.n_shared = choice.n_cached
        return self._keep(slot, choice.n_cached)

    def _keep(self, slot: Slot, n_cached: int) -> int:
        """Drop all but the slot's first `n_cached` tokens, or all of them if the model's memory
        cannot be cut there; returns how many it kept."""
        try:
            self._backend.truncate(slot.id, n_cached)
        except DecodeError:
            self._backend.truncate(slot.id, 0)
            return 0
        return n_cached

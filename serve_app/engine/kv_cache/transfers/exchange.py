"""Sends prefixes of one engine's cache to others, and takes theirs."""

from __future__ import annotations

from collections import Counter, deque

from serve_app.engine.autotune.copy_budget import CopyBudget
from serve_app.engine.backends.base import Backend
from serve_app.engine.kv_cache.contents import SlotContents
from serve_app.engine.kv_cache.memory_tier import MemoryTier, StoredPrefix
from serve_app.engine.kv_cache.packing import Tokens, packed
from serve_app.engine.kv_cache.slot import Slot
from serve_app.engine.kv_cache.slots import SlotTable
from serve_app.engine.kv_cache.transfers.hot_prefixes import Prefix
from serve_app.engine.metrics.stats import CachedPrompt

# Prompts by which it is known what others begin with: half a megabyte with a thousand tokens each.
_BEGUN_KEPT = 128


class PrefixExchange:
    """Exports what slots and the memory tier have, and imports into that tier. Decoder thread only."""

    def __init__(
        self,
        backend: Backend,
        table: SlotTable,
        memory_tier: MemoryTier,
        contents: SlotContents,
        copies: CopyBudget,
    ) -> None:
        self._backend = backend
        self._table = table
        self._memory_tier = memory_tier
        self._contents = contents
        self._copies = copies
        self.begun: deque[Prefix] = deque(maxlen=_BEGUN_KEPT)
        """The last prompts that got a slot."""
        self.transferred: Counter[str] = Counter()
        """The amounts sent to other engines and received from them, by the names of
        `EngineStats`."""

    @property
    def held(self) -> list[tuple[CachedPrompt, int]]:
        """The prefixes that prompts could start from now, each with the bytes of its state, saved
        or not."""
        return [
            *(
                (
                    CachedPrompt(holder.group, holder.tokens[: holder.n_past]),
                    self._contents.n_bytes(holder, holder.n_past),
                )
                for holder in self._table.slots
            ),
            *(
                (CachedPrompt(holder.group, holder.tokens), holder.n_bytes)
                for holder in self._memory_tier
            ),
        ]

    def export_prefix(
        self, group: str, tokens: Tokens, most_s: float | None
    ) -> StoredPrefix | None:
        """The cache group's shortest prefix that begins with these tokens. None if there is none any
        more, or if saving it would probably keep running sequences waiting for longer than that."""
        slots = [
            slot
            for slot in self._table.having(group, packed(tokens))
            if slot.group == group and slot.id not in self._backend.slots_with_pending_copy
        ]
        stored = self._memory_tier.beginning(group, tokens)
        slot = min(slots, key=lambda slot: slot.n_past, default=None)
        if slot is not None and (stored is None or slot.n_past < len(stored.tokens)):
            most_s = most_s if self._table.busy else None
            stored = self._saved(slot, most_s) or stored
        if stored is not None:
            self.transferred["sent_prefixes"] += 1
            self.transferred["sent_bytes"] += stored.n_bytes
        return stored

    def _saved(self, slot: Slot, most_s: float | None) -> StoredPrefix | None:
        """The saved prefix of a slot, unless saving would take too long."""
        n_bytes = self._backend.memory.state_bytes(slot.n_past)
        if most_s is not None and self._copies.saves.forecast_s(n_bytes) > most_s:
            return None
        return self._contents.save(slot, slot.tokens[: slot.n_past])

    def import_prefix(self, prefix: StoredPrefix, n_wanted: int) -> StoredPrefix | None:
        """Store another engine's prefix for its cache group; returns what is stored, None if the
        store does not want it. If a slot is empty and nobody runs, what is behind the first
        `n_wanted` tokens is cut off. Raises DecodeError if the backend refuses the state then; else
        that shows when it is needed."""
        empty = [
            slot
            for slot in self._table.slots
            if slot.idle
            and not slot.idle_tokens
            and slot.id not in self._backend.slots_with_pending_copy
        ]
        fits = n_wanted < len(prefix.tokens) <= self._table.room
        if fits and empty and not self._table.busy:
            prefix = self._cut(empty[0], prefix, n_wanted)
        if not self._memory_tier.wants(prefix.group, prefix.tokens, prefix.n_bytes):
            return None
        self._memory_tier.put(prefix.group, prefix.tokens, prefix.state, prefix.checkpoints)
        self.transferred["received_prefixes"] += 1
        self.transferred["received_bytes"] += prefix.n_bytes
        return prefix

    def _cut(self, slot: Slot, prefix: StoredPrefix, n_wanted: int) -> StoredPrefix:
        """The first tokens of a prefix, by way of an empty slot: up to its last checkpoint if the
        model's memory cannot be cut there, or all if it has none."""
        self._contents.restore(slot, prefix)
        n_kept = self._contents.keep(slot, n_wanted)
        if n_kept:
            state, marks = (
                self._backend.states.save(slot.id),
                self._contents.checkpoints.of(slot.id),
            )
            prefix = StoredPrefix(prefix.tokens[:n_kept], state, prefix.group, marks)
            self._contents.keep(slot, 0)
        return prefix

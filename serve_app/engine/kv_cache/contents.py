"""Puts the slots' tokens into the backend's cache."""

from __future__ import annotations

import logging

from serve_app.engine.autotune.copy_budget import CopyBudget
from serve_app.engine.backends.base import Backend
from serve_app.engine.kv_cache.checkpoints import Checkpoints
from serve_app.engine.kv_cache.memory_tier import StoredPrefix
from serve_app.engine.kv_cache.packing import TokenArray
from serve_app.engine.kv_cache.slot import Slot
from serve_app.engine.kv_cache.slots import SlotChoice
from serve_app.errors import DecodeError

logger = logging.getLogger("corral.engine")


class SlotContents:
    """Saves, fills and cuts slots, each with its checkpoints. Decoder thread only."""

    def __init__(self, backend: Backend, checkpoints: Checkpoints, copies: CopyBudget) -> None:
        self.checkpoints = checkpoints
        self._backend = backend
        self._copies = copies

    def n_bytes(self, slot: Slot, n_tokens: int) -> int:
        """The bytes that storing a slot with so many tokens would take."""
        marks = sum(len(one.state) for one in self.checkpoints.of(slot.id))
        return self._backend.memory.state_bytes(n_tokens) + marks

    def save(self, slot: Slot, tokens: TokenArray, *, cancellable: bool = False) -> StoredPrefix:
        """All that a slot has: these tokens. For `cancellable`, see `Backend.save`."""
        memory = self._backend.memory
        with self._copies.making(self._copies.saves, memory.state_bytes(len(tokens))):
            state = self._backend.states.save(slot.id, cancellable=cancellable)
        return StoredPrefix(tokens, state, slot.group, self.checkpoints.of(slot.id))

    def restore(self, slot: Slot, prefix: StoredPrefix) -> None:
        """Have a prefix in a slot, whatever it had. Raises DecodeError if the backend does not take it; the
        slot is then in no known state."""
        with self._copies.making(self._copies.restores, len(prefix.state)):
            self._backend.states.restore(slot.id, prefix.state)
        self.checkpoints.give(slot.id, prefix.checkpoints)

    def fill(self, choice: SlotChoice, stored: StoredPrefix | None) -> int:
        """Have the chosen prefix in the chosen slot, and nothing else; returns its tokens."""
        slot = choice.slot
        slot.n_shared = min(slot.n_shared, choice.n_cached) if choice.in_place else 0
        try:
            if choice.stored and stored is not None:
                # A copy would have the state after the next decode.
                if slot.id in self._backend.slots_with_pending_copy:
                    return self.keep(slot, 0)
                self.restore(slot, stored)
            elif choice.copy_from is not None:
                self._copy(choice.copy_from, slot, choice.n_cached)
        except DecodeError as error:
            logger.warning("A prefix is computed again: %s", error)
            return self.keep(slot, 0)
        return self.keep(slot, choice.n_cached)

    def _copy(self, source: Slot, slot: Slot, n_cached: int) -> None:
        """Have what another slot has. Raises DecodeError."""
        unified = self._backend.setup.mode.kv_unified
        pending = self._backend.slots_with_pending_copy
        if self.checkpoints.needed and n_cached < source.n_past and not unified:
            # Otherwise, the next decode would copy over what a checkpoint puts back.
            if not pending.isdisjoint((source.id, slot.id)):
                raise DecodeError("The slot is still to be written.")
            self._backend.states.restore(slot.id, self._backend.states.save(source.id))
        else:
            self._backend.copy(source.id, slot.id)
        slot.n_shared = n_cached
        self.checkpoints.give(slot.id, self.checkpoints.of(source.id))

    def keep(self, slot: Slot, n_most: int) -> int:
        """Drop all but the slot's first `n_most` tokens, or more where the model's memory cannot be cut
        there: back to a checkpoint, or all. Returns how many it kept."""
        n_kept = self._cut(slot, n_most)
        self.checkpoints.cut(slot.id, n_kept)
        return n_kept

    def _cut(self, slot: Slot, n_most: int) -> int:
        try:
            self._backend.truncate(slot.id, n_most)
            return n_most
        except DecodeError:
            checkpoint = self.checkpoints.deepest(slot.id, n_most)
        if checkpoint is not None and slot.id not in self._backend.slots_with_pending_copy:
            try:
                with self._copies.making(self._copies.restores, len(checkpoint.state)):
                    self._backend.states.rewind(slot.id, checkpoint.state, checkpoint.n_tokens)
                self.checkpoints.used(slot.id, checkpoint)
                return checkpoint.n_tokens
            except DecodeError as error:
                logger.warning("A checkpoint is of no use: %s", error)
        self._backend.truncate(slot.id, 0)
        return 0

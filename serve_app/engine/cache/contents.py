"""Checkpoints: what layers with a window, or recurrent ones, had of a slot at some of its lengths.

A slot of such a model cannot be cut where a prompt leaves what it holds. It goes back to its deepest
checkpoint before that, and computes the rest. They are made at the end of a prompt, where the next turn
begins. They are also made where a prompt leaves what others began with, as more will (Pan et al.,
"Marconi: Prefix Caching for the Era of Hybrid LLMs", 2024); where a slot's tokens are continued; and
every few thousand tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from serve_app.base.errors import DecodeError
from serve_app.base.formats import State
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.packing import TokenArray, pack
from serve_app.engine.cache.prefixes import Prefix
from serve_app.engine.cache.slots import Slot, SlotChoice
from serve_app.engine.costs.copy_budget import CopyBudget

# A template may end a prompt in another way once its answer is there: so many tokens before, it will not.
_BEFORE_END = 8
# Fewer tokens than this are computed again rather than kept.
_LEAST = 32
# The longest way without one.
_BLOCK = 2048
CHECKPOINTS_OF_SLOT = 3

logger = logging.getLogger("corral.engine")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Good for a slot that has the tokens that it was made of."""

    n_tokens: int
    """First ones that the slot had then, and no others."""
    state: State


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Tokens, and what a backend needs to have them in a slot again."""

    tokens: TokenArray
    state: State
    group: str
    """The cache group of the prompts that may start from it."""
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def key(self) -> Prefix:
        """The tokens, packed, with their cache group."""
        return Prefix(self.group, pack(self.tokens))

    @property
    def n_bytes(self) -> int:
        """The size of everything but the tokens."""
        return len(self.state) + sum(len(one.state) for one in self.checkpoints)


def deepest(checkpoints: Iterable[Checkpoint], n_most: int) -> Checkpoint | None:
    """The one with most tokens, but no more than that."""
    fitting = (one for one in checkpoints if one.n_tokens <= n_most)
    return max(fitting, key=lambda one: one.n_tokens, default=None)


class Checkpoints:
    """The checkpoints of all slots: three each at most, and `budget_bytes` in all, where those used last
    stay. None are needed if the backend does not forget. Decoder thread only."""

    def __init__(self, backend: Backend, budget_bytes: int = 0) -> None:
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._kept = OrderedDict[tuple[int, int], Checkpoint]()
        """The checkpoints by slot and length, the least recently used first."""
        self.n_bytes = 0
        """The size of all checkpoints, as if none were shared."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_needed(self) -> bool:
        """Whether slots cannot be cut anywhere."""
        return self._backend.traits.forgets

    def of(self, slot_id: int) -> tuple[Checkpoint, ...]:
        """A slot's, the shortest first."""
        found = (one for (owner, _), one in self._kept.items() if owner == slot_id)
        return tuple(sorted(found, key=lambda one: one.n_tokens))

    def deepest(self, slot_id: int, n_most: int) -> Checkpoint | None:
        """The slot's longest with no more than that many tokens."""
        return deepest(self.of(slot_id), n_most)

    def resumable(self, slot: Slot, n_shared: int, in_place: bool) -> int:
        """The number of first tokens that a prompt could start from, in a slot or in a copy. They are
        those that it shares with the slot's tokens in the cache."""
        if not (self.is_needed and n_shared):
            return n_shared
        sequence = slot.sequence
        n_held = len(slot.idle_tokens) if sequence is None else sequence.n_past
        if n_shared == n_held or (in_place and self._backend.can_cut(slot.id, n_shared)):
            return n_shared
        if slot.id in self._backend.slots_with_pending_copy:
            return 0
        found = self.deepest(slot.id, n_shared)
        return 0 if found is None else found.n_tokens

    def stops(self, n_cached: int, n_known: int, n_tokens: int) -> tuple[int, ...]:
        """The places for checkpoints in a prompt of `n_tokens` whose first `n_cached` are in the slot,
        and of which others have had `n_known`."""
        stops, last = [], n_cached
        for stop in (
            (n_known, n_tokens - _BEFORE_END) if self.is_needed and self._budget_bytes else ()
        ):
            if last + _LEAST <= stop <= n_tokens - _BEFORE_END:
                stops.append(stop)
                last = stop
        return tuple(stops)

    def is_due(self, slot: Slot, n_past: int, stops: Iterable[int]) -> bool:
        """Whether to make one of a slot that has so many tokens now."""
        n_since = self._n_since(slot, n_past)
        return n_since > 0 and (n_past in stops or n_since >= _BLOCK)

    def is_worth(self, slot: Slot, n_past: int) -> bool:
        """Whether one would save something where a slot is left that has so many tokens."""
        return self._n_since(slot, n_past) >= _LEAST

    def _n_since(self, slot: Slot, n_past: int) -> int:
        """The tokens behind the slot's deepest checkpoint; 0 if none are made."""
        if not (self.is_needed and self._budget_bytes):
            return 0
        found = self.deepest(slot.id, n_past)
        return n_past - (found.n_tokens if found else 0)

    def make(self, slot_id: int, n_tokens: int) -> None:
        """Keep what a slot is now, with so many tokens. It must be settled."""
        self._add(slot_id, Checkpoint(n_tokens, self._backend.states.checkpoint(slot_id)))
        self._trim()

    def give(self, slot_id: int, checkpoints: Iterable[Checkpoint]) -> None:
        """A slot has what they were made of now, and no others."""
        self.cut(slot_id, 0)
        if self.is_needed:
            for one in checkpoints:
                self._add(slot_id, one)
            self._trim()

    def cut(self, slot_id: int, n_tokens: int) -> None:
        """A slot has but its first tokens now."""
        for one in self.of(slot_id):
            if one.n_tokens > n_tokens:
                self._drop(slot_id, one)

    def used(self, slot_id: int, checkpoint: Checkpoint) -> None:
        self._kept.move_to_end((slot_id, checkpoint.n_tokens))

    def _add(self, slot_id: int, new: Checkpoint) -> None:
        old = self._kept.get((slot_id, new.n_tokens))
        if old is not None:
            self._drop(slot_id, old)
        self._kept[slot_id, new.n_tokens] = new
        self.n_bytes += len(new.state)
        of_slot = self.of(slot_id)
        if len(of_slot) > CHECKPOINTS_OF_SLOT:
            self._drop(slot_id, _least_missed(of_slot))

    def _trim(self) -> None:
        while self.n_bytes > self._budget_bytes:
            (slot_id, _), oldest = next(iter(self._kept.items()))
            self._drop(slot_id, oldest)

    def _drop(self, slot_id: int, checkpoint: Checkpoint) -> None:
        del self._kept[slot_id, checkpoint.n_tokens]
        self.n_bytes -= len(checkpoint.state)


def _least_missed(checkpoints: tuple[Checkpoint, ...]) -> Checkpoint:
    """The checkpoint without which the way to the next is shortest; not the deepest."""
    if len(checkpoints) == 1:
        return checkpoints[0]
    ends = (0, *(one.n_tokens for one in checkpoints))
    gaps = [end - begin for begin, end in pairwise(ends)]
    return min(zip(gaps[:-1], checkpoints, strict=False), key=lambda one: one[0])[1]


@dataclass(frozen=True, slots=True, eq=False)
class SlotContents:
    """Saves, fills and cuts slots, each with its checkpoints. Decoder thread only."""

    _backend: Backend
    checkpoints: Checkpoints
    _copies: CopyBudget

    def n_bytes(self, slot: Slot, n_tokens: int) -> int:
        """The bytes that storing a slot with so many tokens would take."""
        marks = sum(len(one.state) for one in self.checkpoints.of(slot.id))
        return self._backend.memory.state_bytes(n_tokens) + marks

    def save(
        self, slot: Slot, tokens: TokenArray, group: str | None = None, *, cancellable: bool = False
    ) -> StoredPrefix:
        """Save all that a slot has: these tokens, of its own cache group or another one. A `cancellable`
        save raises DecodeCancelledError as `StateSupport.save` does."""
        memory = self._backend.memory
        with self._copies.making(self._copies.saves, memory.state_bytes(len(tokens))):
            state = self._backend.states.save(slot.id, cancellable=cancellable)
        group = slot.group if group is None else group
        return StoredPrefix(tokens, state, group, self.checkpoints.of(slot.id))

    def whole(self, prefix: StoredPrefix) -> StoredPrefix:
        """The prefix with all of its bytes, for other engines and files."""
        return replace(prefix, state=self._backend.states.whole(prefix.state))

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
        unified = self._backend.cache_plan.mode.kv_unified
        pending = self._backend.slots_with_pending_copy
        if self.checkpoints.is_needed and n_cached < source.n_past and not unified:
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

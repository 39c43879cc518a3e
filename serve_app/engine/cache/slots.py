"""Slots, and the slot table, which chooses the slot and the cached prefix that a new prompt starts from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from serve_app.base.values.adapters import SHARED_GROUP, adapters_of, may_start_from
from serve_app.engine.cache.packing import (
    TOKEN_BYTES,
    TokenArray,
    Tokens,
    n_matching,
    n_tokens,
    pack,
    token_array,
)
from serve_app.engine.core.sequence import Sequence, SequenceState


@dataclass(slots=True)
class Slot:
    """A `seq_id` of the shared context: what llama.cpp calls a sequence. It outlives the engine's sequences
    and keeps their cached tokens."""

    id: int
    idle_tokens: TokenArray = field(default_factory=token_array)
    """The cached tokens of an idle slot. Nobody changes this array: other tokens are another one."""
    sequence: Sequence | None = None
    pinned: bool = False
    """Whether it only keeps `idle_tokens`, for others to copy."""
    n_shared: int = 0
    """First tokens whose cells are another slot's too, in a unified cache, or would be in one."""
    last_used: int = 0
    """Counts releases: the smallest is the least recently used; 0 was never used."""
    group: str = ""
    spare: bool = False
    """Whether a request in the background left `idle_tokens`: nobody is likely to go on from there."""
    _packed: tuple[TokenArray | None, bytes] = field(default=(None, b""), compare=False)

    @property
    def idle(self) -> bool:
        """Whether it could take a sequence."""
        return self.sequence is None and not self.pinned

    @property
    def in_background(self) -> bool:
        """Whether it has a sequence for which nobody waits."""
        return self.sequence is not None and self.sequence.request.background

    @property
    def tokens(self) -> TokenArray:
        """The tokens that other sequences may start from: those of its sequence, cached or not yet, up to
        a context shift. While it is idle, those in the cache."""
        if self.sequence is None:
            return self.idle_tokens
        tokens, n_exact = self.sequence.tokens, self.sequence.n_exact
        return tokens if n_exact is None else tokens[:n_exact]

    @property
    def source(self) -> TokenArray:
        """The array that `tokens` are in, from the first one on. It only grows."""
        return self.idle_tokens if self.sequence is None else self.sequence.tokens

    def packed_tokens(self, n_wanted: int) -> bytes:
        """The first `n_wanted` tokens of `tokens`, packed."""
        if self.sequence is not None:
            return self.sequence.packed_tokens(n_wanted)
        if self._packed[0] is not self.idle_tokens:
            self._packed = self.idle_tokens, pack(self.idle_tokens)
        return self._packed[1][: n_wanted * TOKEN_BYTES]

    def occupy(self, sequence: Sequence) -> None:
        """Take a sequence, and what that needs of its idle tokens."""
        self.sequence, self.group = sequence, sequence.request.content_group
        self.idle_tokens, self._packed = token_array(), (None, b"")

    def release(self) -> None:
        """Lose the sequence, and keep what that has in the cache."""
        n_past, sequence = self.n_past, self.sequence
        self.spare = self.in_background
        kept = self.packed_tokens(n_past)
        self.idle_tokens = token_array()
        if sequence is not None and n_past:
            self.idle_tokens = sequence.give_up(n_past)
        self.sequence, self._packed = None, (self.idle_tokens, kept)

    @property
    def n_tokens(self) -> int:
        if self.sequence is None or self.sequence.n_exact is None:
            return len(self.source)
        return min(self.sequence.n_exact, len(self.source))

    @property
    def prompt(self) -> SequenceOf[int]:
        """The tokens without what a running sequence has generated. Nobody changes it any more."""
        if self.sequence is None:
            return self.idle_tokens
        prompt, n_exact = self.sequence.request.prompt, self.sequence.n_exact
        return prompt if n_exact is None else prompt[:n_exact]

    @property
    def n_past(self) -> int:
        """How many of `tokens` are in the cache."""
        if self.sequence is None:
            return len(self.idle_tokens)
        n_exact = self.sequence.n_exact
        return self.sequence.n_past if n_exact is None else min(n_exact, self.sequence.n_past)

    def serves(self, group: str) -> bool:
        """Whether prompts of that cache group may start from its tokens."""
        return may_start_from(group, self.group)

    def n_shared_with(self, prompt: bytes, n_most: int) -> int:
        """How many of `tokens`, from the first one on, are those of a packed prompt, `n_most` at most."""
        n_most = min(n_most, self.n_tokens)
        if self.sequence is not None:
            return self.sequence.n_shared_with(prompt, n_most)
        return n_matching(
            self.packed_tokens(len(self.idle_tokens)), prompt, 0, n_most * TOKEN_BYTES
        )


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The point where a prompt starts."""

    slot: Slot
    n_cached: int
    """First tokens of the prompt that need not be computed."""
    copy_from: Slot | None = None
    """The slot to copy them from; None if they are in `slot` already, or stored."""
    stored: bool = False
    """Whether they come from outside the slots."""
    n_known: int = field(default=0, compare=False)
    """First tokens of the prompt that slots have, or will have, even if it cannot start from there."""

    @property
    def in_place(self) -> bool:
        """Whether the slot has them already."""
        return self.copy_from is None and not self.stored


@dataclass(frozen=True, slots=True)
class PrefixPending:
    """A prompt should start later."""

    slot: Slot
    """The slot where its prefix is being computed."""
    n_tokens: int
    """How long that will be."""
    sequence: Sequence | None = field(default=None, compare=False)


Resumable = Callable[[Slot, int, bool], int]
"""The number of shared first tokens that a prompt could start from: in that slot (True) or in a copy."""


class SlotTable:
    """All slots of one context, the pinned ones last. From `min_copy` tokens on, copying a slot is
    cheaper than computing them. With `consecutive`, busy slots should be next to each other.
    `resumable` says where prompts can start: by default wherever they leave what a slot has."""

    def __init__(
        self,
        n_slots: int,
        min_copy: int,
        pinned: tuple[tuple[int, ...], ...] = (),
        *,
        room: int = sys.maxsize,
        consecutive: bool = False,
        resumable: Resumable = lambda slot, n_shared, in_place: n_shared,
    ) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self.slots += [
            Slot(n_slots + i, token_array(tokens), pinned=True, group=SHARED_GROUP)
            for i, tokens in enumerate(pinned)
        ]
        self.room = room
        """Tokens that a slot has cells for, in the kind of cache that is there."""
        self._min_copy = min_copy
        self._resumable = resumable
        self._consecutive = consecutive
        self._clock = 0

    def begin(self, min_copy: int, room: int, *, consecutive: bool) -> None:
        """Note that another kind of cache is there, with nothing but what is pinned. No slot has a
        sequence."""
        self._min_copy, self.room, self._consecutive = min_copy, room, consecutive
        for slot in self.slots:
            slot.n_shared = 0
            if not slot.pinned:
                slot.idle_tokens = token_array()

    # -- what is there ----------------------------------------------------------------------------

    def shared_lengths(self, group: str, prompt: bytes, n_most: int) -> list[int]:
        """How many of the first `n_most` tokens of a group's prompt each slot has, or will have."""
        return [
            slot.n_shared_with(prompt, n_most) if slot.serves(group) else 0 for slot in self.slots
        ]

    @property
    def n_idle(self) -> int:
        return sum(slot.idle for slot in self.slots)

    @property
    def busy(self) -> bool:
        return any(slot.sequence is not None for slot in self.slots)

    @property
    def streams(self) -> bool:
        """Whether some sequence generates, and somebody waits for its next token."""
        sequences = (slot.sequence for slot in self.slots)
        return any(
            one.state is SequenceState.DECODE and not one.request.background
            for one in sequences
            if one is not None
        )

    @property
    def n_cells(self) -> int:
        """Cells that are in use if the cache is unified, or would be: what slots share counts once."""
        return sum(slot.n_past - min(slot.n_shared, slot.n_past) for slot in self.slots)

    def n_tokens_of(self, slots: Iterable[Slot]) -> int:
        """The tokens that busy slots have and are to have, if what slots share counts once."""
        return sum(max(0, len(slot.source) - slot.n_shared) for slot in slots)

    def n_shared_with(self, slots: Iterable[Slot], sequence: Sequence) -> int:
        """The most first tokens of a waiting sequence that one of these slots has, or will have."""
        prompt = sequence.packed_tokens(sequence.n_reusable)
        shared = self.shared_lengths(sequence.request.content_group, prompt, n_tokens(prompt))
        return max((shared[slot.id] for slot in slots), default=0)

    def slot_ends(self) -> dict[int, int]:
        """The cached tokens of slots that have room for one more and could drop it again."""
        ends = {
            slot.id: len(slot.idle_tokens) if slot.sequence is None else slot.sequence.n_past
            for slot in self.slots
            if slot.sequence is None or not slot.sequence.within_span
        }
        return {slot_id: end for slot_id, end in ends.items() if end < self.room}

    def choose(
        self,
        group: str,
        prompt: Tokens,
        n_stored: int = 0,
        slot_id: int = -1,
        *,
        background: bool = False,
    ) -> SlotChoice | PrefixPending:
        """The place to start a prompt at now, or that it should wait for a prefix that is being
        computed. Its first `n_stored` tokens can also be had from outside the slots. Slots of other
        cache groups count as empty.

        An idle slot that holds the longest prefix is used in place, but only if that is at least half of
        what it holds. A few shared first tokens are not worth somebody's conversation. A prefix that
        another slot, idle or busy, holds is copied into an idle slot, and so is one that is stored. A
        split cache computes consecutive slots together. So there, that is the slot next to most busy ones
        of the same adapters, or else the least recently used. The slot with the id `slot_id` is the one,
        if it is idle. At least the prompt's last token is left to decode. There must be an idle slot. Only
        in the `background` a prompt waits for what is computed there.
        """
        prompt = pack(prompt)
        n_most = n_tokens(prompt) - 1
        shared = self.shared_lengths(group, prompt, n_most)
        cached = [min(n, slot.n_past) for n, slot in zip(shared, self.slots, strict=True)]
        here, ready = self._ready(cached, in_place=True), self._ready(cached, in_place=False)
        coming = [
            n if n > slot.n_past and (background or not slot.in_background) else 0
            for n, slot in zip(shared, self.slots, strict=True)
        ]
        idle = [slot for slot in self.slots if slot.idle]
        idle = [slot for slot in idle if slot.id == slot_id] or idle
        fits = self._fitting(group)
        worth = {
            slot.id: here[slot.id] if 2 * here[slot.id] >= len(slot.idle_tokens) else 0
            for slot in idle
        }
        in_place = max(idle, key=lambda slot: (worth[slot.id], *fits(slot)))
        source = max(self.slots, key=lambda slot: ready[slot.id])
        best = max(here[in_place.id], ready[source.id])
        comer = max(self.slots, key=lambda slot: coming[slot.id])
        if coming[comer.id] - max(best, n_stored) >= self._min_copy:
            return PrefixPending(comer, coming[comer.id], comer.sequence)
        n_known = max(shared)
        if n_stored - best >= self._min_copy:
            return SlotChoice(max(idle, key=fits), n_stored, stored=True, n_known=n_known)
        others = [slot for slot in idle if slot is not source]
        if ready[source.id] - here[in_place.id] >= self._min_copy and others:
            slot = max(others, key=fits)
            return SlotChoice(slot, ready[source.id], copy_from=source, n_known=n_known)
        return SlotChoice(in_place, here[in_place.id], n_known=n_known)

    def _ready(self, cached: list[int], *, in_place: bool) -> list[int]:
        return [
            self._resumable(slot, n, in_place) for n, slot in zip(cached, self.slots, strict=True)
        ]

    def lasts(self, wait: PrefixPending) -> bool:
        """Whether the prefix is still being computed."""
        slot = wait.slot
        return slot.sequence is wait.sequence and slot.n_past < wait.n_tokens <= slot.n_tokens

    def _fitting(self, group: str) -> Callable[[Slot], tuple[int, ...]]:
        """Larger is better for a prompt of that cache group that finds nothing there. Sequences of
        one step should be next to each other, and a step has those with the same adapters."""
        if not self._consecutive:
            return _age
        used = adapters_of(group)
        busy = [slot for slot in self.slots if slot.sequence is not None]
        together = {slot.id for slot in busy if adapters_of(slot.group) == used}
        others = [slot.id for slot in busy if slot.id not in together]

        def fits(slot: Slot) -> tuple[int, ...]:
            n_beside = sum(slot.id + step in together for step in (-1, 1))
            away = min((abs(slot.id - other) for other in others), default=0)
            return n_beside, away, *_age(slot)

        return fits

    def loses(self, choice: SlotChoice) -> TokenArray:
        """The tokens of which some would be gone for good with this choice. None if few, or spare."""
        slot = choice.slot
        n_kept = choice.n_cached if choice.in_place else 0
        if slot.spare or len(slot.idle_tokens) - n_kept < self._min_copy:
            return token_array()
        n = len(slot.idle_tokens)
        others = (one for one in self.having(slot.group, slot.packed_tokens(n)) if one is not slot)
        kept = any(self._resumable(one, n, False) == n for one in others)
        return token_array() if kept else slot.idle_tokens

    def having(self, group: str, tokens: bytes) -> list[Slot]:
        """The slots that serve a group and have all these tokens in the cache."""
        n = n_tokens(tokens)
        shared = self.shared_lengths(group, tokens, n)
        return [
            one for one in self.slots if one.serves(group) and min(shared[one.id], one.n_past) >= n
        ]

    def release(self, slot: Slot) -> None:
        """Take the slot back; it keeps what its sequence has in the cache for others to start from."""
        slot.release()
        self._clock += 1
        slot.last_used = self._clock

    def least_used(self) -> Slot | None:
        """The idle slot with tokens in the cache that nobody has used for longest."""
        return max(
            (one for one in self.slots if one.idle and one.idle_tokens), key=_age, default=None
        )


def _age(slot: Slot) -> tuple[int, int]:
    """Larger is older; of slots as old, the lowest id."""
    return -slot.last_used, -slot.id

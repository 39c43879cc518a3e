"""The slot table, which chooses the slot and the cached prefix that a new prompt starts from."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from serve_app.engine.sequence import Sequence
from serve_app.types import SHARED_GROUP


@dataclass(slots=True)
class Slot:
    """One `seq_id` of the shared context: what llama.cpp calls a sequence. It outlives the engine's
    sequences and keeps their cached tokens."""

    id: int
    """Its `seq_id`."""
    idle_tokens: list[int] = field(default_factory=list)
    """Its tokens in the cache while it is idle."""
    sequence: Sequence | None = None
    pinned: bool = False
    """Whether it only keeps `idle_tokens`, for others to copy."""
    n_shared: int = 0
    """First tokens whose cells are another slot's too, in a unified cache."""
    last_used: int = 0
    """Counts releases: the smallest is the least recently used; 0 was never used."""
    group: str = ""
    """The cache group of its tokens."""

    @property
    def idle(self) -> bool:
        """Whether it could take a sequence."""
        return self.sequence is None and not self.pinned

    @property
    def tokens(self) -> list[int]:
        """What others may start from: the tokens of its sequence, cached or not yet, up to a context
        shift; those in the cache while it is idle."""
        if self.sequence is None:
            return self.idle_tokens
        tokens, n_exact = self.sequence.tokens, self.sequence.n_exact
        return tokens if n_exact is None else tokens[:n_exact]

    @property
    def prompt(self) -> SequenceOf[int]:
        """The same without what a running sequence has generated. Nobody changes it any more."""
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
        return self.group in (group, SHARED_GROUP)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a prompt starts."""

    slot: Slot
    n_cached: int
    """Its first tokens that need not be computed."""
    copy_from: Slot | None = None
    """The slot to copy them from; None if they are in `slot` already, or stored."""
    stored: bool = False
    """Whether they come from outside the slots."""

    @property
    def in_place(self) -> bool:
        """Whether the slot has them already."""
        return self.copy_from is None and not self.stored


@dataclass(frozen=True, slots=True)
class Wait:
    """A prompt should start later."""

    slot: Slot
    """Where its prefix is being computed."""
    n_tokens: int
    """How long that will be."""


class SlotTable:
    """All slots of one context, the pinned ones last. From `min_copy` tokens on, copying a slot is cheaper
    than computing them. With `consecutive`, busy slots should be next to each other."""

    def __init__(
        self,
        n_slots: int,
        min_copy: int,
        pinned: tuple[tuple[int, ...], ...] = (),
        *,
        consecutive: bool = False,
    ) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self.slots += [
            Slot(n_slots + i, list(tokens), pinned=True, group=SHARED_GROUP)
            for i, tokens in enumerate(pinned)
        ]
        self._min_copy = min_copy
        self._consecutive = consecutive
        self._clock = 0

    @property
    def has_idle(self) -> bool:
        """Whether some slot could take a sequence."""
        return any(slot.idle for slot in self.slots)

    @property
    def n_idle(self) -> int:
        """How many slots could take a sequence."""
        return sum(slot.idle for slot in self.slots)

    @property
    def busy(self) -> bool:
        """Whether some slot has a sequence."""
        return any(slot.sequence is not None for slot in self.slots)

    @property
    def n_cells(self) -> int:
        """Cells in use, if the cache is unified: what slots share counts once."""
        return sum(slot.n_past - min(slot.n_shared, slot.n_past) for slot in self.slots)

    def slot_ends(self, n_ctx_slot: int) -> dict[int, int]:
        """The tokens in the cache of every slot that has room for one more."""
        ends = {
            slot.id: len(slot.idle_tokens) if slot.sequence is None else slot.sequence.n_past
            for slot in self.slots
        }
        return {slot_id: end for slot_id, end in ends.items() if end < n_ctx_slot}

    def choose(self, group: str, prompt: list[int], n_stored: int = 0) -> Choice | Wait:
        """Where to start a prompt now, or that it should wait for a prefix that is being computed.
        Its first `n_stored` tokens can also be had from outside the slots. What slots of other cache groups
        hold counts as nothing.

        An idle slot that holds the longest prefix is used in place, but only if that is at least
        half of what it holds: a few shared first tokens are not worth somebody's conversation. A
        prefix that another slot, idle or busy, holds is copied into the idle slot that is next to most busy
        ones (of a split cache, which computes consecutive slots together), or else the least recently used;
        so is one that is stored. At least the prompt's last token is left to decode. There must be an idle
        slot.
        """
        shared = [
            min(common_prefix(slot.tokens, prompt), len(prompt) - 1) if slot.serves(group) else 0
            for slot in self.slots
        ]
        ready = [min(n, slot.n_past) for n, slot in zip(shared, self.slots, strict=True)]
        idle = [slot for slot in self.slots if slot.idle]
        in_place = max(idle, key=lambda slot: (_worth(slot, ready[slot.id]), *self._fits(slot)))
        source = max(self.slots, key=lambda slot: ready[slot.id])
        best = max(ready[in_place.id], ready[source.id])
        coming = max(self.slots, key=lambda slot: shared[slot.id])
        if shared[coming.id] - max(best, n_stored) >= self._min_copy:
            return Wait(coming, shared[coming.id])
        if n_stored - best >= self._min_copy:
            return Choice(max(idle, key=self._fits), n_stored, stored=True)
        others = [slot for slot in idle if slot is not source]
        if ready[source.id] - ready[in_place.id] >= self._min_copy and others:
            return Choice(max(others, key=self._fits), ready[source.id], copy_from=source)
        return Choice(in_place, ready[in_place.id])

    def _fits(self, slot: Slot) -> tuple[int, int, int]:
        """Larger is better for a prompt that finds nothing there."""
        around = self.slots[max(0, slot.id - 1) : slot.id + 2] if self._consecutive else ()
        return (sum(one.sequence is not None for one in around), *_age(slot))

    def loses(self, choice: Choice) -> list[int]:
        """The tokens of which some would be gone for good with this choice; none if they are few."""
        slot = choice.slot
        n_kept = choice.n_cached if choice.in_place else 0
        if len(slot.idle_tokens) - n_kept < self._min_copy:
            return []
        others = (one for one in self.slots if one is not slot and one.serves(slot.group))
        kept = any(self._holds(other, slot.idle_tokens) for other in others)
        return [] if kept else slot.idle_tokens

    @staticmethod
    def _holds(slot: Slot, tokens: list[int]) -> bool:
        n = len(tokens)
        return slot.n_past >= n and slot.tokens[:n] == tokens

    def occupy(self, slot: Slot, sequence: Sequence) -> None:
        """Hand an idle slot to a sequence."""
        slot.sequence, slot.idle_tokens = sequence, []
        slot.group = sequence.request.cache_group

    def release(self, slot: Slot) -> None:
        """Take the slot back; it keeps what its sequence has in the cache for others to start from."""
        slot.idle_tokens = slot.tokens[: slot.n_past]
        slot.sequence = None
        self._clock += 1
        slot.last_used = self._clock

    def least_used(self) -> Slot | None:
        """The idle slot with tokens in the cache that nobody has used for longest."""
        return max(
            (one for one in self.slots if one.idle and one.idle_tokens), key=_age, default=None
        )


def _worth(slot: Slot, n_shared: int) -> int:
    return n_shared if 2 * n_shared >= len(slot.idle_tokens) else 0


def _age(slot: Slot) -> tuple[int, int]:
    """Larger is older; of slots as old, the lowest id."""
    return -slot.last_used, -slot.id


def common_prefix(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """How many first items two sequences of a type share: found by halving, as comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

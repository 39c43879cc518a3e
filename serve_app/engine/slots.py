"""The lanes of the KV cache, and which one suits a new prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.engine.sequence import Sequence


@dataclass(slots=True)
class Slot:
    """One lane of the shared context. Outlives its sequences and keeps their cached tokens."""

    id: int
    idle_tokens: list[int] = field(default_factory=list)
    """What the lane's cache holds while it is idle."""
    sequence: Sequence | None = None
    pinned: bool = False
    """Whether it only keeps `idle_tokens`, for others to copy."""
    last_used: int = 0
    """Counts releases: the smallest is the least recently used; 0 was never used."""

    @property
    def idle(self) -> bool:
        """Whether it could take a sequence."""
        return self.sequence is None and not self.pinned

    @property
    def tokens(self) -> list[int]:
        """The tokens of its sequence, cached or not yet; those in the cache while it is idle."""
        return self.idle_tokens if self.sequence is None else self.sequence.tokens

    @property
    def n_past(self) -> int:
        """How many of `tokens` are in the cache."""
        return len(self.idle_tokens) if self.sequence is None else self.sequence.n_past


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


class SlotTable:
    """All slots of one context, then its pinned lanes. `min_copy` is the number of tokens from which on
    copying a lane is cheaper than computing them."""

    def __init__(
        self, n_slots: int, min_copy: int, pinned: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self.slots += [
            Slot(n_slots + i, list(tokens), pinned=True) for i, tokens in enumerate(pinned)
        ]
        self._min_copy = min_copy
        self._clock = 0

    @property
    def has_idle(self) -> bool:
        """Whether some slot could take a sequence."""
        return any(slot.idle for slot in self.slots)

    def choose(self, prompt: list[int], n_stored: int = 0) -> Choice | None:
        """Where to start a prompt now; None if it should wait for a prefix that is being computed.
        Its first `n_stored` tokens can also be had from outside the slots.

        An idle slot that holds the longest prefix is used in place, but only if that is at least
        half of what it holds: a few shared first tokens are not worth somebody's conversation. A
        prefix that another slot, idle or busy, holds is copied into the least recently used idle
        slot; so is one that is stored. At least the prompt's last token is left to decode. There must be
        an idle slot.
        """
        shared = [min(common_prefix(s.tokens, prompt), len(prompt) - 1) for s in self.slots]
        ready = [min(n, slot.n_past) for n, slot in zip(shared, self.slots, strict=True)]
        idle = [slot for slot in self.slots if slot.idle]
        in_place = max(idle, key=lambda slot: (_worth(slot, ready[slot.id]), *_age(slot)))
        source = max(self.slots, key=lambda slot: ready[slot.id])
        best = max(ready[in_place.id], ready[source.id])
        if max(shared) - max(best, n_stored) >= self._min_copy:
            return None
        if n_stored - best >= self._min_copy:
            return Choice(max(idle, key=_age), n_stored, stored=True)
        others = [slot for slot in idle if slot is not source]
        if ready[source.id] - ready[in_place.id] >= self._min_copy and others:
            return Choice(max(others, key=_age), ready[source.id], copy_from=source)
        return Choice(in_place, ready[in_place.id])

    def loses(self, choice: Choice) -> list[int]:
        """The tokens of which some would be gone for good with this choice; none if they are few."""
        slot = choice.slot
        in_place = choice.copy_from is None and not choice.stored
        n_kept = choice.n_cached if in_place else 0
        if len(slot.idle_tokens) - n_kept < self._min_copy:
            return []
        others = (other for other in self.slots if other is not slot)
        kept = any(self._holds(other, slot.idle_tokens) for other in others)
        return [] if kept else slot.idle_tokens

    @staticmethod
    def _holds(slot: Slot, tokens: list[int]) -> bool:
        n = len(tokens)
        return slot.n_past >= n and slot.tokens[:n] == tokens

    def occupy(self, slot: Slot, sequence: Sequence) -> None:
        """Hand an idle slot to a sequence."""
        slot.sequence, slot.idle_tokens = sequence, []

    def release(self, slot: Slot) -> None:
        """Take the slot back; it keeps what its sequence has in the cache."""
        slot.idle_tokens = slot.tokens[: slot.n_past]
        slot.sequence = None
        self._clock += 1
        slot.last_used = self._clock


def _worth(slot: Slot, n_shared: int) -> int:
    return n_shared if 2 * n_shared >= len(slot.idle_tokens) else 0


def _age(slot: Slot) -> tuple[int, int]:
    """Larger is older; of slots as old, the lowest id."""
    return -slot.last_used, -slot.id


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many first tokens two lists share: found by halving, as comparing slices is fast."""
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

"""The lanes of the KV cache, and which one suits a new prompt."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from serve_app.engine.sequence import Sequence


@dataclass(slots=True)
class Slot:
    """One lane of the shared context. Outlives its sequences and keeps their cached tokens."""

    id: int
    tokens: list[int] = field(default_factory=list)
    """What the lane's cache holds while it is idle."""
    sequence: Sequence | None = None
    last_used: int = 0
    """Counts releases: the smallest is the least recently used; 0 was never used."""


class SlotTable:
    """All slots of one context."""

    def __init__(self, n_slots: int) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self._clock = 0

    def choose(self, prompt: Tokens[int]) -> tuple[Slot, int] | None:
        """The idle slot to start this prompt in, and how many of its tokens it already holds.

        The longest cached prefix wins, but only if it is at least half of what the slot holds: a few
        shared first tokens are not worth somebody's conversation. Then the least recently used slot,
        then the lowest id. At least the prompt's last token is left to decode. None if every slot is
        busy.
        """
        idle = [slot for slot in self.slots if slot.sequence is None]
        if not idle:
            return None
        shared = {slot.id: common_prefix(slot.tokens, prompt) for slot in idle}
        best = max(
            idle,
            key=lambda slot: (
                shared[slot.id] if 2 * shared[slot.id] >= len(slot.tokens) else 0,
                -slot.last_used,
                -slot.id,
            ),
        )
        return best, min(shared[best.id], len(prompt) - 1)

    def occupy(self, slot: Slot, sequence: Sequence) -> None:
        """Hand an idle slot to a sequence."""
        slot.sequence, slot.tokens = sequence, []

    def release(self, slot: Slot) -> None:
        """Take the slot back; it keeps what its sequence has in the cache."""
        if slot.sequence is not None:
            slot.tokens = slot.sequence.tokens[: slot.sequence.n_past]
        slot.sequence = None
        self._clock += 1
        slot.last_used = self._clock


def common_prefix(a: Tokens[int], b: Tokens[int]) -> int:
    """How many first tokens two lists share."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )

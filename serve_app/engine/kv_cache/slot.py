"""A slot, and what slots have in the prefix index."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from serve_app.engine.core.sequence import Sequence
from serve_app.engine.kv_cache.packing import (
    TOKEN_BYTES,
    TokenArray,
    n_matching,
    packed,
    token_array,
)
from serve_app.engine.kv_cache.prefix_index import IndexEntry, Match, PrefixIndex
from serve_app.types import SHARED_GROUP, may_start_from


@dataclass(slots=True)
class Slot:
    """One `seq_id` of the shared context: what llama.cpp calls a sequence. It outlives the engine's
    sequences and keeps their cached tokens."""

    id: int
    """The `seq_id`."""
    idle_tokens: TokenArray = field(default_factory=token_array)
    """The tokens in the cache while the slot is idle. Nobody changes this array: other tokens are
    another one."""
    sequence: Sequence | None = None
    pinned: bool = False
    """Whether it only keeps `idle_tokens`, for others to copy."""
    n_shared: int = 0
    """First tokens whose cells are another slot's too, in a unified cache, or would be in one."""
    last_used: int = 0
    """Counts releases: the smallest is the least recently used; 0 was never used."""
    group: str = ""
    """The cache group of its tokens."""
    spare: bool = False
    """Whether a request in the background left `idle_tokens`: nobody is likely to go on from there."""
    _packed: tuple[TokenArray | None, bytes] = field(default=(None, b""), compare=False)
    """Idle tokens, and the same packed."""

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
        """The tokens that other sequences may start from: the tokens of its sequence, cached or not
        yet, up to a context shift; those in the cache while it is idle."""
        if self.sequence is None:
            return self.idle_tokens
        tokens, n_exact = self.sequence.tokens, self.sequence.n_exact
        return tokens if n_exact is None else tokens[:n_exact]

    @property
    def source(self) -> TokenArray:
        """The array that `tokens` are in, from the first one on. It only grows."""
        return self.idle_tokens if self.sequence is None else self.sequence.tokens

    def packed(self, n_wanted: int) -> bytes:
        """So many of the first tokens of `tokens`, packed."""
        if self.sequence is not None:
            return self.sequence.packed(n_wanted)
        if self._packed[0] is not self.idle_tokens:
            self._packed = self.idle_tokens, packed(self.idle_tokens)
        return self._packed[1][: n_wanted * TOKEN_BYTES]

    def occupy(self, sequence: Sequence) -> None:
        """Take a sequence, and what that needs of its idle tokens."""
        self.sequence, self.group = sequence, sequence.request.content_group
        self.idle_tokens, self._packed = token_array(), (None, b"")

    def release(self) -> None:
        """Lose the sequence, and keep what that has in the cache."""
        n_past, sequence = self.n_past, self.sequence
        self.spare = self.in_background
        kept = self.packed(n_past)
        self.idle_tokens = token_array()
        if sequence is not None and n_past:
            self.idle_tokens = sequence.give_up(n_past)
        self.sequence, self._packed = None, (self.idle_tokens, kept)

    @property
    def n_tokens(self) -> int:
        """How many `tokens` there are."""
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


@dataclass(slots=True)
class _Known:
    """The part of one slot that the index knows."""

    source: TokenArray | None = None
    group: str = ""
    entry: IndexEntry | None = None


class SlotIndex:
    """Keeps one engine's slots in its prefix index, and finds there what they share with prompts.
    Decoder thread only.

    A slot's entry has what it had when its array of tokens became another one. Tokens that a
    running sequence has generated since then are compared only if the entry is the beginning of a
    prompt: so a step costs nothing here.
    """

    def __init__(self, slots: SequenceOf[Slot], index: PrefixIndex) -> None:
        self._slots = slots
        self._index = index
        self._known = [_Known() for _ in slots]

    @property
    def version(self) -> int:
        """Changes whenever a slot or a store has other tokens; but for what running sequences
        generate."""
        return self._index.version

    def shared(self, group: str, prompt: bytes, n_most: int) -> list[int]:
        """By slot, how many of the first `n_most` tokens of a cache group's prompt it has, or will
        have."""
        self.update()
        own = self._index.match(group, prompt, n_most)
        n_for_all = n_most if may_start_from(group, SHARED_GROUP) else 0
        for_all = self._index.match(SHARED_GROUP, prompt, n_for_all)
        return [
            self._n_shared(slot, for_all, prompt, n_for_all)
            if slot.group == SHARED_GROUP
            else self._n_shared(slot, own, prompt, n_most)
            for slot in self._slots
        ]

    def update(self) -> None:
        """Tell the index what has changed."""
        for slot, known in zip(self._slots, self._known, strict=True):
            if known.source is not slot.source or known.group != slot.group:
                self.tell(slot)

    def tell(self, slot: Slot) -> None:
        """Tell the index what a slot has now."""
        known = self._known[slot.id]
        before, n_tokens = known.entry, slot.n_tokens
        known.source, known.group, known.entry = slot.source, slot.group, None
        if n_tokens:
            known.entry = self._index.add(slot, slot.group, slot.packed(n_tokens))
        if before is not None:
            self._index.remove(before)

    def _n_shared(self, slot: Slot, match: Match, prompt: bytes, n_most: int) -> int:
        entry = self._known[slot.id].entry
        if entry is None:
            return 0
        n, n_tokens = match.n_shared(entry), min(slot.n_tokens, n_most)
        if n == entry.n_tokens < n_tokens:
            tail = packed(slot.source[n:n_tokens])
            n += n_matching(tail, prompt, n * TOKEN_BYTES, n_tokens * TOKEN_BYTES)
        return n

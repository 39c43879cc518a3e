"""What is found for a prompt is what comparing it with all slots and stores finds."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.values.adapters import SHARED_GROUP
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.cache.contents import StoredPrefix
from serve_app.engine.cache.memory_tier import MemoryTier
from serve_app.engine.cache.packing import pack, token_array
from serve_app.engine.cache.slots import PrefixPending, Slot, SlotTable
from serve_app.engine.core.sequence import Sequence

GROUPS = ["", "mine", SHARED_GROUP]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
"""Of two kinds, so that many begin alike."""


def n_common(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """Counted one by one."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Compared:
    """What a table and a store would say if they compared a prompt with everything."""

    def __init__(self, table: SlotTable, tier: MemoryTier) -> None:
        self.table = table
        self.tier = tier

    def shared(self, group: str, prompt: bytes, n_most: int) -> list[int]:
        """For `SlotTable.shared_lengths`."""
        wanted = memoryview(prompt).cast("i").tolist()[:n_most]
        return [
            n_common(slot.tokens, wanted) if slot.serves(group) else 0 for slot in self.table.slots
        ]

    def longest(self, group: str, prompt: list[int]) -> int:
        """The tokens that `MemoryTier.longest` finds."""
        own = (one.tokens for one in self.tier if one.group == group)
        return max((n_common(tokens, prompt[:-1]) for tokens in own), default=0)

    def wants(self, group: str, tokens: list[int]) -> bool:
        """See `MemoryTier.wants`."""
        return not any(
            pack(one.tokens[: len(tokens)]) == pack(tokens)
            for one in self.tier
            if one.group == group
        )

    def beginning(self, group: str, tokens: list[int]) -> StoredPrefix | None:
        """See `MemoryTier.beginning`."""
        n = len(tokens)
        found = [one for one in self.tier if one.group == group and list(one.tokens[:n]) == tokens]
        return min(found, key=lambda one: len(one.tokens), default=None)


class Workload:
    """Slots and a store that anything may happen to."""

    def __init__(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sampled_from([(), ((0, 1, 0),)]))
        n_slots, min_copy = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        self.data = data
        self.table = SlotTable(n_slots, min_copy, pinned)
        self.tier = MemoryTier(30)
        self.compared = Compared(self.table, self.tier)
        self.waiting: list[Sequence] = []

    def slot(self, *, busy: bool) -> Slot | None:
        """One of those, if there are any."""
        slots = [one for one in self.table.slots if not one.pinned and one.idle is not busy]
        return self.data.draw(st.sampled_from(slots)) if slots else None

    def prompt(self) -> list[int]:
        """Often one that goes on where something ends, or leaves it."""
        held = [list(slot.tokens) for slot in self.table.slots]
        held += [list(one.tokens) for one in self.tier]
        begun = self.data.draw(st.sampled_from([[], *held]))
        n = self.data.draw(st.integers(0, len(begun)))
        n = len(begun) if self.data.draw(st.booleans()) else n
        return begun[:n] + self.data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))

    def come(self) -> None:
        """A request, which gets a slot or waits."""
        group, prompt = self.data.draw(st.sampled_from(GROUPS[:2])), self.prompt()
        self.waiting.append(
            Sequence(GenerationRequest("a", tuple(prompt), cache_group=group), lambda delta: None)
        )

    def admit(self) -> None:
        """One that waits gets the slot that it should."""
        sequence = self.waiting[0] if self.waiting else None
        if sequence is None or not self.table.n_idle:
            return
        group, tokens = sequence.request.cache_group, list(sequence.tokens)
        n_stored, stored = self.tier.longest(group, tokens)
        choice = self.table.choose(group, tokens, n_stored)
        if isinstance(choice, PrefixPending):
            sequence.prefix_pending = choice
            return
        if choice.stored and stored is not None:
            self.tier.used(stored)
        self.waiting.pop(0)
        sequence.admit(choice.slot.id, choice.n_cached, None)
        choice.slot.occupy(sequence)

    def compute(self) -> None:
        """Some of a prompt."""
        slot = self.slot(busy=True)
        if slot is not None and slot.sequence is not None and slot.sequence.n_pending:
            slot.sequence.advance(self.data.draw(st.integers(1, slot.sequence.n_pending)))

    def generate(self) -> None:
        """A token."""
        slot = self.slot(busy=True)
        if slot is not None and slot.sequence is not None:
            slot.sequence.n_past = len(slot.sequence.tokens)
            slot.sequence.tokens.append(self.data.draw(st.integers(0, 1)))

    def shift(self) -> None:
        """A context shift."""
        slot = self.slot(busy=True)
        if slot is None or slot.sequence is None or slot.sequence.n_past < 2:
            return
        n_keep = self.data.draw(st.integers(1, slot.sequence.n_past - 1))
        n_discard = self.data.draw(st.integers(1, slot.sequence.n_past - n_keep))
        slot.sequence.shift(n_keep, n_discard, cached=self.data.draw(st.booleans()))

    def end(self) -> None:
        """A sequence leaves its slot."""
        slot = self.slot(busy=True)
        if slot is not None:
            self.table.release(slot)

    def refill(self) -> None:
        """A slot is erased, or restored from a file."""
        slot = self.slot(busy=False)
        if slot is not None:
            slot.group = self.data.draw(st.sampled_from(GROUPS[:2]))
            slot.idle_tokens = token_array(self.data.draw(st.one_of(st.just([]), TOKENS)))

    def store(self) -> None:
        """A prefix, for which others give way."""
        group, tokens = self.data.draw(st.sampled_from(GROUPS[:2])), self.data.draw(TOKENS)
        if self.tier.wants(group, tokens, len(tokens)):
            given = [
                one
                for one in self.tier
                if one.group != group or list(one.tokens) != tokens[: len(one.tokens)]
            ]
            self.tier.put(group, tokens, bytes(len(tokens)))
            kept = list(self.tier)
            assert [*given, kept[-1]][-len(kept) :] == kept
            assert self.tier.n_bytes == sum(len(one.state) for one in kept) <= 30
            assert (
                len(kept) == len(given) + 1 or self.tier.n_bytes + len(given[-len(kept)].state) > 30
            )

    def check(self) -> None:
        """Any prompt finds what comparing it with everything finds."""
        group, prompt = self.data.draw(st.sampled_from(GROUPS[:2])), self.prompt()
        table, tier, compared = self.table, self.tier, self.compared
        told, n = pack(prompt), len(prompt)
        shared = table.shared_lengths(group, told, n)
        assert shared == compared.shared(group, told, n)
        n_stored, stored = tier.longest(group, prompt)
        assert n_stored == compared.longest(group, prompt)
        if stored is not None:
            assert stored.group == group
            assert list(stored.tokens[:n_stored]) == prompt[:n_stored]
        assert tier.wants(group, prompt, 1) == compared.wants(group, prompt)
        assert tier.beginning(group, prompt) is compared.beginning(group, prompt)
        if table.n_idle:
            found = table.choose(group, prompt, n_stored)
            having = table.having(group, pack(prompt))
            with self.by_comparison():
                expected = table.choose(group, prompt, n_stored)
                assert having == table.having(group, pack(prompt))
            assert found == expected

    def by_comparison(self) -> mock._patch[object]:
        """The table that compares token by token."""
        return mock.patch.object(self.table, "shared_lengths", self.compared.shared)


HAPPENS = [
    "come",
    "admit",
    "admit",
    "compute",
    "generate",
    "generate",
    "shift",
    "end",
    "refill",
    "store",
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_all_is_as_if_everything_were_compared(data: st.DataObject) -> None:
    workload = Workload(data)
    for what in data.draw(st.lists(st.sampled_from(HAPPENS), min_size=10, max_size=40)):
        getattr(workload, what)()
        workload.check()

"""The memory tier: prefixes that lost their slot, kept as the state of their sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from serve_app.engine.backends.base import State
from serve_app.engine.kv_cache.contents import Checkpoint, StoredPrefix, deepest
from serve_app.engine.kv_cache.files import DiskTier
from serve_app.engine.kv_cache.packing import Tokens, n_tokens, packed, token_array
from serve_app.engine.kv_cache.prefix_index import IndexEntry, Match, PrefixIndex
from serve_app.engine.metrics.stats import CachedPrompt

# The part of a prefix with which its checkpoints make up for it.
_ENOUGH = 0.75


class _TierEntry(NamedTuple):
    """The tier's entry for a prefix."""

    entry: IndexEntry
    prompt: CachedPrompt
    """Made once: with many prefixes, that takes longer than to list them."""


class MemoryTier:
    """The prefixes used last whose states fit into `budget_bytes`. With `forgets`, a state is good
    for all of its tokens, or for a checkpoint of it, but not for anything between. Decoder thread
    only."""

    def __init__(
        self,
        budget_bytes: int,
        prefixes: Iterable[StoredPrefix] = (),
        disk_tier: DiskTier | None = None,
        index: PrefixIndex | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        """Begins with `prefixes`, the least recently used first, which the disk tier knows."""
        self._budget_bytes = budget_bytes
        self._forgets = forgets
        self._disk_tier = disk_tier
        self._index = PrefixIndex() if index is None else index
        self._entries = OrderedDict[StoredPrefix, _TierEntry]()  # the least recently used first
        self._prompts: tuple[CachedPrompt, ...] | None = None
        self.n_bytes = 0
        """The size of all states."""
        for prefix in prefixes:
            self._keep(prefix, packed(prefix.tokens))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredPrefix]:
        return iter(self._entries)

    @property
    def prompts(self) -> tuple[CachedPrompt, ...]:
        """The tokens of each, the one used last first. Nobody changes them."""
        if self._prompts is None:
            self._prompts = tuple(kept.prompt for kept in reversed(self._entries.values()))
        return self._prompts

    def wants(self, group: str, tokens: Tokens, n_bytes: int) -> bool:
        """Whether to keep a state of that size for these tokens: it fits, and they cannot be had from
        another one of the group."""
        match = self._index.match(group, tokens)
        stored = match.is_stored
        if stored and self._forgets:
            stored = self._best(match)[0] == n_tokens(packed(tokens))
        return self.fits(n_bytes) and not stored

    def fits(self, n_bytes: int) -> bool:
        """Whether a state of that size could be stored, whatever has to go for it."""
        return n_bytes <= self._budget_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Whether a state of that size would fit without another one going."""
        return self.n_bytes + n_bytes <= self._budget_bytes

    def put(
        self,
        group: str,
        tokens: Tokens,
        state: State,
        checkpoints: tuple[Checkpoint, ...] = (),
    ) -> None:
        """Keep a prefix; those of its group that it continues go, but for those of which it could give
        little; and then the least recently used of all, for room."""
        packed_tokens = packed(tokens)
        prefix = StoredPrefix(token_array(packed_tokens), state, group, checkpoints)
        for entry in self._index.match(group, packed_tokens).begun():
            if isinstance(entry.owner, StoredPrefix) and self._replaces(prefix, entry.n_tokens):
                self._drop(entry.owner)
        self._keep(prefix, packed_tokens)
        if self._disk_tier:
            self._disk_tier.add(prefix)
        while self.n_bytes > self._budget_bytes:
            self._drop(next(iter(self._entries)))

    def _keep(self, prefix: StoredPrefix, tokens: bytes) -> None:
        entry = self._index.add(prefix, prefix.group, tokens)
        self._entries[prefix] = _TierEntry(entry, CachedPrompt(prefix.group, prefix.tokens))
        self._index.use(entry)
        self._prompts = None
        self.n_bytes += prefix.n_bytes

    def _drop(self, prefix: StoredPrefix) -> None:
        self._index.remove(self._entries.pop(prefix).entry)
        self._prompts = None
        self.n_bytes -= prefix.n_bytes
        if self._disk_tier:
            self._disk_tier.discard(prefix)

    def longest(self, group: str, prompt: Tokens) -> tuple[int, StoredPrefix | None]:
        """How many of the prompt's first tokens can be had from the best prefix of its group, and that
        prefix; of several, the least recently used. At least the prompt's last token is left out."""
        told = packed(prompt)
        match = self._index.match(group, told, n_tokens(told) - 1)
        n_shared, entry = match.longest()
        if self._forgets and n_shared:
            return self._best(match)
        return n_shared, None if entry is None else entry.owner

    def _best(self, match: Match) -> tuple[int, StoredPrefix | None]:
        """The part of a prompt that can be had from the prefix that gives most of it without those
        behind."""
        usable = (
            (_resumable(one, match.n_shared(kept.entry)), one)
            for one, kept in self._entries.items()
        )
        n_best, best = max(usable, key=lambda found: found[0], default=(0, None))
        return n_best, best if n_best else None

    def _replaces(self, prefix: StoredPrefix, n_tokens: int) -> bool:
        """Whether another one with its first tokens is needed no more."""
        return not self._forgets or _resumable(prefix, n_tokens) >= _ENOUGH * n_tokens

    def n_known(self, group: str, prompt: Tokens) -> int:
        """How many of the prompt's first tokens prefixes of its group begin with."""
        told = packed(prompt)
        return self._index.match(group, told, n_tokens(told) - 1).longest()[0]

    def beginning(self, group: str, tokens: Tokens) -> StoredPrefix | None:
        """The shortest prefix of a group that begins with these tokens; of several, the least recently
        used."""
        found = self._index.match(group, tokens).beginning()
        stored = [entry for entry in found if isinstance(entry.owner, StoredPrefix)]
        best = min(stored, key=lambda one: (one.n_tokens, one.last_used), default=None)
        return None if best is None else best.owner

    def used(self, prefix: StoredPrefix) -> None:
        """Make it the most recently used."""
        self._entries.move_to_end(prefix)
        self._index.use(self._entries[prefix].entry)
        self._prompts = None
        if self._disk_tier:
            self._disk_tier.add(prefix)


def _resumable(prefix: StoredPrefix, n_shared: int) -> int:
    """The number of a prefix's first tokens that it can give without those behind."""
    if n_shared == len(prefix.tokens):
        return n_shared
    found = deepest(prefix.checkpoints, n_shared)
    return 0 if found is None else found.n_tokens

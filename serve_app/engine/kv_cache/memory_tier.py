"""The memory tier: prefixes that lost their slot, kept as the state of their sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve_app.engine.backends.base import State
from serve_app.engine.kv_cache.packing import TokenArray, Tokens, n_tokens, packed, token_array
from serve_app.engine.kv_cache.prefix_index import Entry, PrefixIndex
from serve_app.engine.metrics.stats import HeldPrompt


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Tokens, and what a backend needs to have them in a slot again."""

    tokens: TokenArray
    state: State
    group: str
    """The cache group of the prompts that may start from it."""


class _Kept(NamedTuple):
    """What the tier knows of a prefix."""

    entry: Entry
    prompt: HeldPrompt
    """Made once: with many prefixes, that takes longer than to list them."""


class Mirror(Protocol):
    """Whoever wants to know what is stored; see `serve_app.engine.kv_cache.disk_tier`."""

    def add(self, prefix: StoredPrefix) -> None:
        """It was stored, or used again."""

    def discard(self, prefix: StoredPrefix) -> None:
        """It is stored no more."""


class MemoryTier:
    """The prefixes used last whose states fit into `budget_bytes`. Decoder thread only."""

    def __init__(
        self,
        budget_bytes: int,
        prefixes: Iterable[StoredPrefix] = (),
        mirror: Mirror | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        """Begins with `prefixes`, the least recently used first, which the mirror knows."""
        self._budget_bytes = budget_bytes
        self._mirror = mirror
        self._index = PrefixIndex() if index is None else index
        self._entries = OrderedDict[StoredPrefix, _Kept]()  # the least recently used first
        self._prompts: tuple[HeldPrompt, ...] | None = None
        self.n_bytes = 0
        """Of all states."""
        for prefix in prefixes:
            self._keep(prefix, packed(prefix.tokens))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredPrefix]:
        return iter(self._entries)

    @property
    def newest(self) -> Iterator[StoredPrefix]:
        """Every prefix, whose tokens nobody changes; the one used last first."""
        return reversed(self._entries)

    @property
    def prompts(self) -> tuple[HeldPrompt, ...]:
        """The tokens of each, in the same order."""
        if self._prompts is None:
            self._prompts = tuple(kept.prompt for kept in reversed(self._entries.values()))
        return self._prompts

    def wants(self, group: str, tokens: Tokens, n_bytes: int) -> bool:
        """Whether to keep a state of that size for these tokens: it fits, and no other of the group has
        them."""
        return self.fits(n_bytes) and not self._index.match(group, tokens).is_stored

    def fits(self, n_bytes: int) -> bool:
        """Whether a state of that size could be stored, whatever has to go for it."""
        return n_bytes <= self._budget_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Whether a state of that size would fit without another one going."""
        return self.n_bytes + n_bytes <= self._budget_bytes

    def put(self, group: str, tokens: Tokens, state: State) -> None:
        """Keep a prefix; those of its group that it continues go, and then the least recently used of all,
        for room."""
        told = packed(tokens)
        for entry in self._index.match(group, told).begun():
            if isinstance(entry.owner, StoredPrefix):
                self._drop(entry.owner)
        prefix = StoredPrefix(token_array(told), state, group)
        self._keep(prefix, told)
        if self._mirror:
            self._mirror.add(prefix)
        while self.n_bytes > self._budget_bytes:
            self._drop(next(iter(self._entries)))

    def _keep(self, prefix: StoredPrefix, tokens: bytes) -> None:
        entry = self._index.add(prefix, prefix.group, tokens)
        self._entries[prefix] = _Kept(entry, HeldPrompt(prefix.group, prefix.tokens))
        self._index.use(entry)
        self._prompts = None
        self.n_bytes += len(prefix.state)

    def _drop(self, prefix: StoredPrefix) -> None:
        self._index.remove(self._entries.pop(prefix).entry)
        self._prompts = None
        self.n_bytes -= len(prefix.state)
        if self._mirror:
            self._mirror.discard(prefix)

    def longest(self, group: str, prompt: Tokens) -> tuple[int, StoredPrefix | None]:
        """How many of the prompt's first tokens the best prefix of its group has, and that prefix; of
        several, the least recently used. At least the prompt's last token is left out."""
        told = packed(prompt)
        n_shared, entry = self._index.match(group, told, n_tokens(told) - 1).longest()
        return n_shared, None if entry is None else entry.owner

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
        if self._mirror:
            self._mirror.add(prefix)

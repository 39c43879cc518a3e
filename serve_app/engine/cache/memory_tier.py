"""The memory tier: prefixes that lost their slot, kept as the state of their sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from serve_app.base.formats import State
from serve_app.engine.cache.contents import Checkpoint, StoredPrefix, deepest
from serve_app.engine.cache.files import DiskTier
from serve_app.engine.cache.packing import TOKEN_BYTES, Tokens, n_tokens, pack, token_array
from serve_app.engine.cache.prefixes import Prefix, beginning, n_shared, nearest
from serve_app.engine.metrics.stats import CachedPrompt

# The part of a prefix with which its checkpoints make up for it.
_ENOUGH = 0.75


class MemoryTier:
    """The prefixes used last whose states fit into `budget_bytes`. With `forgets`, a state is good for all
    of its tokens, or for a checkpoint of it, and nothing between. Decoder thread only."""

    def __init__(
        self,
        budget_bytes: int,
        prefixes: Iterable[StoredPrefix] = (),
        disk_tier: DiskTier | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        """Begins with `prefixes`, the least recently used first, which the disk tier knows."""
        self._budget_bytes = budget_bytes
        self._forgets = forgets
        self._disk_tier = disk_tier
        self._entries = OrderedDict[Prefix, tuple[StoredPrefix, CachedPrompt]]()
        """The least recently used first. To make a `CachedPrompt` takes longer than to list it."""
        self._sorted: list[Prefix] = []
        self._prompts: tuple[CachedPrompt, ...] | None = None
        self.n_bytes = 0
        """The size of all states."""
        for prefix in prefixes:
            self._keep(prefix)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredPrefix]:
        return (stored for stored, _ in self._entries.values())

    @property
    def prompts(self) -> tuple[CachedPrompt, ...]:
        """The tokens of each, the one used last first. Nobody changes them."""
        if self._prompts is None:
            self._prompts = tuple(prompt for _, prompt in reversed(self._entries.values()))
        return self._prompts

    def wants(self, group: str, tokens: Tokens, n_bytes: int) -> bool:
        """Whether to keep such a state of these tokens: it fits, and no other one of the group has them."""
        prefix = Prefix(group, pack(tokens))
        stored = bool(self._sorted[beginning(self._sorted, prefix)])
        if stored and self._forgets:
            stored = self._best(prefix)[0] == n_tokens(prefix.tokens)
        return self.fits(n_bytes) and not stored

    def fits(self, n_bytes: int) -> bool:
        """Whether a state of that size could be stored, whatever has to go for it."""
        return n_bytes <= self._budget_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Whether a state of that size would fit without another one going."""
        return self.n_bytes + n_bytes <= self._budget_bytes

    def put(
        self, group: str, tokens: Tokens, state: State, checkpoints: tuple[Checkpoint, ...] = ()
    ) -> None:
        """Keep a prefix. Those of its group that it continues go, but for those of which it could give
        little. Then the least recently used of all go, for room."""
        key = Prefix(group, pack(tokens))
        prefix = StoredPrefix(token_array(key.tokens), state, group, checkpoints)
        for other in [one for one in self._sorted if one.group == group]:
            n = n_tokens(other.tokens)
            if key.tokens.startswith(other.tokens) and (
                not self._forgets or _resumable(prefix, n) >= _ENOUGH * n
            ):
                self._drop(other)
        self._keep(prefix)
        if self._disk_tier:
            self._disk_tier.add(prefix)
        while self.n_bytes > self._budget_bytes:
            self._drop(next(iter(self._entries)))

    def _keep(self, prefix: StoredPrefix) -> None:
        key = prefix.key
        self._entries[key] = prefix, CachedPrompt(prefix.group, prefix.tokens)
        insort(self._sorted, key)
        self._prompts = None
        self.n_bytes += prefix.n_bytes

    def _drop(self, key: Prefix) -> None:
        prefix, _ = self._entries.pop(key)
        del self._sorted[bisect_left(self._sorted, key)]
        self._prompts = None
        self.n_bytes -= prefix.n_bytes
        if self._disk_tier:
            self._disk_tier.discard(prefix)

    def longest(self, group: str, prompt: Tokens) -> tuple[int, StoredPrefix | None]:
        """How many of the prompt's first tokens can be had from the best prefix of its group, and that
        prefix. At least the prompt's last token is left out."""
        most = Prefix(group, pack(prompt)[:-TOKEN_BYTES])
        n_bytes, key = nearest(self._sorted, most)
        if key is None:
            return 0, None
        return self._best(most) if self._forgets else (n_bytes // TOKEN_BYTES, self._at(key))

    def _at(self, key: Prefix) -> StoredPrefix:
        return self._entries[key][0]

    def _best(self, prompt: Prefix) -> tuple[int, StoredPrefix | None]:
        """The tokens that the best prefix can give of a prompt without the tokens behind."""
        usable = (
            (_resumable(stored, n_shared(prompt, key) // TOKEN_BYTES), stored)
            for key, (stored, _) in self._entries.items()
            if key.group == prompt.group
        )
        n_best, best = max(usable, key=lambda found: found[0], default=(0, None))
        return n_best, best if n_best else None

    def n_known(self, group: str, prompt: Tokens) -> int:
        """How many of the prompt's first tokens prefixes of its group begin with."""
        return nearest(self._sorted, Prefix(group, pack(prompt)[:-TOKEN_BYTES]))[0] // TOKEN_BYTES

    def beginning(self, group: str, tokens: Tokens) -> StoredPrefix | None:
        """The shortest prefix of a group that begins with these tokens."""
        found = self._sorted[beginning(self._sorted, Prefix(group, pack(tokens)))]
        shortest = min(found, key=lambda one: len(one.tokens), default=None)
        return None if shortest is None else self._at(shortest)

    def used(self, prefix: StoredPrefix) -> None:
        self._entries.move_to_end(prefix.key)
        self._prompts = None
        if self._disk_tier:
            self._disk_tier.add(prefix)


def _resumable(prefix: StoredPrefix, n_shared: int) -> int:
    """The number of a prefix's first tokens that it can give without those behind."""
    if n_shared == len(prefix.tokens):
        return n_shared
    found = deepest(prefix.checkpoints, n_shared)
    return 0 if found is None else found.n_tokens

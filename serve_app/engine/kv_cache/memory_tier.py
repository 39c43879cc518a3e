"""The memory tier: prefixes that lost their slot, kept as the state of their sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from serve_app.engine.backends.base import State
from serve_app.engine.kv_cache.slots import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Tokens, and what a backend needs to have them in a slot again."""

    tokens: list[int]
    state: State
    group: str
    """The cache group of the prompts that may start from it."""


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
    ) -> None:
        """Begins with `prefixes`, the least recently used first, which the mirror knows."""
        self._budget_bytes = budget_bytes
        self._prefixes = list(prefixes)  # the least recently used first
        self._mirror = mirror

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[StoredPrefix]:
        return iter(self._prefixes)

    @property
    def n_bytes(self) -> int:
        """Of all states."""
        return sum(len(prefix.state) for prefix in self._prefixes)

    @property
    def newest(self) -> Iterator[StoredPrefix]:
        """Every prefix, whose tokens nobody changes; the one used last first."""
        return reversed(self._prefixes)

    def wants(self, group: str, tokens: list[int], n_bytes: int) -> bool:
        """Whether to keep a state of that size for these tokens: it fits, and no other of the group has
        them."""
        return self.fits(n_bytes) and not any(
            common_prefix(known.tokens, tokens) == len(tokens) for known in self._of(group)
        )

    def fits(self, n_bytes: int) -> bool:
        """Whether a state of that size could be stored, whatever has to go for it."""
        return n_bytes <= self._budget_bytes

    def has_room(self, n_bytes: int) -> bool:
        """Whether a state of that size would fit without another one going."""
        return self.n_bytes + n_bytes <= self._budget_bytes

    def put(self, group: str, tokens: list[int], state: State) -> None:
        """Keep a prefix; those of its group that it continues go, and then the least recently used of all,
        for room."""
        for known in [p for p in self._of(group) if p.tokens == tokens[: len(p.tokens)]]:
            self._drop(known)
        prefix = StoredPrefix(list(tokens), state, group)
        self._prefixes.append(prefix)
        if self._mirror:
            self._mirror.add(prefix)
        while self.n_bytes > self._budget_bytes:
            self._drop(self._prefixes[0])

    def _drop(self, prefix: StoredPrefix) -> None:
        self._prefixes.remove(prefix)
        if self._mirror:
            self._mirror.discard(prefix)

    def longest(self, group: str, prompt: list[int]) -> tuple[int, StoredPrefix | None]:
        """How many of the prompt's first tokens the best prefix of its group has, and that prefix. At least
        the prompt's last token is left out."""
        best, found = 0, None
        for prefix in self._of(group):
            n_shared = min(common_prefix(prefix.tokens, prompt), len(prompt) - 1)
            if n_shared > best:
                best, found = n_shared, prefix
        return best, found

    def _of(self, group: str) -> Iterator[StoredPrefix]:
        return (prefix for prefix in self._prefixes if prefix.group == group)

    def used(self, prefix: StoredPrefix) -> None:
        """Make it the most recently used."""
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)
        if self._mirror:
            self._mirror.add(prefix)

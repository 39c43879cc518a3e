"""Prefixes that lost their slot, kept in memory as the state of their sequence."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engine.slots import common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """Tokens, and what a backend needs to have them in a lane again."""

    tokens: list[int]
    state: bytes


class PrefixStore:
    """The prefixes used last whose states fit into `budget_bytes`. Decoder thread only."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._prefixes: list[StoredPrefix] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def n_bytes(self) -> int:
        """Of all states."""
        return sum(len(prefix.state) for prefix in self._prefixes)

    def wants(self, tokens: list[int], n_bytes: int) -> bool:
        """Whether to keep a state of that size for these tokens: it fits, and no other has them."""
        return n_bytes <= self._budget_bytes and not any(
            common_prefix(known.tokens, tokens) == len(tokens) for known in self._prefixes
        )

    def put(self, tokens: list[int], state: bytes) -> None:
        """Keep a prefix; those it continues go, and then the least recently used, for room."""
        self._prefixes = [
            known for known in self._prefixes if known.tokens != tokens[: len(known.tokens)]
        ]
        self._prefixes.append(StoredPrefix(list(tokens), state))
        while self.n_bytes > self._budget_bytes:
            del self._prefixes[0]

    def longest(self, prompt: list[int]) -> tuple[int, StoredPrefix | None]:
        """How many of the prompt's first tokens the best prefix has, and that prefix. At least the
        prompt's last token is left out."""
        best, found = 0, None
        for prefix in self._prefixes:
            n_shared = min(common_prefix(prefix.tokens, prompt), len(prompt) - 1)
            if n_shared > best:
                best, found = n_shared, prefix
        return best, found

    def used(self, prefix: StoredPrefix) -> None:
        """Make it the most recently used."""
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)

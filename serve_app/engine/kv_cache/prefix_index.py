"""The prefix index: who has how many of a prompt's first tokens. Pure: no model, no threads, no clock.

A radix tree for each cache group. A node stands for a run of tokens that all entries below it
share, of any length: so there are fewer than two nodes for an entry, runs are compared as bytes,
and what is found is exact to the token. An engine with a paged cache rounds that down. Source:
Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2023; it has one
tree, and runs of whole pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from serve_app.engine.kv_cache.packing import (
    TOKEN_BYTES,
    Tokens,
    n_matching,
    n_tokens,
    packed,
)

# Uses that a node remembers of each entry below it, and some more, before it forgets the old ones.
_USES_KEPT = 2
_USES_MORE = 16


class IndexEntry:
    """Tokens that somebody has. They never change: whoever has others has another entry."""

    __slots__ = ("group", "last_used", "n_tokens", "node", "owner")

    def __init__(self, owner: Any, group: str, node: _Node) -> None:
        self.owner = owner
        self.group = group
        self.node = node
        """Where its tokens end."""
        self.n_tokens = node.end
        self.last_used = 0
        """Counts uses: the smallest is the least recently used. 0: it has no age."""


class _Node:
    """A run of tokens behind its parent's; some entries end where it ends, or it has several
    children."""

    __slots__ = ("by_age", "children", "end", "entries", "n_aged", "parent", "run")

    def __init__(self, parent: _Node | None, run: bytes) -> None:
        self.parent = parent
        self.run = run
        self.end: int = n_tokens(run) + (parent.end if parent else 0)
        """Tokens from the root to its end."""
        self.children: dict[bytes, _Node] = {}
        """The nodes right below, by the first token of their runs."""
        self.entries: set[IndexEntry] = set()
        """The entries that end here."""
        self.n_aged = 0
        """Entries that end here or below, and have an age."""
        self.by_age: deque[tuple[int, IndexEntry]] = deque()
        """Uses of the entries, and older uses."""

    def up(self) -> Iterator[_Node]:
        """The node, its parent, and so on up to the root."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[IndexEntry]:
        """The entries that end here or below."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            yield from node.entries

    def use(self, entry: IndexEntry) -> None:
        """An entry that ends here or below was used last."""
        self.by_age.append((entry.last_used, entry))
        if len(self.by_age) > _USES_KEPT * self.n_aged + _USES_MORE:
            self.by_age = deque(use for use in self.by_age if use[1].last_used == use[0])

    def oldest(self) -> IndexEntry:
        """The least recently used of those; there is one."""
        while self.by_age[0][0] != self.by_age[0][1].last_used:
            self.by_age.popleft()
        return self.by_age[0][1]


class Match:
    """Where a prompt's tokens lead to. Good until the index changes."""

    def __init__(self, path: list[tuple[_Node, int]], n_wanted: int) -> None:
        """`path` are nodes from the root on, each with how many tokens match up to there."""
        self._path = path
        self._n_wanted = n_wanted
        self._found = dict(path)

    def n_shared(self, entry: IndexEntry) -> int:
        """The first tokens that an entry has in common with the prompt; none if it is of another
        group."""
        return next((self._found[node] for node in entry.node.up() if node in self._found), 0)

    def longest(self) -> tuple[int, IndexEntry | None]:
        """The entry with an age that shares most tokens, and how many; of several, the least
        recently used. None if that is nothing."""
        for node, n_shared in reversed(self._path):
            if n_shared and node.n_aged:
                return n_shared, node.oldest()
        return 0, None

    def beginning(self) -> list[IndexEntry]:
        """All entries that begin with all the tokens."""
        return list(self._path[-1][0].below()) if self._whole else []

    @property
    def is_stored(self) -> bool:
        """Whether an entry with an age begins with all the tokens."""
        return self._whole and self._path[-1][0].n_aged > 0

    def begun(self) -> list[IndexEntry]:
        """All entries that have only first tokens of these, or just these."""
        whole = (node for node, n_shared in self._path if n_shared == node.end)
        return [entry for node in whole for entry in node.entries]

    @property
    def _whole(self) -> bool:
        return bool(self._path) and self._path[-1][1] == self._n_wanted


class PrefixIndex:
    """The tokens of all slots and stores of one engine, by cache group and content. One thread.

    To find what matches a prompt, or to add or remove an entry, takes microseconds for each node on its way
    and for every few thousand tokens, however many entries there are.
    """

    def __init__(self) -> None:
        self.version = 0
        """Changes with every entry that comes or goes."""
        self._roots: dict[str, _Node] = {}
        self._clock = 0

    def match(self, group: str, tokens: Tokens, n_wanted: int | None = None) -> Match:
        """Find what the group's entries have of the first `n_wanted` of these tokens, or of all."""
        told = packed(tokens)
        n = n_tokens(told) if n_wanted is None else n_wanted
        return Match(self._path(group, told, n), n)

    def add(self, owner: Any, group: str, tokens: Tokens) -> IndexEntry:
        """A new entry of that group; it has no age until it is used."""
        packed_tokens = packed(tokens)
        self._roots.setdefault(group, _Node(None, b""))
        node, n_shared = self._path(group, packed_tokens, n_tokens(packed_tokens))[-1]
        if n_shared < node.end:
            node = self._split(node, n_shared)
        if n_shared < n_tokens(packed_tokens):
            node = self._append(node, packed_tokens[n_shared * TOKEN_BYTES :])
        entry = IndexEntry(owner, group, node)
        node.entries.add(entry)
        self.version += 1
        return entry

    def use(self, entry: IndexEntry) -> None:
        """Make it the most recently used of those with an age."""
        self._clock += 1
        is_new, entry.last_used = not entry.last_used, self._clock
        for node in entry.node.up():
            node.n_aged += is_new
            node.use(entry)

    def remove(self, entry: IndexEntry) -> None:
        """Remove an entry."""
        for node in entry.node.up() if entry.last_used else ():
            node.n_aged -= 1
        entry.last_used, entry.owner = 0, None  # nodes may remember its uses
        entry.node.entries.remove(entry)
        self._prune(entry)
        self.version += 1

    def _path(self, group: str, tokens: bytes, n_wanted: int) -> list[tuple[_Node, int]]:
        """The nodes along so many of these tokens, each with how many match up to there."""
        node, n, end = self._roots.get(group), 0, n_wanted * TOKEN_BYTES
        path = []
        while node is not None:
            n += n_matching(node.run, tokens, n * TOKEN_BYTES, end)
            path.append((node, n))
            more = n == node.end and n < n_wanted
            node = node.children.get(_first(tokens, n)) if more else None
        return path

    def _append(self, parent: _Node, run: bytes) -> _Node:
        node = parent.children[_first(run)] = _Node(parent, run)
        return node

    def _split(self, node: _Node, n_shared: int) -> _Node:
        """A node that ends after so many tokens, where this one has more; this one comes behind it."""
        parent, at = node.parent, (n_shared - node.end) * TOKEN_BYTES
        upper = _Node(parent, node.run[:at])
        upper.n_aged, upper.by_age = node.n_aged, node.by_age.copy()
        if parent is not None:
            parent.children[_first(node.run)] = upper
        node.parent, node.run = upper, node.run[at:]
        upper.children[_first(node.run)] = node
        return upper

    def _prune(self, entry: IndexEntry) -> None:
        """Drop the nodes that are none any more without an entry that was there."""
        node, parent = entry.node, entry.node.parent
        while parent is not None and not node.entries and not node.children:
            del parent.children[_first(node.run)]
            node, parent = parent, parent.parent
        if parent is None and not node.entries and not node.children:
            del self._roots[entry.group]
        elif parent is not None and not node.entries and len(node.children) == 1:
            (child,) = node.children.values()
            parent.children[_first(node.run)] = child
            child.parent, child.run = parent, node.run + child.run


def _first(tokens: bytes, n_before: int = 0) -> bytes:
    return tokens[n_before * TOKEN_BYTES : (n_before + 1) * TOKEN_BYTES]

"""The blocks of a paged KV cache, by the sequences whose tokens they hold. Pure.

Sequences that begin alike share the blocks of their beginning. A block that others have, too, is copied
before a sequence writes into it. Source: "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., 2023), section 4.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from serve_app.base.errors import CacheFullError

BLOCK = 32
"""Tokens of a block. OpenVINO's kernels for CPUs know this size only."""


class BlockTables:
    """The blocks of each sequence, in order, out of those that are given. One thread at a time."""

    def __init__(self, n_sequences: int, blocks: range) -> None:
        self._free = list(blocks)
        self._n_users = Counter[int]()
        self._tables: list[list[int]] = [[] for _ in range(n_sequences)]
        self._lengths = [0] * n_sequences

    def length(self, sequence: int) -> int:
        """Tokens that it has."""
        return self._lengths[sequence]

    def blocks(self, sequence: int) -> list[int]:
        """The blocks that hold the sequence's tokens. Do not change it."""
        return self._tables[sequence]

    @property
    def n_free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def extend(self, more: Mapping[int, int]) -> list[tuple[int, int]]:
        """Make room for so many tokens more of these sequences. Returns the blocks that are to be copied,
        each with its copy. Raises CacheFullError, and changes nothing, if there are too few."""
        if self._n_needed(more) > len(self._free):
            raise CacheFullError("The KV cache has no room for this batch.")
        copies = []
        for sequence, n in more.items():
            if self._writes_within(sequence, n) and self._n_users[self._tables[sequence][-1]] > 1:
                copies.append(self._own_last(sequence))
            self._lengths[sequence] += n
            table = self._tables[sequence]
            while len(table) * BLOCK < self._lengths[sequence]:
                table.append(self._take())
        return copies

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Keep its first `n_tokens`; more than it has changes nothing."""
        n_tokens = min(n_tokens, self._lengths[sequence])
        table = self._tables[sequence]
        while (len(table) - 1) * BLOCK >= n_tokens and table:
            self._drop(table.pop())
        self._lengths[sequence] = n_tokens

    def share(self, source: int, target: int) -> None:
        """Make the target a copy of the source, whatever it held."""
        if source == target:
            return
        self.truncate(target, 0)
        self._tables[target] = list(self._tables[source])
        for block in self._tables[target]:
            self._n_users[block] += 1
        self._lengths[target] = self._lengths[source]

    def _n_needed(self, more: Mapping[int, int]) -> int:
        n_needed, left = 0, Counter[int]()
        for sequence, n_tokens in more.items():
            table = self._tables[sequence]
            n_needed += -(-(self._lengths[sequence] + n_tokens) // BLOCK) - len(table)
            is_within = self._writes_within(sequence, n_tokens)
            if is_within and self._n_users[table[-1]] - left[table[-1]] > 1:
                n_needed += 1
                left[table[-1]] += 1  # the last of those that share it keeps it
        return n_needed

    def _writes_within(self, sequence: int, n_tokens: int) -> bool:
        return n_tokens > 0 and self._lengths[sequence] % BLOCK > 0

    def _own_last(self, sequence: int) -> tuple[int, int]:
        table = self._tables[sequence]
        source, table[-1] = table[-1], self._take()
        self._drop(source)
        return source, table[-1]

    def _take(self) -> int:
        block = self._free.pop()
        self._n_users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._n_users[block] -= 1
        if not self._n_users[block]:
            self._free.append(block)

"""Prefixes of prompts, by cache group, and sorted lists of them. Pure: no model, no threads, no clock.

Prompts are packed (`serve_app.engine.cache.packing.pack`), four bytes a token: sorted, those of
one cache group that begin alike stand together. So what shares most tokens with a prompt stands beside
its place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from serve_app.base.values.adapters import may_start_from
from serve_app.engine.cache.packing import TOKEN_BYTES, common_prefix


class Prefix(NamedTuple):
    """Tokens that prompts of one cache group begin with."""

    group: str
    """The cache group; SHARED_GROUP for what is pinned."""
    tokens: bytes
    """Packed."""

    def cut(self, n_bytes: int) -> Prefix:
        return Prefix(self.group, self.tokens[:n_bytes])

    def serves(self, prefix: Prefix) -> bool:
        """Whether a prompt that begins with those tokens finds them all here."""
        return n_shared(prefix, self) == len(prefix.tokens)


def n_shared(prefix: Prefix, held: Prefix) -> int:
    """Bytes of the first tokens that a prompt which begins with `prefix` finds in `held`."""
    if not may_start_from(prefix.group, held.group):
        return 0
    n = common_prefix(prefix.tokens, held.tokens)
    return n - n % TOKEN_BYTES


def nearest(ordered: Sequence[Prefix], prefix: Prefix) -> tuple[int, Prefix | None]:
    """The prefix in a sorted list that shares most first tokens with another one of its cache group, and
    their bytes; None if none shares any."""
    i = bisect_left(ordered, prefix)
    beside = [one for one in ordered[max(0, i - 1) : i + 1] if one.group == prefix.group]
    n, best = max(((n_shared(prefix, one), one) for one in beside), default=(0, None))
    return n, best if n else None


def beginning(ordered: Sequence[Prefix], prefix: Prefix) -> slice:
    """The range of a sorted list where those stand that begin with these tokens."""
    first = bisect_left(ordered, prefix)
    n = len(prefix.tokens)
    return slice(first, bisect_right(ordered, prefix, lo=first, key=lambda one: one.cut(n)))

"""Finds the common beginnings of prompts that are worth most to another engine. Pure: no Ray, no model.

Prompts are packed (`serve_app.engine.kv_cache.packing.packed`), four bytes a token: sorted, those of
one cache group that begin alike stand together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from serve_app.engine.kv_cache.packing import TOKEN_BYTES, common_prefix
from serve_app.types import may_start_from

MAX_PREFIXES = 32
"""Most prefixes that one engine gets from others at once."""
# Computing fewer tokens than this costs next to nothing.
_LEAST_BYTES = 32 * TOKEN_BYTES


class Prefix(NamedTuple):
    """Tokens that prompts of one cache group begin with."""

    group: str
    """The cache group; SHARED_GROUP for what is pinned."""
    tokens: bytes
    """Packed."""

    def cut(self, n_bytes: int) -> Prefix:
        """The prefix's first tokens."""
        return Prefix(self.group, self.tokens[:n_bytes])

    def serves(self, prefix: Prefix) -> bool:
        """Whether a prompt that begins with those tokens finds them all here."""
        return n_shared(prefix, self) == len(prefix.tokens)


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning of prompts, and what having it costs."""

    prefix: Prefix
    n_begun: int
    """How many of the last prompts began with it."""
    n_bytes: int
    """The bytes of the smallest state that it can be taken from."""


def n_shared(prefix: Prefix, held: Prefix) -> int:
    """Bytes of the first tokens that a prompt which begins with `prefix` finds in `held`."""
    if not may_start_from(prefix.group, held.group):
        return 0
    n = common_prefix(prefix.tokens, held.tokens)
    return n - n % TOKEN_BYTES


def begun_with(
    prompts: Iterable[Prefix], held: Iterable[tuple[Prefix, int]], least: int
) -> list[HotPrefix]:
    """Prompts, and what several of one cache group have in common, as far as a slot or a store of the
    group holds it: those that at least so many prompts began with. `held` come with the bytes of
    their states."""
    begun, holders = sorted(prompts), sorted(held)
    known = [prefix for prefix, _ in holders]
    found = set(begun) | {prefix.cut(n_shared(prefix, other)) for prefix, other in pairwise(begun)}
    hot = []
    for prefix in {prefix.cut(_n_held(known, prefix)) for prefix in found}:
        first, last = _range(begun, prefix)
        if len(prefix.tokens) >= _LEAST_BYTES and last - first >= least:
            smallest = min(n_bytes for _, n_bytes in holders[slice(*_range(known, prefix))])
            hot.append(HotPrefix(prefix, last - first, smallest))
    return hot


def hottest(
    offered: Iterable[HotPrefix], held: Sequence[Prefix], budget_bytes: int
) -> list[HotPrefix]:
    """The prefixes to take into so many bytes, the best first, given those already held.

    Each time, that which saves the most tokens for its bytes: what it has and nothing taken before
    has, as often as prompts began with it lately. A prefix of a longer offer that is taken is not
    taken again.
    """
    shared = {
        offer: max((n_shared(offer.prefix, known) for known in held), default=0)
        for offer in offered
    }
    chosen: list[HotPrefix] = []
    while len(chosen) < MAX_PREFIXES:
        room = budget_bytes - sum(offer.n_bytes for offer in chosen)
        shared = {
            offer: n
            for offer, n in shared.items()
            if offer.n_bytes <= room and len(offer.prefix.tokens) - n >= _LEAST_BYTES
        }
        if not shared:
            break
        best = max(
            shared,
            key=lambda offer: (
                offer.n_begun * (len(offer.prefix.tokens) - shared[offer]) / max(1, offer.n_bytes),
                offer.prefix,
            ),
        )
        chosen = [offer for offer in chosen if not best.prefix.serves(offer.prefix)]
        chosen.append(best)
        for offer in shared:
            shared[offer] = max(shared[offer], n_shared(offer.prefix, best.prefix))
    return sorted(chosen, key=lambda offer: -offer.n_begun)


def _n_held(known: list[Prefix], prefix: Prefix) -> int:
    """Bytes of the first tokens that the group holds; `known` is sorted, so one of its neighbours
    does."""
    i = bisect_left(known, prefix)
    around = (one for one in known[max(0, i - 1) : i + 1] if one.group == prefix.group)
    return max((n_shared(prefix, one) for one in around), default=0)


def _range(ordered: list[Prefix], prefix: Prefix) -> tuple[int, int]:
    """Where in a sorted list those are that begin with these tokens."""
    first = bisect_left(ordered, prefix)
    n = len(prefix.tokens)
    return first, bisect_right(ordered, prefix, lo=first, key=lambda one: one.cut(n))

"""Finds the common beginnings of prompts that are worth most to another engine. Pure: no Ray, no model.

Prompts are packed (`serve_app.engine.kv_cache.state_format.packed`), four bytes a token: sorted, those
that begin alike stand together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from serve_app.engine.kv_cache.slots import common_prefix
from serve_app.engine.kv_cache.state_format import TOKEN_BYTES

MAX_PREFIXES = 32
"""Most prefixes that one engine gets from others at once."""
# Computing fewer tokens than this costs next to nothing.
_LEAST_BYTES = 32 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning of prompts, and what having it costs."""

    tokens: bytes
    n_begun: int
    """How many of the last prompts began with it."""
    n_bytes: int
    """Of the smallest state that it can be taken from."""


def n_shared(a: bytes, b: bytes) -> int:
    """Bytes of the first tokens that both have."""
    n = common_prefix(a, b)
    return n - n % TOKEN_BYTES


def begun_with(
    prompts: Iterable[bytes], held: Iterable[tuple[bytes, int]], least: int
) -> list[HotPrefix]:
    """Prompts, and what several of them have in common, as far as somebody holds it: those that at least
    so many prompts began with. `held` are tokens, and the bytes of the state that has them."""
    begun, holders = sorted(prompts), sorted(held)
    known = [tokens for tokens, _ in holders]
    found = set(begun) | {one[: n_shared(one, other)] for one, other in pairwise(begun)}
    hot = []
    for tokens in {one[: _n_held(known, one)] for one in found}:
        first, last = _range(begun, tokens)
        if len(tokens) >= _LEAST_BYTES and last - first >= least:
            smallest = min(n_bytes for _, n_bytes in holders[slice(*_range(known, tokens))])
            hot.append(HotPrefix(tokens, last - first, smallest))
    return hot


def hottest(
    offered: Iterable[HotPrefix], held: Sequence[bytes], budget_bytes: int
) -> list[HotPrefix]:
    """What to take of that into so many bytes, the best first, by somebody who holds something already.

    Each time, that which saves the most tokens for its bytes: what it has and nothing taken before has, as
    often as prompts began with it lately. What a longer one has as well is not taken twice.
    """
    shared = {
        one: max((n_shared(one.tokens, known) for known in held), default=0) for one in offered
    }
    chosen: list[HotPrefix] = []
    while len(chosen) < MAX_PREFIXES:
        room = budget_bytes - sum(one.n_bytes for one in chosen)
        shared = {
            one: n
            for one, n in shared.items()
            if one.n_bytes <= room and len(one.tokens) - n >= _LEAST_BYTES
        }
        if not shared:
            break
        best = max(
            shared,
            key=lambda one: (
                one.n_begun * (len(one.tokens) - shared[one]) / max(1, one.n_bytes),
                one.tokens,
            ),
        )
        chosen = [one for one in chosen if not best.tokens.startswith(one.tokens)]
        chosen.append(best)
        for one in shared:
            shared[one] = max(shared[one], n_shared(one.tokens, best.tokens))
    return sorted(chosen, key=lambda one: -one.n_begun)


def _n_held(known: list[bytes], tokens: bytes) -> int:
    """Bytes of the first tokens that somebody holds; `known` is sorted, so one of its neighbours does."""
    i = bisect_left(known, tokens)
    return max((n_shared(one, tokens) for one in known[max(0, i - 1) : i + 1]), default=0)


def _range(ordered: list[bytes], tokens: bytes) -> tuple[int, int]:
    """Where in a sorted list those are that begin with these tokens."""
    first = bisect_left(ordered, tokens)
    return first, bisect_right(ordered, tokens, lo=first, key=lambda one: one[: len(tokens)])

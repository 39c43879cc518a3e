"""Cuts the candidates of a draw to those that llama.cpp's samplers can still pick. Pure, any thread.

llama.cpp makes twelve bytes of each of the vocabulary's logits and goes over them several times. Numpy
finds the few that count in one or two passes over the logits themselves. A cut is only made where the
draw from it is the same, bit for bit. The candidates that are left are those that the samplers would
leave, in the same order. A cut that is not certain is None, and the whole vocabulary is sampled.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Tokens = NDArray[np.intp]

# How often the logits are folded, and then the highest ones of what lay upon each other, to bound the n-th
# highest. They are folded less often if many are wanted.
_FOLDS = ((32, 8), (8, 8), (8, 1))
# The bound is close enough as long as there are so many folded ones for each that is wanted.
_SPARE = 4
# Candidates behind which top_p is looked for in turn, as parts of the highest probability.
_FLOORS = (0.02, 1e-3, 1e-5)
SMALL = 24_576
"""The vocabulary in which llama.cpp finds the k highest tokens sooner; in smaller ones, too."""
# A cut that leaves more than this part of the vocabulary saves nothing.
_WORTH = 1 / 4
# Half a unit in the last place of a float32, as a part: the most that one operation on floats is off.
_ROUNDING = 2.0**-24
# What exp may be off, here and in any C library, as a part, and numpy's own sum.
_EXP = 64 * _ROUNDING


class Cut(NamedTuple):
    """Candidates, and what is next behind them."""

    tokens: Tokens
    logits: Logits
    """The logits of `tokens`."""
    n_kept: int
    """The number of candidates that are left. Those behind only show whether one has the same logit."""
    ordered: bool
    """Whether the highest logits come first; else they are in the order of token ids."""

    def is_tied(self, token: int) -> bool:
        """Whether another of the candidates has the same logit: which of the two comes first is then
        only known to the sort that llama.cpp uses."""
        return int((self.logits == self.logits[self.tokens == token]).sum()) > 1

    def among(self, allowed: NDArray[np.bool_], *, whole: bool) -> Cut | None:
        """The candidates that are allowed, and with `whole` the others behind them, with -inf."""
        is_allowed = allowed[self.tokens]
        tokens, logits = self.tokens[is_allowed], self.logits[is_allowed]
        if not tokens.size or not math.isfinite(logits[0]):
            return None
        if whole:
            others = self.tokens[~is_allowed]
            tokens = np.concatenate((tokens, others))
            logits = np.concatenate((logits, np.full(others.size, -np.inf, np.float32)))
        return Cut(tokens, logits, tokens.size, self.ordered)

    @property
    def has_ties(self) -> bool:
        """Whether the order of the candidates is in doubt."""
        return self.ordered and bool((self.logits[1:] == self.logits[:-1]).any())


def highest(logits: Logits, n: int) -> tuple[Tokens, Logits] | None:
    """The n highest logits and their tokens, highest first; fewer if all others are -inf. None if n is
    not a small part of all, or if there are logits that are no numbers.

    The n-th highest of the highest ones of n parts is at most the n-th highest of all.
    """
    if not 0 < n <= _WORTH * logits.size:
        return None
    sizes = _folds(logits.size, n)
    if sizes is None:
        return _partition(logits, n)
    folds, again = sizes
    width = logits.size // folds
    folded = logits[: folds * width].reshape(folds, width)
    tops = np.maximum.reduce(folded)
    if not math.isfinite(np.maximum.reduce(tops)):
        return None
    few = np.maximum.reduce(tops[: width // again * again].reshape(again, -1))
    few.partition(few.size - n)
    bound = few[few.size - n]
    if bound == -np.inf:
        return _sort(logits, np.flatnonzero(logits > bound), n)
    tokens = _at_least(folded, tops, bound)
    if folds * width < logits.size:
        rest = np.flatnonzero(logits[folds * width :] >= bound) + folds * width
        tokens = np.concatenate((tokens, rest))
    return _sort(logits, tokens, n)


def highest_distinct(logits: Logits, n: int) -> tuple[Tokens, Logits] | None:
    """The n highest logits and their tokens, as `highest` gives them. None if two are equal: which of them
    llama.cpp puts first depends on all other logits."""
    likeliest = highest(logits, n)
    if likeliest is None or (likeliest[1][1:] == likeliest[1][:-1]).any():
        return None
    return likeliest


def _partition(logits: Logits, n: int) -> tuple[Tokens, Logits] | None:
    """The n highest logits and their tokens, as `highest` gives them."""
    if not math.isfinite(logits.max()):
        return None
    bound = np.partition(logits, logits.size - n)[logits.size - n]
    tokens = np.flatnonzero(logits > bound if bound == -np.inf else logits >= bound)
    return _sort(logits, tokens, n)


@cache
def _folds(n_vocab: int, n: int) -> tuple[int, int] | None:
    return next((one for one in _FOLDS if _SPARE * n <= n_vocab // (one[0] * one[1])), None)


def _at_least(folded: Logits, tops: Logits, bound: np.float32) -> Tokens:
    """The tokens of the folded logits from the bound on: they are in columns whose top is."""
    columns = np.flatnonzero(tops >= bound)
    rows, found = np.divmod(np.flatnonzero(folded.take(columns, axis=1) >= bound), columns.size)
    return rows * tops.size + columns[found]


def _sort(logits: Logits, tokens: Tokens, n: int | None = None) -> tuple[Tokens, Logits]:
    """The tokens and their logits, highest first; the first n."""
    found = logits[tokens]
    order = np.argsort(-found)[:n]
    return tokens[order], found[order]


def none(_logits: Logits) -> Cut | None:
    """No cut: what is left depends on all logits at once."""
    return None


def sort_all(logits: Logits, *, whole: bool = False) -> Cut | None:
    """All tokens, highest first. llama.cpp takes several times as long to sort them. If most are banned, as
    by a grammar, these are left out, unless the `whole` vocabulary counts."""
    allowed = logits > -np.inf
    if not whole and 0 < np.count_nonzero(allowed) <= _WORTH * logits.size:
        tokens, highest_first = _sort(logits, np.flatnonzero(allowed))
    else:
        tokens = np.argsort(-logits)
        highest_first = logits[tokens]
    return (
        Cut(tokens, highest_first, tokens.size, ordered=True)
        if math.isfinite(highest_first[0])
        else None
    )


def greedy(logits: Logits) -> Cut | None:
    """The first of the highest logits."""
    token = np.array([logits.argmax()])
    found = logits[token]
    return Cut(token, found, 1, ordered=True) if math.isfinite(found[0]) else None


def top_k(logits: Logits, k: int, *, whole: bool = False) -> Cut | None:
    """The tokens that `top_k` leaves. If fewer than k are not -inf, the result is these, or None with
    `whole`. Those with -inf are never drawn, but `typical` does not look at them like that."""
    candidates = highest(logits, k + 1)
    if candidates is None or (whole and candidates[0].size < k):
        return None
    return Cut(*candidates, min(k, candidates[0].size), ordered=True)


def min_p(logits: Logits, share: float) -> Cut | None:
    """The tokens that `min_p` leaves, and perhaps the next ones. `share` is more than 0."""
    top = float(logits.max())
    tokens = _likely(logits, top, share)
    return None if tokens is None else Cut(tokens, logits[tokens], tokens.size, ordered=False)


def top_p(logits: Logits, mass: float, share: float) -> Cut | None:
    """The tokens that `top_p`, and after it `min_p`, leave, and perhaps the next ones that are too
    unlikely for `min_p`. None where rounding decides: llama.cpp adds up floats, one by one."""
    top = float(logits.max())
    if not math.isfinite(top):
        return None
    weights = logits - np.float32(top)
    np.exp(weights, out=weights)
    for floor in _FLOORS:
        tokens = _likely(logits, top, max(floor, share))
        if tokens is None:
            return None
        candidates = _sort(logits, tokens)
        n_kept = _nucleus(weights, candidates[0], mass, all_left=floor <= share)
        if n_kept is not None:
            return Cut(*candidates, n_kept, ordered=True)
        if floor <= share:
            return None
    return None


def _likely(logits: Logits, top: float, share: float) -> Tokens | None:
    """The tokens that have at least this share of the highest one's probability, and those that may have
    it but for rounding. None if these are too many, or the logits are no numbers."""
    if not math.isfinite(top):
        return None
    wanted = math.log(share)
    lowest = top + wanted - 8 * _ROUNDING * (abs(top) - wanted)
    tokens = np.flatnonzero(logits >= np.float32(lowest))
    return tokens if tokens.size <= _WORTH * logits.size else None


def _nucleus(weights: Logits, tokens: Tokens, mass: float, *, all_left: bool) -> int | None:
    """How many of these tokens, likeliest first, llama.cpp needs for so much of the mass. `weights` are the
    probabilities of all tokens, but for a factor. None if it is not certain, or they have less. With
    `all_left`, who is behind these tokens does not matter."""
    total = float(weights.sum())
    reached = np.cumsum(weights[tokens], dtype=np.float64) / total
    added = np.arange(1, tokens.size + 1) * _ROUNDING
    for doubt in (_crude_doubt, _doubt):
        off = reached * (doubt(weights, total) + added)
        first, last = _first(reached + off >= mass), _first(reached - off >= mass)
        if all_left:
            first, last = min(first, tokens.size - 1), min(last, tokens.size - 1)
        if first == last and first < tokens.size:
            return first + 1
    return None


def _crude_doubt(weights: Logits, _total: float) -> float:
    """The most that llama.cpp's sum of the weights may be off, as a part, however they are."""
    return 1.05 * weights.size * _ROUNDING + _EXP


def _doubt(weights: Logits, total: float) -> float:
    """The doubt about a sum of these weights: adding a weight is off by no more than the weight itself."""
    return 1.05 * float(np.minimum(weights, np.float32(_ROUNDING * total)).sum()) / total + _EXP


def _first(where: NDArray[np.bool_]) -> int:
    """The first index at which it holds; else the length."""
    found = int(where.argmax())
    return found if where[found] else where.size

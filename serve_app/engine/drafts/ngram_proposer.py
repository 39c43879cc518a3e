"""Prompt lookup: drafts tokens from a sequence's own text. Pure: no model, no threads, no clock.

The text that followed the last three tokens when they last occurred may follow again: in answers
that quote, edit or repeat. Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

_N_GRAM = 3
MAX_INDEXED = 1024
"""Tokens that one step should index at most: in a third of a millisecond."""
_FIRST_GUESS = 0.5
# Weight of the newest drafted token in the running rate.
_NEWEST = 0.1
# How fast a bad rate is forgotten, at each chance that was not taken: the text may have changed.
_FORGIVING = 0.01


class NgramProposer:
    """Proposes drafts from one sequence's n-grams. Decoder thread only."""

    def __init__(self) -> None:
        self.acceptance = _FIRST_GUESS
        """Running rate of drafted tokens that were right."""
        self.forget()

    def draft(
        self, tokens: Sequence[int], n_most: int, max_indexed: int = MAX_INDEXED
    ) -> tuple[int, ...]:
        """Up to `n_most` tokens that may follow; none if the last ones are new. `tokens` may only have
        grown since the last call. Of a text that is longer than `max_indexed`, the first calls know only
        the last tokens: each one indexes so many more."""
        self._index(tokens, max_indexed)
        start = self._after.get(tuple(tokens[-_N_GRAM:]))
        if start is None or n_most < 1:
            return ()
        return tuple(tokens[start : start + n_most])

    def forget(self) -> None:
        """The tokens changed otherwise."""
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed: range | None = None
        """Positions whose n-grams, the tokens before them, are known."""

    def _index(self, tokens: Sequence[int], n_most: int) -> None:
        """Index so many positions: new ones, then older ones, the newest of those first."""
        known = self._indexed or range(max(_N_GRAM, len(tokens)), max(_N_GRAM, len(tokens)))
        end = max(known.stop, min(len(tokens), known.stop + n_most))
        self._after.update(_n_grams(tokens, known.stop, end))
        first = max(_N_GRAM, known.start - n_most + end - known.stop)
        for n_gram, position in _n_grams(tokens, first, known.start).items():
            self._after.setdefault(n_gram, position)
        self._indexed = range(first, end)

    def expected(self, n_drafted: int) -> float:
        """Tokens that a batch over so many drafted ones, and the one before them, is worth."""
        return float(sum(self.acceptance**n for n in range(n_drafted + 1)))

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """Learn from a draft of which the first `n_accepted` were right; the rest went unseen."""
        for _ in range(n_accepted):
            self.acceptance += _NEWEST * (1 - self.acceptance)
        if n_accepted < n_drafted:
            self.acceptance -= _NEWEST * self.acceptance

    def unused(self) -> None:
        """A draft was not used."""
        self.acceptance += _FORGIVING * (_FIRST_GUESS - self.acceptance)


def _n_grams(tokens: Sequence[int], first: int, end: int) -> dict[tuple[int, ...], int]:
    """The n-grams before these positions, and the last position of each."""
    part = tokens[first - _N_GRAM : end - 1]
    n_grams = zip(*(part[i:] for i in range(_N_GRAM)), strict=False)
    return dict(zip(n_grams, range(first, end), strict=False))

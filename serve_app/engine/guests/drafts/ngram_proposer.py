"""Prompt lookup: drafts tokens from a sequence's own text. Pure: no model, no threads, no clock.

The text that followed the last three tokens when they last occurred may follow again: in answers
that quote, edit or repeat. Source: Saxena, "Prompt Lookup Decoding", 2023. Where that text ends with
the newest token, it is thought to go round: rows of a table and lines of dashes do. Source: Ziv and Lempel,
"A Universal Algorithm for Sequential Data Compression", 1977, whose copies overlap alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from serve_app.engine.guests.drafts.rates import AcceptanceRate

_N_GRAM = 3
MAX_INDEXED = 1024
"""Tokens that one step should index at most: in a third of a millisecond."""
_LIKELY = 0.5
"""The rate of right tokens that is expected of text before anything is known of it."""


class NgramProposer:
    """Proposes drafts from one sequence's n-grams. Decoder thread only."""

    def __init__(self) -> None:
        self.rate = AcceptanceRate(_LIKELY)
        self._guess: tuple[int, int] | None = None
        """The place of the first token of the last draft, and the token; None once it was learned from."""
        self.forget()

    def draft(
        self, tokens: Sequence[int], n_most: int, max_indexed: int = MAX_INDEXED
    ) -> tuple[int, ...]:
        """The tokens that may follow, `n_most` at most; none if the last ones are new. `tokens` may only
        have grown since the last call. If a text is longer than `max_indexed`, the first calls know only
        its last tokens: each one indexes so many more.

        A draft that nobody verifies costs nothing, and is learned from, too: by the token that came."""
        self._learn(tokens)
        self._index(tokens, max_indexed)
        start = self._after.get(tuple(tokens[-_N_GRAM:]))
        if start is None or n_most < 1:
            return ()
        self._guess = len(tokens), tokens[start]
        return tuple(islice(cycle(tokens[start : start + n_most]), n_most))

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """Learn from a draft of which the first `n_accepted` tokens were right."""
        self._guess = None
        self.rate.record(n_drafted, n_accepted)

    def _learn(self, tokens: Sequence[int]) -> None:
        if self._guess is not None and self._guess[0] < len(tokens):
            place, guessed = self._guess
            self.rate.record(1, int(tokens[place] == guessed))
        self._guess = None

    def forget(self) -> None:
        """The tokens changed otherwise."""
        self._guess = None
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


def _n_grams(tokens: Sequence[int], first: int, end: int) -> dict[tuple[int, ...], int]:
    part = tokens[first - _N_GRAM : end - 1]
    n_grams = zip(*(part[i:] for i in range(_N_GRAM)), strict=False)
    return dict(zip(n_grams, range(first, end), strict=False))

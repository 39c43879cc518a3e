"""The part of one slot's text in a draft model's cache. Pure: no model, no threads, no clock."""

from __future__ import annotations

from serve_app.engine.core.sequence import Sequence
from serve_app.engine.drafts.rates import SequenceRate
from serve_app.engine.kv_cache.packing import TokenArray

# Tokens at the beginning that are always there: models rest their attention on the first ones.
# Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
N_SINK = 4


class SlotWindow:
    """The first tokens of a text and its last ones, in `n_ctx` cells. Decoder thread only.

    A draft may be wrong, so it need not see all: a long text is fed from its last `n_fed` tokens on, and
    when the cells are full, it is fed so again. So a draft model never costs more than that at once.

    With `own_layers`, what is fed of a text is the other model's hidden states. Then guesses are never the
    text's, as they were made without these, and a window may begin anywhere, without the first tokens.
    """

    def __init__(self, n_ctx: int, *, own_layers: bool = False) -> None:
        self._n_ctx = n_ctx
        self._n_fed = n_ctx // 2
        self._n_sink = 0 if own_layers else N_SINK
        self._keeps_guesses = not own_layers
        self.cells: list[int] = []
        """The tokens in the cache."""
        self.n_kept = 0
        """The tokens that are the text's."""
        self.rate: SequenceRate | None = None
        """The rate of the sequence that the text is of."""
        self.proposed = 0
        """Tokens that were proposed for the step that is planned."""
        self.token_s = 0.0
        """The seconds that each proposed token is worth, if they are only tried."""
        self._owner = ""
        self._source: TokenArray | None = None
        self._n_skipped = 0
        """Tokens of the text behind its first ones that are left out."""

    def owned_by(self, sequence: Sequence) -> bool:
        """Whether its text is that sequence's."""
        return self._owner == sequence.id

    def follow(self, sequence: Sequence, room: int, first: int = 0) -> int:
        """Have the sequence's text, with cells for `room` tokens more; returns how many tokens are to
        be fed, at least its last one. Those before the place `first` in the text cannot be fed."""
        tokens = sequence.tokens
        if self._source is not tokens:
            end = self._n_sink if self._n_skipped else len(self.cells)
            self.n_kept = self._n_alike(tokens, 0, end)
            self._n_skipped, self._source, self._owner = 0, tokens, sequence.id
        else:
            end = len(self.cells) if self._keeps_guesses else self.n_kept
            self.n_kept = self._n_alike(tokens, self.n_kept, end)
        n_text = len(tokens) - self._n_skipped
        if n_text + room > self._n_ctx or n_text - self.n_kept > self._n_fed:
            self._n_skipped = max(0, len(tokens) - self._n_sink - self._n_fed)
            if self._n_skipped:
                self.n_kept = min(self.n_kept, self._n_sink)
        if self._place(self.n_kept) < first:
            self._n_skipped, self.n_kept = first, 0
        return len(tokens) - self._n_skipped - self.n_kept

    def tail(self, n_most: int) -> list[tuple[int, int, int]]:
        """The first tokens that are to be fed, their positions, and their places in the text."""
        tokens = self._source or ()
        end = min(self.n_kept + n_most, len(tokens) - self._n_skipped)
        places = [(i, self._place(i)) for i in range(self.n_kept, end)]
        return [(tokens[place], i, place) for i, place in places]

    def _place(self, i: int) -> int:
        """In the text, of a cell."""
        return i if i < self._n_sink else i + self._n_skipped

    def cut(self) -> bool:
        """Forget what is not the text's; whether there was any."""
        cut = len(self.cells) > self.n_kept
        del self.cells[self.n_kept :]
        return cut

    def fed(self, tokens: list[int], *, guessed: bool = False) -> None:
        """Note tokens that are in the cache now: of the text, or guessed behind it."""
        self.cells += tokens
        if not guessed:
            self.n_kept = len(self.cells)

    def empty(self) -> None:
        """Nothing is in the cache."""
        self.cells.clear()
        self.n_kept, self._n_skipped, self._source = 0, 0, None

    def _n_alike(self, tokens: TokenArray, start: int, end: int) -> int:
        """How many first cells are the text's, of which `start` are known to be; less than all of
        it."""
        cells = self.cells
        end = min(end, len(cells), len(tokens) - self._n_skipped - 1)
        for i in range(start, end):
            if cells[i] != tokens[self._place(i)]:
                return i
        return max(0, end)

"""The part of one slot's text in a draft model's cache. Pure: no model, no threads, no clock."""

from __future__ import annotations

from serve_app.engine.drafts.rates import SequenceRate
from serve_app.engine.kv_cache.packing import TokenArray
from serve_app.engine.sequence import Sequence

# Tokens at the beginning that are always there: models rest their attention on the first ones.
# Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
N_SINK = 4


class SlotWindow:
    """The first tokens of a text and its last ones, in `n_ctx` cells. Decoder thread only.

    A draft may be wrong, so it need not see all: a long text is fed from its last `n_fed` tokens on, and
    when the cells are full, it is fed so again. So a draft model never costs more than that at once.
    """

    def __init__(self, n_ctx: int) -> None:
        self._n_ctx = n_ctx
        self._n_fed = n_ctx // 2
        self.cells: list[int] = []
        """The tokens in the cache."""
        self.n_kept = 0
        """Of them, those that are the text's."""
        self.rate: SequenceRate | None = None
        """The rate of the sequence that the text is of."""
        self.proposed = 0
        """Tokens that were proposed for the step that is planned."""
        self._owner = ""
        self._source: TokenArray | None = None
        self._n_skipped = 0
        """Tokens of the text behind its first ones that are left out."""

    def owned_by(self, sequence: Sequence) -> bool:
        """Whether its text is that sequence's."""
        return self._owner == sequence.id

    def follow(self, sequence: Sequence, room: int) -> int:
        """Have the sequence's text, with cells for `room` tokens more; returns how many tokens are to be
        fed, at least its last one."""
        tokens = sequence.tokens
        if self._source is not tokens:
            self.n_kept = self._n_alike(tokens, 0, N_SINK if self._n_skipped else len(self.cells))
            self._n_skipped, self._source, self._owner = 0, tokens, sequence.id
        else:
            self.n_kept = self._n_alike(tokens, self.n_kept, len(self.cells))
        n_text = len(tokens) - self._n_skipped
        if n_text + room > self._n_ctx or n_text - self.n_kept > self._n_fed:
            self._n_skipped = max(0, len(tokens) - N_SINK - self._n_fed)
            if self._n_skipped:
                self.n_kept = min(self.n_kept, N_SINK)
        return len(tokens) - self._n_skipped - self.n_kept

    def tail(self, n_most: int) -> list[tuple[int, int]]:
        """Of what is to be fed, the first tokens, and their positions."""
        tokens, skipped = self._source or (), self._n_skipped
        end = min(self.n_kept + n_most, len(tokens) - skipped)
        return [(tokens[i if i < N_SINK else i + skipped], i) for i in range(self.n_kept, end)]

    def cut(self) -> bool:
        """Forget what is not the text's; whether there was any."""
        cut = len(self.cells) > self.n_kept
        del self.cells[self.n_kept :]
        return cut

    def fed(self, tokens: list[int], *, guessed: bool = False) -> None:
        """These are in the cache now: of the text, or guessed behind it."""
        self.cells += tokens
        if not guessed:
            self.n_kept = len(self.cells)

    def empty(self) -> None:
        """Nothing is in the cache."""
        self.cells.clear()
        self.n_kept, self._n_skipped, self._source = 0, 0, None

    def _n_alike(self, tokens: TokenArray, start: int, end: int) -> int:
        """How many first cells are the text's, of which `start` are known to be; less than all of it."""
        cells, skipped = self.cells, self._n_skipped
        end = min(end, len(cells), len(tokens) - skipped - 1)
        for i in range(start, end):
            if cells[i] != tokens[i if i < N_SINK else i + skipped]:
                return i
        return max(0, end)

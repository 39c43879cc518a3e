"""Has a draft model propose tokens. Its cache has a window of each slot's text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

from serve_app.base.errors import DecodeError
from serve_app.base.formats import Row
from serve_app.engine.backends.base import GUESSED, DraftModel
from serve_app.engine.cache.packing import TokenArray
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.guests.drafts.rates import AcceptanceRate
from serve_app.engine.health import Progress

# Tokens at the beginning that are always there: models rest their attention on the first ones.
# Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023.
N_SINK = 4


class SlotWindow:
    """The first tokens of a text and its last ones, in `n_ctx` cells. Decoder thread only.

    A draft may be wrong, so it need not see all. A long text is fed from its last `n_fed` tokens on, and
    when the cells are full, it is fed so again. So a draft model never costs more than that at once.

    With `reads_states`, the other model's hidden states are fed. Guesses never become the text's then, as
    they were made without these, and a window may begin anywhere, without the first tokens.
    """

    def __init__(self, n_ctx: int, *, reads_states: bool = False) -> None:
        self._n_ctx = n_ctx
        self._n_fed = n_ctx // 2
        self._n_sink = 0 if reads_states else N_SINK
        self._keeps_guesses = not reads_states
        self.cells: list[int] = []
        self.n_kept = 0
        """The tokens that are the text's."""
        self.rate = AcceptanceRate(0.0)
        """The rate of the sequence that the text is of."""
        self.proposed = 0
        self._owner = ""
        self._source: TokenArray | None = None
        self._n_skipped = 0
        """Tokens of the text behind its first ones that are left out."""

    def __bool__(self) -> bool:
        """Whether it has a text to go on with: a pass that fails empties it."""
        return self._source is not None

    def owned_by(self, sequence: Sequence) -> bool:
        return self._owner == sequence.id

    def follow(self, sequence: Sequence, room: int, first: int = 0) -> int:
        """Have the sequence's text, with cells for `room` tokens more; returns how many tokens are to
        be fed, at least its last one. Those before the place `first` in the text cannot be fed."""
        tokens = sequence.tokens
        end = len(self.cells) if self._keeps_guesses else self.n_kept
        if self._source is not tokens:
            end = self._n_sink if self._n_skipped else end
            self.n_kept = self._n_alike(tokens, 0, end)
            self._n_skipped, self._source, self._owner = 0, tokens, sequence.id
        else:
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
        self.cells.clear()
        self.n_kept, self._n_skipped, self._source = 0, 0, None

    def _n_alike(self, tokens: TokenArray, start: int, end: int) -> int:
        """How many first cells are the text's, of which `start` are known to be; less than all of it."""
        cells = self.cells
        end = min(end, len(cells), len(tokens) - self._n_skipped - 1)
        for i in range(start, end):
            if cells[i] != tokens[self._place(i)]:
                return i
        return max(0, end)


logger = logging.getLogger("corral.engine")

MOST_FED = 16
"""A sequence of which more tokens are to be fed first is not ready for a draft."""
# The rate that is expected of an unknown model. For the rate of all sequences: the weight of the newest
# token, and how fast each step without a draft forgets a bad rate. Forty steps bring back what a wrong
# draft takes from a half, so a bad model is hardly tried.
_LIKELY, _NEWEST_OF_ALL, _FORGIVING_OF_ALL = 0.95, 0.04, 0.001
# Passes that failed, after which the draft model counts as broken.
_MAX_FAILED = 3


class Drafter:
    """Proposes how running sequences may go on: with the tokens that its model finds most likely. Decoder
    thread only.

    Its passes are learnt from, as the engine's own batches are. A pass that fails proposes nothing; after
    several, no more is proposed at all.
    """

    def __init__(
        self,
        model: DraftModel,
        n_slots: int,
        progress: Progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._progress = progress
        self._clock = clock
        self._costs = CostModel(model.profile)
        self._common = AcceptanceRate(_LIKELY, _NEWEST_OF_ALL, _FORGIVING_OF_ALL)
        """The rate of all sequences: what a new one is expected to have."""
        self._windows = [
            SlotWindow(model.n_ctx, reads_states=model.reads_states) for _ in range(n_slots)
        ]
        self._n_failed = 0
        self.spent: list[tuple[Sequence, float]] = []
        """Seconds that passes took since somebody looked, and for whom."""

    def __bool__(self) -> bool:
        """Whether it may be asked: its passes were measured, and it is not broken."""
        return bool(self._costs) and self._n_failed < _MAX_FAILED

    # -- what it would cost and be worth ----------------------------------------------------------

    def begin(self, sequences: SequenceOf[Sequence], room: int) -> dict[str, int]:
        """A step is planned over these: how many tokens of each are to be fed before a draft of up to
        `room` tokens. Those that can have none are left out."""
        behind: dict[str, int] = {}
        for sequence in sequences:
            window = self._windows[sequence.slot_id]
            window.proposed = 0
            if not window.owned_by(sequence):
                window.rate = AcceptanceRate(self._common.acceptance)
            first = self._model.first_fed(sequence.slot_id)
            if first < len(sequence.tokens):
                behind[sequence.id] = window.follow(sequence, room, first)
        return behind

    def rate(self, sequence: Sequence) -> AcceptanceRate:
        """The record of its drafts. After `begin`."""
        return self._windows[sequence.slot_id].rate

    def draft_s(self, n_sequences: int, n_drafted: int, n_fed: int) -> float:
        """Seconds to propose so many tokens for each of so many sequences, `n_fed` tokens fed before."""
        n_past = self._n_cells
        first_s = self._costs.decode_s(n_fed, n_past)
        if n_sequences == 1:
            first_s = self._costs.verify_s(1, n_fed - 1, n_past)
        return first_s + (n_drafted - 1) * self._costs.decode_s(n_sequences, n_past)

    def feed_s(self, n_rows: int) -> float:
        return self._costs.prefill_s(n_rows, self._n_cells)

    @property
    def _n_cells(self) -> int:
        return sum(len(window.cells) for window in self._windows)

    # -- passes -----------------------------------------------------------------------------------

    def propose(
        self, sequences: SequenceOf[Sequence], n_drafted: int
    ) -> dict[str, tuple[int, ...]]:
        """Propose the next `n_drafted` tokens of each of these sequences, by id. They were among those of
        `begin`, and are ready and ordered by slot. Returns nothing if a pass fails."""
        windows = [self._windows[one.slot_id] for one in sequences]
        if not all(windows):
            return {}
        rows: list[Row] = []
        places: list[int] = []
        last_rows: list[int] = []
        for one, window in zip(sequences, windows, strict=True):
            self._feed(one.slot_id, window, MOST_FED, rows, places)
            last_rows.append(len(rows) - 1)
        drafts: list[list[int]] = [[] for _ in sequences]
        while True:
            proposed = self._pass(sequences, rows, places, last_rows)
            if proposed is None:
                return {}
            for draft, token in zip(drafts, proposed, strict=True):
                draft.append(token)
            if len(drafts[0]) == n_drafted:
                break
            rows, last_rows = [], list(range(len(sequences)))
            places = [GUESSED] * len(sequences)
            for one, window, token in zip(sequences, windows, proposed, strict=True):
                rows.append((token, len(window.cells), one.slot_id, True))
                window.fed([token], guessed=True)
        for window in windows:
            window.proposed = n_drafted
        return {one.id: tuple(draft) for one, draft in zip(sequences, drafts, strict=True)}

    def catch_up(self, sequences: SequenceOf[Sequence], within_s: float) -> None:
        """Feed some of what is to be fed of these sequences, in about so many seconds."""
        for one in sequences:
            n_rows = self._model.n_batch
            while n_rows > MOST_FED and self.feed_s(n_rows) > within_s:
                n_rows //= 2
            rows: list[Row] = []
            places: list[int] = []
            self._feed(one.slot_id, self._windows[one.slot_id], n_rows, rows, places)
            if self._pass([one], rows, places, []) is None:
                return
            within_s -= self.feed_s(len(rows))
            if within_s <= 0:
                return

    def _feed(
        self, slot_id: int, window: SlotWindow, n_most: int, rows: list[Row], places: list[int]
    ) -> None:
        """Add rows for what is to be fed of a text, and their places there; the last has logits."""
        if window.cut():
            self._model.truncate(slot_id, len(window.cells))
        fed = window.tail(n_most)
        rows += [(token, position, slot_id, False) for token, position, _ in fed]
        rows[-1] = (*rows[-1][:3], True)
        places += [place for *_, place in fed]
        window.fed([token for token, *_ in fed])

    def _pass(
        self,
        sequences: SequenceOf[Sequence],
        rows: list[Row],
        places: list[int],
        last_rows: list[int],
    ) -> list[int] | None:
        """Compute a batch. Returns the likely token behind each of `last_rows`; None if it failed."""
        n_rows, began = len(rows), self._clock()
        n_past = self._n_cells - n_rows
        try:
            with self._progress.computing(partial(self._costs.batch_s, n_rows, n_past)):
                self._model.decode(rows, places)
            guesses = [self._model.most_likely(row) for row in last_rows]
        except DecodeError as error:
            self._fail(error)
            return None
        seconds = self._clock() - began
        if not last_rows:
            self._costs.observe_prefill(n_rows, n_past, seconds)
        else:
            self._costs.observe_decode(len(last_rows), n_rows, n_past, seconds)
        self.spent += [(one, seconds / len(sequences)) for one in sequences]
        return guesses

    def _fail(self, error: DecodeError) -> None:
        self._n_failed += 1
        logger.error("The draft model failed: %s", error)
        for slot_id, window in enumerate(self._windows):
            self._model.truncate(slot_id, 0)
            window.empty()

    # -- afterwards -------------------------------------------------------------------------------

    def record(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> bool:
        """Learn from a draft of so many tokens, of which the first `n_accepted` were right. Whether
        it was one of these."""
        window = self._windows[sequence.slot_id]
        if window.proposed != n_drafted:
            return False
        window.proposed = 0
        window.rate.record(n_drafted, n_accepted)
        self._common.record(n_drafted, n_accepted)
        return True

    def forgive(self, sequences: SequenceOf[Sequence]) -> None:
        """A step has no proposals for these: they come closer to what all have, no better."""
        for sequence in sequences:
            self.rate(sequence).forgive(self._common.acceptance)
        if sequences:
            self._common.forgive(_LIKELY)

    def take_spent(self) -> list[tuple[Sequence, float]]:
        """The seconds of passes since the last call, with the sequence of each."""
        spent, self.spent = self.spent, []
        return spent

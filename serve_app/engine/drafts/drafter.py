"""Has a draft model propose tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import GUESSED, DraftModel, Row
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.drafts.rates import Allowance, CommonRate, SequenceRate
from serve_app.engine.drafts.window import SlotWindow
from serve_app.engine.health import Progress
from serve_app.errors import DecodeError

logger = logging.getLogger("corral.engine")

# A sequence of which more tokens are to be fed first is not ready for a draft.
_MOST_FED = 16
# Passes that failed, after which the draft model counts as broken.
_MAX_FAILED = 3


class Drafter:
    """Proposes what running sequences may go on with: what its model finds most likely. Decoder
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
        self._common = CommonRate()
        self.allowance = Allowance()
        """For drafts that are only tried."""
        self._windows = [
            SlotWindow(model.n_ctx, own_layers=model.own_layers) for _ in range(n_slots)
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
            if not window.owned_by(sequence) or window.rate is None:
                window.rate = self._common.begin()
            first = self._model.first_fed(sequence.slot_id)
            if first < len(sequence.tokens):
                behind[sequence.id] = window.follow(sequence, room, first)
        return behind

    @staticmethod
    def is_ready(n_behind: int) -> bool:
        """Whether a sequence of which so many tokens are to be fed can have a draft at once."""
        return n_behind <= _MOST_FED

    def rate(self, sequence: Sequence) -> SequenceRate:
        """The record of its drafts. After `begin`."""
        rate = self._windows[sequence.slot_id].rate
        if rate is None:
            raise RuntimeError(f"{sequence.id} was not begun.")
        return rate

    def draft_s(self, n_sequences: int, n_drafted: int, n_fed: int) -> float:
        """Seconds to propose so many tokens for each of so many sequences, `n_fed` tokens fed
        before."""
        n_past = self._n_cells
        first_s = self._costs.decode_s(n_fed, n_past)
        if n_sequences == 1:
            first_s = self._costs.verify_s(1, n_fed - 1, n_past)
        return first_s + (n_drafted - 1) * self._costs.decode_s(n_sequences, n_past)

    def feed_s(self, n_rows: int) -> float:
        """Seconds to feed so many tokens."""
        return self._costs.prefill_s(n_rows, self._n_cells)

    @property
    def _n_cells(self) -> int:
        return sum(len(window.cells) for window in self._windows)

    # -- passes -----------------------------------------------------------------------------------

    def propose(
        self, sequences: SequenceOf[Sequence], n_drafted: int, token_s: float = 0.0
    ) -> dict[str, tuple[int, ...]]:
        """So many tokens that each of these may go on with: sequences that `begin` was told of and
        that are ready, ordered by slot. Nothing if a pass fails. Of a trial, a right token is worth
        `token_s`."""
        windows = [self._windows[one.slot_id] for one in sequences]
        rows: list[Row] = []
        places: list[int] = []
        last_rows: list[int] = []
        for one, window in zip(sequences, windows, strict=True):
            self._feed(one.slot_id, window, _MOST_FED, rows, places)
            last_rows.append(len(rows) - 1)
        drafts: list[list[int]] = [[] for _ in sequences]
        for _ in range(n_drafted):
            proposed = self._pass(sequences, rows, places, last_rows)
            if proposed is None:
                return {}
            for draft, token in zip(drafts, proposed, strict=True):
                draft.append(token)
            if len(drafts[0]) < n_drafted:
                rows, last_rows = [], list(range(len(sequences)))
                places = [GUESSED] * len(sequences)
                for one, window, token in zip(sequences, windows, proposed, strict=True):
                    rows.append((token, len(window.cells), one.slot_id, True))
                    window.fed([token], guessed=True)
        for window in windows:
            window.proposed, window.token_s = n_drafted, token_s
        return {one.id: tuple(draft) for one, draft in zip(sequences, drafts, strict=True)}

    def catch_up(self, sequences: SequenceOf[Sequence], within_s: float | None) -> None:
        """Feed some of what is to be fed of these sequences, in about so many seconds; None: all."""
        for one in sequences:
            n_rows = self._model.n_batch
            while within_s is not None and n_rows > _MOST_FED and self.feed_s(n_rows) > within_s:
                n_rows //= 2
            rows: list[Row] = []
            places: list[int] = []
            self._feed(one.slot_id, self._windows[one.slot_id], n_rows, rows, places)
            if self._pass([one], rows, places, []) is None:
                return
            if within_s is not None:
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
        """One batch, and the most likely tokens after `last_rows`; None if it failed."""
        n_past, began = self._n_cells - len(rows), self._clock()
        try:
            with self._progress.computing(self._costs.batch_s(len(rows), n_past)):
                self._model.decode(rows, places)
            found = [self._model.most_likely(row) for row in last_rows]
        except DecodeError as error:
            self._fail(error)
            return None
        seconds = self._clock() - began
        if not last_rows:
            self._costs.observe_prefill(len(rows), n_past, seconds)
        else:
            self._costs.observe_decode(len(last_rows), len(rows), n_past, seconds)
        self.spent += [(one, seconds / len(sequences)) for one in sequences]
        return found

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
        if window.proposed != n_drafted or window.rate is None:
            return False
        window.proposed = 0
        window.rate.record(n_drafted, n_accepted)
        self.allowance.changes(n_accepted * window.token_s)
        return True

    def take_spent(self) -> list[tuple[Sequence, float]]:
        """The seconds of passes since the last call, with the sequence of each."""
        spent, self.spent = self.spent, []
        return spent

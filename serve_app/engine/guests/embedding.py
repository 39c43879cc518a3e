"""Embeddings: which texts go into the next batch, and what becomes of their tokens' vectors."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import CorralError, DecodeError
from serve_app.base.formats import Row
from serve_app.base.sharing.turns import TURN_S
from serve_app.base.values.media import Medium
from serve_app.base.values.requests import account
from serve_app.engine.backends.base import Backend, EmbeddingShape
from serve_app.engine.core.command_queue import Command
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.health import Progress
from serve_app.engine.policy.policy import SlotPolicy

if TYPE_CHECKING:
    from serve_app.engine.guests.pictures import PlacedTile, TileReader

Vectors = NDArray[np.float32]
"""A row for each text; without pooling, a row for each token of one text after the other."""

# Of the stall budget, what a batch over texts may take beside running sequences; prompts get the rest.
_SHARE = 0.5
# The same for some seconds after another client's sequences ran: its next prompt may come during a batch.
_SHARE_AMONG_CLIENTS, _AMONG_CLIENTS_S = 0.05, 10.0


class Texts:
    """The texts of a request, with MEDIUM for each of their pictures and sounds until an engine has placed
    these. Cancelling `future` spares what was not yet computed."""

    def __init__(
        self,
        tokens: Sequence[tuple[int, ...]],
        client: str = "",
        *,
        background: bool = False,
        media: Sequence[Medium] = (),
    ) -> None:
        self.tokens, self.media = tokens, media
        self.tiles: Sequence[tuple[PlacedTile, ...]] = [()] * len(tokens)
        """The tiles of each text's media."""
        self.client, self.background, self.priority = client, background, 0
        self.account = account(client, background=background)
        self.future: Future[Vectors] = Future()
        self._vectors: dict[int, NDArray[np.float64]] = {}

    def take(self, index: int, vector: NDArray[np.float64]) -> bool:
        """Take the vector of one text. Returns whether it was the last one."""
        self._vectors[index] = vector
        return len(self._vectors) == len(self.tokens)

    def end(self, error: CorralError | None = None) -> None:
        """Hand over the vectors, or the error; once."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            vectors = [self._vectors[i] for i in range(len(self.tokens))]
            self.future.set_result(np.vstack(vectors, dtype=np.float32, casting="same_kind"))


class PendingText:
    """A text of a request: its tokens, how far they are computed, and what became of their vectors."""

    lost_slot = False
    n_generated = 0

    def __init__(self, request: Texts, index: int, turn: int) -> None:
        self.request, self.index, self.turn = request, index, turn
        self.tokens, self.spans = request.tokens[index], request.tiles[index]
        self.is_behind = request.background
        self.spent_s = self.expected_s = 0.0
        self.is_suspect = False
        """Whether a batch failed that it was in, so that it is computed alone."""
        self.begin()

    def begin(self) -> None:
        """Forget all that was computed of it."""
        self.n_past = 0
        self._pooled: NDArray[np.float64] | float = 0.0

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_past

    @property
    def is_finished(self) -> bool:
        return self.request.future.done()

    @property
    def is_blocked(self) -> bool:
        """Whether a tile of it is neither computed nor encoded."""
        return not all(tile.is_ready or tile.end <= self.n_past for tile in self.spans)

    @property
    def tile(self) -> PlacedTile | None:
        """The tile of its next token, if that is in one."""
        return next((tile for tile in self.spans if tile.start <= self.n_past < tile.end), None)

    @property
    def n_alike(self) -> int:
        """The next tokens that one pass can compute: up to the next border of a tile."""
        borders = (border for tile in self.spans for border in (tile.start, tile.end))
        end = next((border for border in borders if border > self.n_past), len(self.tokens))
        return end - self.n_past

    def rows(self, seq_id: int, n_rows: int) -> list[Row]:
        """The next so many."""
        places = range(self.n_past, self.n_past + n_rows)
        return [(self.tokens[place], place, seq_id, True) for place in places]

    def advance(self, vectors: Vectors, pooling: str) -> bool:
        """Take the vectors of the next tokens; True if that was the last of all texts."""
        if pooling == "mean":
            self._pooled = self._pooled + vectors.sum(axis=0, dtype=np.float64) / len(self.tokens)
        elif pooling == "none":
            begun = [] if self.n_past == 0 else [self._pooled]
            self._pooled = np.vstack([*begun, vectors.astype(np.float64)])
        elif pooling != "cls":
            self._pooled = vectors[-1].astype(np.float64)
        elif self.n_past == 0:
            self._pooled = vectors[0].astype(np.float64)
        self.n_past += len(vectors)
        return self.n_pending == 0 and self.request.take(self.index, np.asarray(self._pooled))


def pack(n_pending: Sequence[int], limit: int, *, whole: bool) -> list[int]:
    """How many rows each of the first texts gets in a batch of at most `limit`, at least one row. Only the
    first text may be cut; `whole` ones are not, even if the first is above the limit. Pure."""
    packed = [n_pending[0] if whole else min(n_pending[0], limit)]
    left = limit - packed[0]
    for n_rows in n_pending[1:]:
        if n_rows > left:
            break
        packed.append(n_rows)
        left -= n_rows
    return packed


class EmbeddingQueue(Guest):
    """The texts that wait, and batches over them. Decoder thread only, but for `submit`.

    The policy says which text is next; those behind all others wait while other sequences run. A client's
    requests take turns, text by text, so that a long list does not hold a short one up. A text that is
    longer than a batch goes on in the next one, if the model's tokens see only those before them. So does a
    text with pictures, which are passes of their own. It begins when all of them are encoded; that is done
    for one text at a time.
    """

    def __init__(
        self,
        backend: Backend,
        costs: CostModel,
        progress: Progress,
        policy: SlotPolicy,
        steps: Steps,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._backend = backend
        self._shape: EmbeddingShape = backend.embeddings.shape
        self._costs = costs
        self._progress = progress
        self._policy, self._steps = policy, steps
        self._places_lock = threading.Lock()
        self._waiting: list[PendingText] = []
        self._seeing: PendingText | None = None
        """The text whose pictures are encoded now, or were."""
        self._live: set[Texts] = set()
        self._ended: list[tuple[Texts, CorralError | None]] = []
        self._others_ran = -math.inf
        """The time when sequences of other clients than the first text's ran last."""
        self._not_before = 0.0
        """The time when streams of those who have less due have had as much time as the last batch."""
        self._row_s = 1e-3
        """Seconds of a row in the last batch: encoders have no profile."""

    def submit(
        self, requests: Sequence[Texts], run_between_steps: Callable[[Command], None]
    ) -> list[CorralError | None]:
        """Any thread: accept these texts or say, for each request, why not."""
        with self._places_lock:
            refusals: list[CorralError | None] = [
                self._policy.accepts_texts(request, len(request.tokens)) for request in requests
            ]
        pairs = zip(requests, refusals, strict=True)
        accepted = [request for request, refusal in pairs if refusal is None]
        if not accepted:
            return refusals
        for request in accepted:
            request.future.add_done_callback(partial(self._forget, request))
        is_urgent = any(not request.background for request in accepted)
        command = Command(lambda _: self.add(accepted), is_urgent=is_urgent)
        command.future.add_done_callback(lambda done: _end_all(accepted, done.exception()))
        run_between_steps(command)
        closed = command.future.exception() if command.future.done() else None
        if isinstance(closed, CorralError):
            return [refusal or closed for refusal in refusals]
        return refusals

    def _forget(self, request: Texts, _: Future[Vectors]) -> None:
        with self._places_lock:
            self._policy.forget_texts(request)

    @property
    def has_work(self) -> bool:
        """Whether any text waits."""
        return bool(self._waiting)

    @property
    def has_urgent_work(self) -> bool:
        """Whether any text waits that is not in the background."""
        return any(not text.is_behind for text in self._waiting)

    def before_schedule(self) -> None:
        """Compute a batch of texts, and admit the requests that came meanwhile."""
        if self._waiting:
            self.step()
            self._steps.take_commands()
            self._steps.admit()

    def add(self, requests: Iterable[Texts]) -> None:
        """Queue texts."""
        row_s = self._costs.prompt_token_s
        for request in requests:
            self._policy.enter(request)
            self._live.add(request)
            turns = (text.turn for text in self._waiting if text.request.account == request.account)
            turn = next(turns, 0)
            texts = [PendingText(request, i, turn + i) for i in range(len(request.tokens))]
            for text in texts:
                text.expected_s = text.n_pending * row_s
            self._waiting += texts
            self._waiting.sort(key=lambda text: text.turn)

    def step(self) -> None:
        """Compute a batch, if any text waits and running sequences do not go before it. Beside them, it
        keeps within its share of the stall budget, by the cost model. `deliver` reports each end."""
        for request in [request for request in self._live if request.future.cancelled()]:
            self._leave(request)
        self._waiting = [text for text in self._waiting if text.request in self._live]
        texts = self._first()
        if not texts:
            return
        first = texts[0]
        running = self._steps.running
        ahead = [sequence for sequence in running if not sequence.is_behind]
        if first.is_behind and ahead:
            self._others_ran = time.monotonic()
            return
        beside = running if first.is_behind else ahead
        if self._gives_way(first, beside):
            return
        pending, tile = [text.n_alike for text in texts], first.tile
        limit = self._limit(first, sum(pending), bool(beside))
        is_whole = not self._shape.causal or (tile is not None and tile.is_whole)
        batch = list(zip(texts, pack(pending, limit, whole=is_whole), strict=False))
        try:
            self._forward(batch)
        except DecodeError as error:
            self._suspect([text for text, _ in batch], error)
        except CorralError as error:
            self._drop({text.request for text, _ in batch}, error)

    def _suspect(self, texts: Sequence[PendingText], error: DecodeError) -> None:
        """Have each of these texts computed alone, so that only the request of the one at fault ends."""
        if len(texts) == 1:
            self._drop({texts[0].request}, error)
        for text in texts:
            text.is_suspect = True
            text.begin()

    def _first(self) -> list[PendingText]:
        """The texts that the next batch may have: the one that has begun goes on, then suspects are
        first."""
        most, live = self._shape.n_seq_max, (*self._steps.running, *self._steps.waiting)
        ordered = [text for text in self._waiting if text.n_past]
        new = [
            text for text in self._policy.next_texts(self._waiting, most, live) if not text.n_past
        ]
        ordered += sorted(new, key=lambda text: not text.is_suspect)
        pictured = (text for text in ordered if text.spans)
        self._seeing = min(
            pictured, key=lambda text: (text.is_behind, text is not self._seeing), default=None
        )
        texts = [text for text in ordered if text.n_past or self._may_begin(text)][:most]
        if texts and (texts[0].is_suspect or texts[0].tile is not None):
            return texts[:1]
        return texts[:1] + [text for text in texts[1:] if not (text.is_suspect or text.spans)]

    def _may_begin(self, text: PendingText) -> bool:
        """Whether the text has no pictures, or all of them."""
        return not text.spans or (text is self._seeing and not text.is_blocked)

    @property
    def readers(self) -> list[TileReader]:
        """The text that waits for its pictures, if there is one."""
        return [self._seeing] if self._seeing is not None and not self._seeing.is_finished else []

    def drop(self, readers: Iterable[TileReader], error: CorralError) -> None:
        """End the requests whose texts cannot have their pictures."""
        self._drop({text.request for text in readers if isinstance(text, PendingText)}, error)

    def _gives_way(self, text: PendingText, running: Sequence[EngineSequence]) -> bool:
        """Whether texts wait in this step for clients that were not served more. They wait for their
        prompts, and every other time for their streams, which cannot use all of the decoder."""
        others = [seq for seq in running if seq.request.account != text.request.account]
        now = time.monotonic()
        if others:
            self._others_ran = now
        others = [seq for seq in others if self._policy.had_less(seq, text)]
        prompts = any(seq.n_pending > 1 for seq in others)
        return prompts or (bool(others) and now < self._not_before)

    def _limit(self, first: PendingText, n_pending: int, beside: bool) -> int:
        n_rows = min(self._shape.n_rows, n_pending)
        among_clients = time.monotonic() < self._others_ran + _AMONG_CLIENTS_S
        budget = self._steps.budget
        may_be_long = not (beside or among_clients or first.request.background or budget.is_shared)
        if may_be_long or not budget.is_bounded:
            return n_rows
        if not self._costs:
            within_s = min(budget.left_s, TURN_S)  # texts take as long in small batches
            return min(n_rows, max(1, int(within_s / self._row_s))) if budget.is_shared else n_rows
        share = _SHARE if beside else 1.0  # such a batch is not left, and somebody may come
        share = _SHARE_AMONG_CLIENTS if among_clients else share
        within_s = min(share * budget.max_stall_s, budget.left_s)
        fitting = self._costs.chunk(n_rows, first.n_past, within_s=within_s)
        return fitting or self._costs.smallest_chunk(n_rows, first.n_past)

    def _forward(self, batch: list[tuple[PendingText, int]]) -> None:
        began, depth = time.monotonic(), batch[0][0].n_past
        # Only sequence 0 outlives a batch, and only the first text may be cut.
        rows = [row for seq_id, (text, n) in enumerate(batch) for row in text.rows(seq_id, n)]
        with self._progress.computing(lambda: self._costs.batch_s(len(rows), depth)):
            tile = batch[0][0].tile
            vectors = (
                self._backend.embeddings.embed(rows)
                if tile is None
                else tile.embed(self._backend, rows)
            )
        ended = time.monotonic()
        self._not_before = ended + (ended - began)
        self._row_s = (ended - began) / len(rows)
        start = 0
        for text, n_rows in batch:
            self._policy.charge(text, (ended - began) * n_rows / len(rows))
            if text.advance(vectors[start : start + n_rows], self._shape.pooling):
                self._finish(text.request)
            start += n_rows
        self._waiting = [text for text in self._waiting if text.n_pending]
        self.counts["batches"] += 1
        self.counts["tokens"] += len(rows)
        self.counts["texts"] += sum(text.n_pending == 0 for text, _ in batch)

    def _drop(self, requests: set[Texts], error: CorralError) -> None:
        self._waiting = [text for text in self._waiting if text.request not in requests]
        for request in requests:
            self._finish(request, error)

    def _finish(self, request: Texts, error: CorralError | None = None) -> None:
        self._ended.append((request, error))
        self._leave(request)

    def _leave(self, request: Texts) -> None:
        if self._seeing is not None and self._seeing.request is request:
            self._seeing = None
        if request in self._live:
            self._live.remove(request)
            self._policy.leave(request)

    def fail(self, error: CorralError) -> None:
        """End all that wait."""
        self._drop({text.request for text in self._waiting}, error)

    def deliver(self) -> None:
        """Tell those that ended."""
        ended, self._ended = self._ended, []
        for request, error in ended:
            request.end(error)


def _end_all(requests: Iterable[Texts], error: BaseException | None) -> None:
    if isinstance(error, CorralError):
        for request in requests:
            request.end(error)

"""Embeddings: which texts go into the next batch, and what becomes of their tokens' vectors."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from heapq import nsmallest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import Backend, EmbeddingShape, Row
from serve_app.engine.core.command_queue import Command
from serve_app.engine.core.guest import Guest
from serve_app.engine.core.scheduler.fair_queue import Accounts, others_go_beyond
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.health import Progress
from serve_app.errors import CorralError, DecodeError, QueueFullError
from serve_app.types import Medium, account

if TYPE_CHECKING:
    from serve_app.engine.core.engine_core import EngineCore
    from serve_app.engine.pictures import PlacedTile, TileReader

MAX_TEXTS = 2048
"""Texts that may wait to be embedded before clients are held to their shares."""
# Those that may wait in all: what comes is bounded, however many clients bring one list each.
_MOST_TEXTS = 4 * MAX_TEXTS

Vectors = NDArray[np.float32]
"""A row for each text; without pooling, a row for each token of one text after the other."""

# Of the stall budget, what a batch over texts may take beside running sequences; prompts get the rest.
_SHARE = 0.5
# The same for some seconds after another client's sequences ran: its next prompt may come during a batch.
_SHARE_AMONG_CLIENTS, _AMONG_CLIENTS_S = 0.05, 10.0
# A row takes longer than one of a prompt, as llama.cpp computes the logits of each: a guess, and how fast
# it follows what batches take.
_FIRST_SLOWDOWN, _NEWEST, _MOST_CHANGE = 2.0, 0.2, 2.0


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
        self.client, self.background = client, background
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

    def __init__(self, owner: Texts, index: int, turn: int) -> None:
        self.owner, self.index, self.turn = owner, index, turn
        self.tokens, self.spans = owner.tokens[index], owner.tiles[index]
        self.is_behind = owner.background
        self.n_generated, self.spent_s = 0, 0.0
        self.is_suspect = False
        """Whether a batch failed that it was in, so that it is computed alone."""
        self.begin()

    def begin(self) -> None:
        """Nothing of it is computed."""
        self.n_past = 0
        self._pooled: NDArray[np.float64] | float = 0.0

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_past

    @property
    def finished(self) -> bool:
        return self.owner.future.done()

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
        return self.n_pending == 0 and self.owner.take(self.index, np.asarray(self._pooled))


_Ranked = tuple[tuple[bool, bool, bool], float, int, PendingText]
"""A text with its order: whether it is new, no suspect, and behind all others; the seconds that are due to
its client before it; its number."""


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


def may_embed(
    held: Mapping[str, int], client: str, n_texts: int, *, background: bool = False
) -> bool:
    """Whether a client's request with so many texts is accepted beside those that wait: as long as they
    are few; then if the client has none, as a list is never cut; or within its share of them. In the
    background, only as long as they are half as many."""
    n_waiting = sum(held.values())
    if background:
        return n_waiting < MAX_TEXTS // 2
    if n_waiting < MAX_TEXTS:
        return True
    if client not in held:
        return n_waiting < _MOST_TEXTS
    return held[client] + n_texts <= MAX_TEXTS // len(held)


class EmbeddingQueue(Guest):
    """The texts that wait, and batches over them. Decoder thread only, but for `submit`.

    Background requests come last, and only while no other sequence runs; but while another client has more
    texts than its share of a batch, or asks for more than its share of the slots, they are like others.
    Before that, the text goes first whose client has least due: what it was charged, and its texts before
    this one. A client's requests take turns, text by text, so that a long list does not hold a short one
    up. A text that is longer than a batch goes on in the next one, if the model's tokens see only those
    before them. So does a text with pictures, which are passes of their own. It begins when all of them are
    encoded; that is done for one text at a time.
    """

    def __init__(
        self,
        backend: Backend,
        costs: CostModel,
        budget: StepBudget,
        progress: Progress,
        accounts: Accounts,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._backend = backend
        self._shape: EmbeddingShape = backend.embeddings.shape
        self._costs = costs
        self._budget = budget
        self._progress = progress
        self._accounts = accounts
        self._slowdown = _FIRST_SLOWDOWN
        self._waiting: list[PendingText] = []
        self._seeing: PendingText | None = None
        """The text whose pictures are encoded now, or were."""
        self._held = Counter[str]()
        """The texts of each client that are not all embedded."""
        self._held_lock = threading.Lock()
        self._live: set[Texts] = set()
        self._ended: list[tuple[Texts, CorralError | None]] = []
        self._others_ran = -math.inf
        """When sequences of other clients than of the first text's ran last."""
        self._not_before = 0.0
        """When streams of those who have less due have had as much of the decoder as the last batch."""

    def submit(
        self, requests: Sequence[Texts], run_between_steps: Callable[[Command], None]
    ) -> list[CorralError | None]:
        """Any thread: accept these texts or say, for each request, why not."""
        refusals = [self._refusal(request) for request in requests]
        pairs = zip(requests, refusals, strict=True)
        accepted = [request for request, refusal in pairs if refusal is None]
        if not accepted:
            return refusals
        is_urgent = any(not request.background for request in accepted)
        command = Command(lambda _: self.add(accepted), is_urgent=is_urgent)
        command.future.add_done_callback(lambda done: _end_all(accepted, done.exception()))
        run_between_steps(command)
        closed = command.future.exception() if command.future.done() else None
        if isinstance(closed, CorralError):
            return [refusal or closed for refusal in refusals]
        return refusals

    def _refusal(self, request: Texts) -> CorralError | None:
        client, n_texts = request.account, len(request.tokens)
        with self._held_lock:
            if not may_embed(self._held, client, n_texts, background=request.background):
                return QueueFullError("Too many texts wait to be embedded.", 1)
            self._held[client] += n_texts
        request.future.add_done_callback(lambda _: self._forget(client, n_texts))
        return None

    def _forget(self, client: str, n_texts: int) -> None:
        with self._held_lock:
            self._held[client] -= n_texts
            if not self._held[client]:
                del self._held[client]

    @property
    def has_work(self) -> bool:
        """Whether any text waits."""
        return bool(self._waiting)

    def before_schedule(self, core: EngineCore) -> None:
        """Compute a batch of texts, and admit the requests that came meanwhile."""
        if self._waiting:
            self.step(core.running, core.admission.has_share_left)
            core.take_commands()
            core.admit()

    def add(self, requests: Iterable[Texts]) -> None:
        """Queue texts."""
        for request in requests:
            self._accounts.enter(request.account)
            self._live.add(request)
            turns = (text.turn for text in self._waiting if text.owner.account == request.account)
            turn = next(turns, 0)
            self._waiting += [PendingText(request, i, turn + i) for i in range(len(request.tokens))]
            self._waiting.sort(key=lambda text: text.turn)

    def step(
        self,
        running: Sequence[EngineSequence],
        has_share_left: Callable[[str], bool] = lambda client: False,
    ) -> None:
        """Compute a batch, if any text waits and those of `running` do not go before it: beside
        them, within its share of the stall budget by the cost model. `deliver` reports each end.
        `has_share_left` is `SlotShares.has_share_left` of the moment."""
        for request in [one for one in self._live if one.future.cancelled()]:
            self._leave(request)
        self._waiting = [text for text in self._waiting if text.owner in self._live]
        behind = self._behind(has_share_left)
        texts = self._first(behind)
        if not texts:
            return
        first = texts[0].owner
        ahead = [one for one in running if not one.is_behind]
        if first in behind and ahead:
            self._others_ran = time.monotonic()
            return
        beside = running if first in behind else ahead
        if self._gives_way(first.account, beside):
            return
        pending, tile = [text.n_alike for text in texts], texts[0].tile
        limit = self._limit(texts[0], sum(pending), bool(beside))
        is_whole = not self._shape.causal or (tile is not None and tile.is_whole)
        packed = pack(pending, limit, whole=is_whole)
        batch = list(zip(texts, packed, strict=False))
        try:
            self._forward(batch)
        except DecodeError as error:
            self._suspect([text for text, _ in batch], error)
        except CorralError as error:
            self._drop({text.owner for text, _ in batch}, error)

    def _suspect(self, texts: Sequence[PendingText], error: DecodeError) -> None:
        """Have each of these texts computed alone, so that only the request of the one at fault ends."""
        if len(texts) == 1:
            self._drop({texts[0].owner}, error)
        for text in texts:
            text.is_suspect = True
            text.begin()

    def _behind(self, has_share_left: Callable[[str], bool]) -> Set[Texts]:
        """The requests that all others go before."""
        background = {text.owner for text in self._waiting if text.owner.background}
        if not background:
            return background
        asked = (text.owner for text in self._waiting if not text.owner.background)
        n_asked = Counter(owner.client for owner in asked)
        n_clients = len(n_asked.keys() | {owner.client for owner in background})
        share = max(1, self._shape.n_seq_max // n_clients)
        return {
            owner
            for owner in background
            if not (others_go_beyond(share, n_asked, owner.client) or has_share_left(owner.client))
        }

    def _first(self, behind: Set[Texts]) -> list[PendingText]:
        row_s = self._slowdown * self._costs.prompt_token_s or 1.0
        due_s: dict[str, float] = {}
        ranked: list[_Ranked] = []
        most, n_ranked = self._shape.n_seq_max, Counter[str]()
        for number, text in enumerate(self._waiting):
            client = text.owner.account
            if n_ranked[client] >= most and not text.n_past:  # thousands may wait, in every step
                continue
            n_ranked[client] += 1
            due = due_s.get(client, self._accounts[client])
            due_s[client] = due + text.n_pending * row_s
            is_new = text.n_past == 0  # who has begun goes on
            rank = is_new, not text.is_suspect, text.owner in behind
            ranked.append((rank, due, number, text))
        self._choose_seeing(ranked)
        ready = (entry for entry in ranked if self._can_go_on(entry[-1]))
        first = [entry[-1] for entry in nsmallest(most, ready, key=lambda entry: entry[:3])]
        if first and (first[0].is_suspect or first[0].tile is not None):
            return first[:1]
        return first[:1] + [text for text in first[1:] if not (text.is_suspect or text.spans)]

    def _can_go_on(self, text: PendingText) -> bool:
        """Whether the text has no pictures, or all of them; one that has begun keeps the first sequence."""
        may_begin = not text.spans or text is self._seeing
        return text.n_past > 0 or (may_begin and not text.is_blocked)

    def _choose_seeing(self, ranked: Sequence[_Ranked]) -> None:
        """Choose the text whose pictures are encoded: the one before, unless it is behind another."""

        def order(entry: _Ranked) -> tuple[object, ...]:
            rank, due_s, number, text = entry
            return rank[-1], text is not self._seeing, rank, due_s, number

        pictured = [entry for entry in ranked if entry[-1].spans]
        self._seeing = min(pictured, key=order)[-1] if pictured else None

    @property
    def readers(self) -> list[TileReader]:
        """The text that waits for its pictures, if there is one."""
        return [self._seeing] if self._seeing is not None and not self._seeing.finished else []

    def drop(self, readers: Iterable[TileReader], error: CorralError) -> None:
        """End the requests whose texts cannot have their pictures."""
        self._drop({text.owner for text in readers if isinstance(text, PendingText)}, error)

    def _gives_way(self, client: str, running: Sequence[EngineSequence]) -> bool:
        """Whether its texts wait in this step for clients that were not served more: for their prompts, and
        every other time for their streams, which cannot use all of the decoder."""
        spent_s, now = self._accounts[client], time.monotonic()
        others = [seq for seq in running if seq.request.account != client]
        if others:
            self._others_ran = now
        behind = [seq for seq in others if self._accounts[seq.request.account] <= spent_s]
        prompts = any(seq.n_pending > 1 for seq in behind)
        return prompts or (bool(behind) and now < self._not_before)

    def _limit(self, first: PendingText, n_pending: int, beside: bool) -> int:
        n_rows = min(self._shape.n_rows, n_pending)
        among_clients = time.monotonic() < self._others_ran + _AMONG_CLIENTS_S
        may_be_long = not (beside or among_clients or first.owner.background)
        if may_be_long or not (self._budget.max_stall_s and self._costs):
            return n_rows
        share = _SHARE if beside else 1.0  # such a batch is not left, and somebody may come
        share = _SHARE_AMONG_CLIENTS if among_clients else share
        within_s = min(share * self._budget.max_stall_s, self._budget.left_s) / self._slowdown
        fitting = self._costs.chunk(n_rows, first.n_past, within_s=within_s)
        return fitting or self._costs.smallest_chunk(n_rows, first.n_past)

    def _forward(self, batch: list[tuple[PendingText, int]]) -> None:
        began, depth = time.monotonic(), batch[0][0].n_past
        # Only sequence 0 outlives a batch, and only the first text may be cut.
        rows = [row for seq_id, (text, n) in enumerate(batch) for row in text.rows(seq_id, n)]
        with self._progress.computing(
            lambda: self._slowdown * self._costs.batch_s(len(rows), depth)
        ):
            tile = batch[0][0].tile
            vectors = (
                self._backend.embeddings.embed(rows)
                if tile is None
                else tile.embed(self._backend, rows)
            )
        ended = time.monotonic()
        self._not_before = ended + (ended - began)
        self._learn(len(rows), depth, ended - began)
        start = 0
        for text, n_rows in batch:
            seconds = (ended - began) * n_rows / len(rows) + text.spent_s
            self._accounts.charge(text.owner.account, seconds)
            text.spent_s = 0.0
            if text.advance(vectors[start : start + n_rows], self._shape.pooling):
                self._finish(text.owner)
            start += n_rows
        self._waiting = [text for text in self._waiting if text.n_pending]
        self.counts["batches"] += 1
        self.counts["tokens"] += len(rows)
        self.counts["texts"] += sum(text.n_pending == 0 for text, _ in batch)

    def _learn(self, n_rows: int, depth: int, seconds: float) -> None:
        expected = self._costs.prefill_s(n_rows, depth)
        if expected:
            least, most = self._slowdown / _MOST_CHANGE, self._slowdown * _MOST_CHANGE
            found = min(most, max(least, seconds / expected))
            self._slowdown += _NEWEST * (found - self._slowdown)

    def _drop(self, requests: set[Texts], error: CorralError) -> None:
        self._waiting = [text for text in self._waiting if text.owner not in requests]
        for request in requests:
            self._finish(request, error)

    def _finish(self, request: Texts, error: CorralError | None = None) -> None:
        self._ended.append((request, error))
        self._leave(request)

    def _leave(self, request: Texts) -> None:
        if self._seeing is not None and self._seeing.owner is request:
            self._seeing = None
        if request in self._live:
            self._live.remove(request)
            self._accounts.leave(request.account)

    def fail(self, error: CorralError) -> None:
        """End all that wait."""
        self._drop({text.owner for text in self._waiting}, error)

    def deliver(self) -> None:
        """Tell those that ended."""
        ended, self._ended = self._ended, []
        for request, error in ended:
            request.end(error)


def _end_all(requests: Iterable[Texts], error: BaseException | None) -> None:
    if isinstance(error, CorralError):
        for request in requests:
            request.end(error)

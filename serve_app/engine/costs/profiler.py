"""Makes a profile: measures what batches cost, by running some."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

from serve_app.base.formats import Row, State
from serve_app.engine.costs.clocks import UNDISTURBED, Clocks
from serve_app.engine.costs.cost_model import Profile, envelope, own_s, predict_s

# Batches are measured again until they took this, up to so many times more: the shorter, the noisier. And
# batches that take so many times what they should by the times of others get so many rounds more.
_SHORT_S, _MOST_ROUNDS, _ODD, _ODD_ROUNDS = 0.35, 5, 1.15, 2

# Numbers of rows: the most telling ones first. Flash attention has another kernel from 64 on.
CHUNKS, _NEXT_CHUNKS, _MORE_CHUNKS = (16, 64), (32, 8, 48), (24, 40, 56, 128, 96, 256, 512)
_MOST_CHUNKS = (80, 112, 192, 160, 384)
_DECODES, _MORE_DECODES = (2, 4, 8, 16, 32, 64), (3, 6, 12, 24, 48)
_VERIFIES = (2, 4, 8, 16, 3, 6, 12)
DEPTH = 2048
"""Tokens before a deep batch, at most. Keys and values are in no cache of the processor any more, and from
there on the time grows straight."""
ROOM = 64
"""Cells besides, for the rows of a deep batch."""
_MORE_DEEP_CHUNKS = (56, 32)
# More than this is noise.
_MOST_MASKED = 4.0
# Rows that a sequence writes until it is another one's turn: cells of others lie between its own, as on a
# server. In one piece they cost a fifth of that with flash attention (0.6B, Q4_0, 16 sequences).
_TURN = 4
# The part of the time that must be left for another round of deep batches, from an empty cache on.
_LEFT = 0.4


class ProfiledContext(Protocol):
    """The methods that profilers need of a context; see `serve_app.engine.backends.base.Backend`."""

    def decode(self, rows: Sequence[Row]) -> None: ...

    def truncate(self, seq_id: int, n_past: int) -> None: ...

    def copy(self, source: int, target: int) -> None: ...


class DeepContext(ProfiledContext, Protocol):
    """A context with a unified cache; see `serve_app.kernels.llama.context.Context`."""

    def save(self, seq_id: int) -> State: ...

    def restore(self, seq_id: int, state: State) -> None: ...

    def append(self, source: int, target: int) -> None: ...


class PretendingContext(ProfiledContext, Protocol):
    """A context with a paged cache; see `serve_app.kernels.openvino.paged.context.PagedContext`."""

    def pretend(self, seq_id: int, n_tokens: int) -> None: ...


class Measured(NamedTuple):
    """The times of one size: what its threads needed, and the share of their time that they had."""

    own_s: float
    share: float


Trial = Callable[[int], Measured]


class Trials:
    """Times batches, as long as there is time. A size is tried again only after the others, when a hiccup
    is likely to be over. Of trials that had the machine to themselves the shortest counts; of others the
    median of what their threads needed. Decoder thread only."""

    def __init__(self, context: ProfiledContext, clocks: Clocks | None = None) -> None:
        self._context = context
        self._clocks = clocks or Clocks()
        self.left_s = 0.0
        """Seconds that may still be spent."""
        self.n_before = 0
        """Tokens that the sequences have before each batch, by their positions."""
        self._trials: dict[int, dict[int, list[Measured]]] = {}
        """The trials of each size, by the identity of what they are added to."""
        self._spent_s = self._had_s = 0.0

    @property
    def share(self) -> float:
        """The part of their time that the threads had."""
        return self._had_s / self._spent_s if self._spent_s else 1.0

    def spent(self, run: Callable[[], None]) -> float:
        """The seconds of work of which a single thread may do a part: they say nothing of others' work."""
        seconds, _ = self._clocks.time(run, 1)
        self.left_s -= seconds
        return seconds

    def time(self, run: Callable[[], None], n_rows: int = 1) -> Measured:
        seconds, share = self._clocks.time(run, n_rows)
        self.left_s -= seconds
        self._spent_s += seconds
        self._had_s += share * seconds
        return Measured(own_s(seconds, share), share)

    def time_for(self, seconds: float) -> bool:
        return seconds < self.left_s

    def fill(self, n_tokens: int, n_sequences: int) -> None:
        """Give so many sequences so many tokens, which they have before each batch from now on."""
        self.n_before = n_tokens
        if n_tokens:
            self._context.decode(_prompt_rows(0, n_tokens))
            for seq_id in range(1, n_sequences):
                self._context.copy(0, seq_id)

    def time_decode(self, n_rows: int) -> Measured:
        """The time of a row of each of so many sequences."""
        return self._batch([(some_token(i), self.n_before, i, True) for i in range(n_rows)])

    def time_prefill(self, n_rows: int) -> Measured:
        """The time of so many rows of a prompt."""
        return self._batch(_prompt_rows(self.n_before, n_rows))

    def time_verify(self, n_rows: int) -> Measured:
        """The time of a sequence's next token and drafted ones."""
        return self._batch([(some_token(i), self.n_before + i, 0, True) for i in range(n_rows)])

    def _batch(self, rows: Sequence[Row]) -> Measured:
        measured = self.time(partial(self._context.decode, rows), len(rows))
        for seq_id in {row[2] for row in rows}:
            self._context.truncate(seq_id, self.n_before)
        return measured

    def measure(
        self, times: dict[int, float], sizes: Sequence[int], trial: Trial
    ) -> Iterator[None]:
        """Add what batches of these sizes take. The first of all is measured in any case, and sizes that
        were measured before get one more trial. One is run when the next is asked for. Each size takes its
        turn even if there is no time for it: what is compared stays in step."""
        new = [n for n in sizes if n not in times]
        for n in sizes:
            if not times or self.time_for(predict_s(times, n)):
                self._add(times, n, trial)
            yield
        for n_round in range(_MOST_ROUNDS):
            for n in new:
                if max(1, n_round) * times.get(n, _SHORT_S) < _SHORT_S:
                    self._again(times, n, trial)
                yield
        for _ in range(_ODD_ROUNDS):
            likely_s = envelope(times)
            for n in [n for n in new if times.get(n, 0.0) > _ODD * likely_s.get(n, 0.0)]:
                self._again(times, n, trial)
                yield

    def _again(self, times: dict[int, float], n: int, trial: Trial) -> None:
        if self.time_for(times[n]):
            self._add(times, n, trial)

    def _add(self, times: dict[int, float], n: int, trial: Trial) -> None:
        trials = self._trials.setdefault(id(times), {}).setdefault(n, [])
        trials.append(trial(n))
        undisturbed = [measured.own_s for measured in trials if measured.share >= UNDISTURBED]
        times[n] = min(undisturbed or [statistics.median(measured.own_s for measured in trials)])


def some_token(i: int) -> int:
    """A token of every vocabulary: rows that are alike would choose the same experts, in less time."""
    return 3 + 37 * i % 199


def _prompt_rows(start: int, n_rows: int) -> list[Row]:
    end = start + n_rows
    return [(some_token(i), i, 0, i == end - 1) for i in range(start, end)]


def in_turns(profilers: Sequence[Profiler | DeepProfiler], limit_s: float) -> None:
    """Run the essentials of these, which are to be compared, batch by batch. The speed of a machine that
    others share changes from one minute to the next."""
    each_s = limit_s / len(profilers)
    for _ in zip_longest(*(profiler.essentials(each_s) for profiler in profilers)):
        pass


class Profiler(Trials):
    """Makes a profile without depth, in an empty cache.

    First `essentials`, then `rest`. A batch that would take more time than is left is left out, and
    predicted from those that were measured.
    """

    def __init__(
        self,
        context: ProfiledContext,
        *,
        n_slots: int,
        n_ctx_slot: int,
        n_batch: int,
        clocks: Clocks | None = None,
        chunks: Sequence[int] = CHUNKS,
    ) -> None:
        """`chunks` are the rows of prompts among the essentials."""
        super().__init__(context, clocks)
        self._chunks = chunks
        self._n_slots = n_slots
        self._n_ctx_slot = n_ctx_slot
        self._n_batch = n_batch
        self._decode: dict[int, float] = {}
        self._verify: dict[int, float] = {}
        self._prefill: dict[int, float] = {}

    @property
    def profile(self) -> Profile:
        return Profile(self._decode, self._prefill, self._verify, share=self.share)

    def essentials(self, limit_s: float) -> Iterator[None]:
        """The batches that tell one kind of context from another, in about `limit_s`: each is run
        when the next is asked for."""
        self.left_s = limit_s
        ends = sorted({self._n_slots, 1}, reverse=True)
        yield from self.measure(self._decode, ends, self.time_decode)
        chunks = self._fitting(self._chunks) or [min(self._n_batch, self._n_ctx_slot - 1)]
        yield from self.measure(self._prefill, chunks, self.time_prefill)

    def rest(self, limit_s: float) -> None:
        """Measure, after all essentials, what is between them, in about `limit_s`. Leaves the cache
        empty."""
        self.left_s = limit_s
        for times, sizes, trial in (
            (self._decode, self._slot_counts(_DECODES), self.time_decode),
            (self._prefill, self._fitting(_NEXT_CHUNKS), self.time_prefill),
            (self._verify, self._fitting(_VERIFIES), self.time_verify),
            (self._decode, self._slot_counts(_MORE_DECODES), self.time_decode),
            (self._prefill, self._fitting(_MORE_CHUNKS), self.time_prefill),
            (self._prefill, self._fitting(_MOST_CHUNKS), self.time_prefill),
        ):
            for _ in self.measure(times, sizes, trial):
                pass

    def _slot_counts(self, counts: Sequence[int]) -> list[int]:
        return [n for n in counts if n < self._n_slots]

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        return [n for n in sizes if n <= min(self._n_batch, self._n_ctx_slot)]


# -- depth: what batches take longer the more tokens stand in the cache before them ---------------


@dataclass(frozen=True, slots=True)
class Depth:
    """The seconds that a depth adds to batches."""

    n_tokens: int = 0
    decode_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the number of sequences that get one token each and attend to the same cells."""
    prefill_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds by the number of a prompt's rows."""
    masked: float = 1.0
    """The cost of a cell of others, as a part of that of a cell of the row's own sequence."""
    share: float = 1.0
    """The part of their time that the threads had."""

    def added_to(self, profile: Profile, *, unified: bool) -> Profile:
        """A profile of what has the same kind of attention, with this depth. In a split cache, each
        sequence attends to cells of its own: `n` take `n` times as long."""
        decode_s = dict(self.decode_s)
        if not unified and 1 in decode_s:
            decode_s = {n: n * decode_s[1] for n in profile.decode_s}
        return replace(
            profile,
            depth=self.n_tokens,
            deep_decode_s=_sum(profile.decode_s, decode_s),
            deep_prefill_s=_sum(profile.prefill_s, self.prefill_s),
            masked=self.masked,
            share=min(profile.share, self.share),
        )


class DeepProfiler(Trials):
    """Measures a depth in an empty, unified context.

    Nothing is computed to get deep. A few tokens are saved and restored again and again, each time into
    other cells. The sequences get these in turns, and later all of them do. Their positions repeat, but
    kernels take as long.
    """

    def __init__(
        self,
        context: DeepContext,
        *,
        n_slots: int,
        depth: int,
        n_batch: int,
        clocks: Clocks | None = None,
    ) -> None:
        """`depth` are the cells to be filled, a multiple of `ROOM`; the context has room for another
        batch, and two sequences more than slots."""
        super().__init__(context, clocks)
        self._append, self._save, self._restore = context.append, context.save, context.restore
        self._counts = sorted({1, n_slots})
        self._n_turns = max(2, n_slots)
        """Sequences that have the cells in turns, before they share them."""
        self._depth = depth
        self._n_batch = n_batch
        self._decode: dict[int, float] = {}
        self._prefill: dict[int, float] = {}
        self._deep_decode: dict[int, float] = {}
        self._deep_prefill: dict[int, float] = {}
        self._turns_s: dict[int, float] = {}
        """Seconds of batches whose sequences have cells in turns."""

    @property
    def depth(self) -> Depth:
        decode_s = _difference(self._deep_decode, self._decode)
        prefill_s = _difference(self._deep_prefill, self._prefill)
        masked = min(_MOST_MASKED, max(0.0, self._masked_cost))
        n_tokens = self._depth if decode_s else 0
        return Depth(n_tokens, decode_s, prefill_s, masked, self.share)

    @property
    def _masked_cost(self) -> float:
        """The cost of other sequences' cells, as a part of the cost of own ones; 1 if it was not
        measured. Below 0 if something else computed meanwhile. A row has its part of all cells, the
        others' are masked."""
        n, whole_s = self._counts[-1], _difference(self._deep_decode, self._decode)
        if n not in self._turns_s or not whole_s.get(n):
            return 1.0
        part = (self._turns_s[n] - self._decode[n]) / whole_s[n]
        return (self._n_turns * part - 1) / (self._n_turns - 1)

    def essentials(self, limit_s: float) -> Iterator[None]:
        """The batches that tell kinds of attention apart: each is run when the next is asked for."""
        self.left_s = limit_s
        yield from self._round()
        if self.time_for(_LEFT * limit_s):
            yield from self._round()

    def _round(self) -> Iterator[None]:
        self._empty()
        yield from self.measure(self._decode, self._counts, self.time_decode)
        yield from self.measure(self._prefill, self._fitting(CHUNKS), self.time_prefill)
        self.spent(self._fill)
        yield from self.measure(self._turns_s, self._counts[-1:], self.time_decode)
        self._share()
        yield from self.measure(self._deep_decode, self._counts, self.time_decode)
        chunks = [n for n in self._fitting(CHUNKS) if n in self._prefill]
        yield from self.measure(self._deep_prefill, chunks, self.time_prefill)

    def rest(self, limit_s: float) -> None:
        """Measure, after all essentials, more chunks, in about `limit_s`. Leaves the cache empty."""
        self.left_s = limit_s
        chunks = self._fitting(_MORE_DEEP_CHUNKS)
        for _ in self.measure(self._deep_prefill, chunks, self.time_prefill):
            pass
        self._empty()
        chunks = [n for n in chunks if n in self._deep_prefill]
        for _ in self.measure(self._prefill, chunks, self.time_prefill):
            pass

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        return [n for n in sizes if n <= self._n_batch] or [self._n_batch]

    def _empty(self) -> None:
        self.n_before = 0
        for seq_id in range(self._n_turns):
            self._context.truncate(seq_id, 0)

    def _fill(self) -> None:
        writer, n_tokens = self._n_turns, min(_TURN, self._n_batch)
        self._context.decode([(0, i, writer, i == n_tokens - 1) for i in range(n_tokens)])
        state = self._save(writer)
        for turn in range(self._depth // n_tokens):
            self._restore(writer, state)
            self._append(writer, turn % self._n_turns)
        self.n_before = n_tokens
        self._context.truncate(writer, 0)

    def _share(self) -> None:
        for seq_id in range(1, self._n_turns):
            self._append(seq_id, 0)
        for seq_id in range(1, self._n_turns):
            self._context.copy(0, seq_id)


def _difference(deep: Mapping[int, float], shallow: Mapping[int, float]) -> dict[int, float]:
    return {n: max(0.0, deep[n] - shallow[n]) for n in deep if n in shallow}


def _sum(shallow: Mapping[int, float], added: Mapping[int, float]) -> dict[int, float]:
    return {n: shallow[n] + added[n] for n in shallow if n in added}


def paged_depth(
    context: PretendingContext,
    profile: Profile,
    n_tokens: int,
    limit_s: float,
    clocks: Clocks | None = None,
) -> Depth:
    """Measure what so many tokens before a batch add to it in a paged cache, in about `limit_s`. The first
    sequence has them. It has room for a chunk more, and is empty before and after."""
    trials = Trials(context, clocks)
    trials.left_s, trials.n_before = limit_s, n_tokens
    deep_decode_s: dict[int, float] = {}
    deep_prefill_s: dict[int, float] = {}
    context.pretend(0, n_tokens)
    try:
        for times, shallow, sizes, trial in (
            (deep_decode_s, profile.decode_s, (1,), trials.time_decode),
            (deep_prefill_s, profile.prefill_s, CHUNKS, trials.time_prefill),
        ):
            for _ in trials.measure(times, [n for n in sizes if n in shallow], trial):
                pass
    finally:
        context.truncate(0, 0)
    decode_s = _difference(deep_decode_s, profile.decode_s)
    prefill_s = _difference(deep_prefill_s, profile.prefill_s)
    return Depth(n_tokens if decode_s else 0, decode_s, prefill_s, share=trials.share)

"""The scheduler: chooses the rows of the next batches. Pure but for drafts: no threads, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Protocol

from serve_app.base.values.adapters import Adapters
from serve_app.engine.core.scheduler.batch import Batch, SequenceRows, plan_batch
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel, Profile

Drafts = dict[str, tuple[int, ...]]
"""Drafted tokens by the sequence's id."""
# How much longer than its fair share a prompt may be held back: shares are forecasts.
_PATIENCE = 1.5
SlotEnds = Callable[[], Mapping[int, int]]
# Prompt rows of one batch whose logits are wanted: each takes memory for the whole vocabulary.
MAX_SCORED_ROWS = 32
# The part of a burst whose prompts are done when its streams begin: decoding fewer is dear.
_ENOUGH_DONE = 0.75
# Prompt rows of one client in a step beside other clients, behind which no further prompt of its own joins.
_ENOUGH_ROWS = 128
# Seconds of a prompt's pass in the background, which are lost if somebody comes meanwhile. They are so
# many, or that part of the time since somebody was last served, up to so many. Large passes are faster.
_LOST_S, _LOST_PART, _MOST_LOST_S = 0.25, 0.1, 2.0
# How much longer the others' decoding may take for what is decoded in the background.
_FREE = 0.02
SWITCH_S, TURN_S = 0.007, 0.14
"""Seconds that llama.cpp takes to build graphs for other adapters, and of a turn."""


class DraftPlanner(Protocol):
    """Decides whose drafts are verified in a step: `serve_app.engine.guests.drafts.drafting.Drafting`."""

    def drafts(self, decoding: list[Sequence], n_past: float, *, mixed: bool) -> Drafts:
        """The drafts that are worth a batch of their own, of sequences that are ordered by slot. `mixed`:
        the cache is unified, so that all slots are computed together."""

    def record(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> bool:
        """Learn how many tokens of a draft were right; returns whether a draft model proposed it."""


class AdapterTurns:
    """Chooses whose step it is: llama.cpp applies LoRA adapters to a whole batch. Sequences with the same
    adapters have a turn of some steps, and then those go on that have waited longest for a step."""

    def __init__(self, max_stall_s: float) -> None:
        self._max_stall_s = max_stall_s
        self._served_at: dict[Adapters, float] = {}
        """The time when the last step of those that run began."""
        self.current: Adapters = ()
        self._since = 0.0
        """The time when their turn began."""

    def choose(self, sequences: SequenceOf[Sequence], now: float) -> list[Sequence]:
        """The sequences of one turn: all, if all have the same adapters. `now` is on the clock of
        `Trace.submitted`."""
        sets: dict[Adapters, list[Sequence]] = {}
        for sequence in sequences:
            sets.setdefault(sequence.request.adapters, []).append(sequence)
        self._served_at = {used: at for used, at in self._served_at.items() if used in sets}
        if not sets:
            return []
        # Since when each waits: since its last step, or since the first of its sequences came.
        since = {
            used: self._served_at.get(used, min(seq.trace.submitted for seq in waiting))
            for used, waiting in sets.items()
        }
        # All others together wait no longer than a stream may.
        turn_s = min(TURN_S, self._max_stall_s / max(1, len(sets) - 1))
        if self.current not in sets or (len(sets) > 1 and now - self._since >= turn_s):
            self.current, self._since = min(sets, key=since.__getitem__), now
        self._served_at[self.current] = now
        return sets[self.current]


class Scheduler:
    """Plans steps over the running sequences: batches over every decoding one's next token, then a batch
    over at most `n_batch` prompt tokens. With `mixed`, both share one batch. Several batches of decoding
    sequences, and drafts to verify, are planned where the cost model says that they pay.

    While sequences decode, prompts get what `StepBudget` leaves, and one of them always gets on. The prompt
    goes first that has waited longest for what it needs: short ones overtake, long ones do not starve.
    Source: Brinch Hansen, "An Analysis of Response Ratio Scheduling", 1971.

    Before the first stream begins, nobody waits between two tokens, and chunks are as large as pays. A
    prompt that lacks only its last token waits with it until most prompts are as far. It waits no longer
    than it would have taken had all shared the machine alike. A chunk ends where a prefix ends that others
    wait for, or where a checkpoint is to be made.

    Sequences that are behind all others (`is_behind`) advance while there is nothing else, prompts first.
    Beside others, only decoding ones do, as many as cost these next to nothing.
    """

    def __init__(
        self,
        n_batch: int,
        costs: CostModel | None = None,
        budget: StepBudget | None = None,
        *,
        mixed: bool = False,
        n_rewind: int = 0,
    ) -> None:
        """`mixed` is for a unified cache: with a split one, llama.cpp would cut such a batch into pieces.
        Without anything measured or without a bound, only `n_batch` limits the prompts. `n_rewind` is how
        many tokens slots can drop behind a batch (`CacheTraits`). If these are all of a batch, one in the
        background ends when a request comes."""
        self.costs = costs or CostModel(Profile())
        self._n_batch = n_batch
        self._budget = budget or StepBudget()
        self._turns = AdapterTurns(self._budget.max_stall_s)
        self.drafts: DraftPlanner | None = None
        """The planner of drafts, if a guest is one. Its own passes may run while a step is planned."""
        self._mixed = mixed
        self._drops_batches = n_rewind >= n_batch
        """Whether all of a batch can be dropped. If not, it is not cancelled, and drafts have a batch of
        their own beside prompts, too: what they can be dropped behind."""
        self._n_cells = 0
        self._slot_ends: SlotEnds | None = None
        self.running: list[Sequence] = []
        """The sequences that have a slot, in the order in which they got it, as admission says."""
        self._others_stream = False
        """Whether a stream waits for its next token whose turn it is not."""
        self._n_prompting = 1
        """The turns that have prompts then: they share what a stream may wait for prompts."""
        self.served_all = True
        """Whether all could get on in the step that was planned last, or have their turns."""
        self._together: list[Sequence] = []
        """The sequences that take turns."""
        self._served: list[Sequence] = []
        """The sequences that may get on in the step that is planned."""
        self._in_background = False
        """Whether nobody waits for any of them, and the step can be cancelled."""
        self._seen_ahead = -math.inf
        """The time when a sequence ran last that is not in the background."""

    def schedule(
        self, now: float, n_cells: int = 0, slot_ends: SlotEnds | None = None
    ) -> list[Batch]:
        """Plan the next step: empty if nothing runs. `now` is on the clock of `Trace.submitted`; `n_cells`
        are in use, if the cache is unified. `slot_ends` tells, unless it does not matter, the cached
        tokens of each slot that has room for one more and could drop it again."""
        self._n_cells = n_cells if self._mixed else 0
        self._slot_ends = slot_ends
        served = self._together = self._who_is_served(now)
        self.served_all = len(served) == len(self.running)
        before = self._turns.current
        self._served = self._turns.choose(self._candidates(now), now)
        adapters = self._turns.current
        if adapters != before:
            self._budget.expect(SWITCH_S)
        self._others_stream = any(
            seq.n_generated and seq.request.adapters != adapters for seq in served
        )
        if self._others_stream:
            prompting = {seq.request.adapters for seq in served if seq.n_pending > 1}
            self._n_prompting = max(1, len(prompting))
        else:
            self._n_prompting = 1
        self._in_background = self._drops_batches and all(seq.is_behind for seq in self._served)
        decoding = [sequence for sequence in self._served if sequence.n_pending == 1]
        decoding.sort(key=lambda sequence: sequence.slot_id)
        rest_s = self._catch_up_s()
        held = self._is_held(decoding, rest_s, now)
        groups = [] if held or self._prompts_first else self._decode_turns(decoding)
        prompts = [] if groups and self._begin(decoding) else self._prompt_turns(groups, now)
        if held:
            prompts = self._without_last_tokens(prompts, rest_s, now)
        spans = [plan_batch([turn], self._n_cells) for turn in prompts if turn.sequence.span]
        prompts = [turn for turn in prompts if not turn.sequence.span]
        if self._mixed and prompts:
            apart = [turns for turns in groups if turns[0].draft and not self._drops_batches]
            together = [turns for turns in groups if turns not in apart]
            mixed = plan_batch([*chain(*together), *prompts], self._n_cells)
            return [mixed, *map(self._plan, apart), *spans]
        batches = [self._plan(turns) for turns in groups]
        return [*batches, *([plan_batch(prompts)] if prompts else []), *spans]

    @property
    def crowding(self) -> float:
        """The factor by which those who have a slot slow prompts down, when they stream."""
        n_streams = sum(not sequence.is_behind for sequence in self.running)
        if not (n_streams and self.costs.prompt_token_s):
            return 1.0
        decode_s = self.costs.steps_s(n_streams, 0)
        n_beside, beside_s = (n_streams, 0.0) if self._mixed else (0, decode_s)
        within_s = self._budget.planned_s(decode_s)
        n_rows = self._chunk(self._n_batch, n_beside, 0, within_s, beside_s)
        n_rows = n_rows or self.costs.smallest_chunk(self._n_batch)
        step_s = beside_s + self.costs.prefill_s(n_beside + n_rows, 0)
        return max(1.0, step_s / (n_rows * self.costs.prompt_token_s))

    def mix(self, mixed: bool) -> None:
        """Plan for another kind of cache, as `mixed` says in the constructor."""
        self._mixed = mixed

    def observe(self, batches: list[Batch], seconds: float) -> None:
        """Learn how well a step that had both decoding sequences and prompts kept to the bound."""
        both = any(batch.decodes for batch in batches) and any(batch.prefills for batch in batches)
        if both and not self._in_background:
            self._budget.observe(seconds)

    def _depth(self, sequences: Iterable[Sequence]) -> float:
        depths = [sequence.n_past for sequence in sequences]
        return self.costs.effective_past(sum(depths) / len(depths), self._n_cells)

    # -- in the background ------------------------------------------------------------------------

    @property
    def _prompts_first(self) -> bool:
        """Whether decoding waits for prompts. It does if nobody waits for a token: a full batch is as fast
        as one without those whose prompts are not done."""
        return self._in_background and not self._mixed and bool(self._ready_prompts)

    def _who_is_served(self, now: float) -> list[Sequence]:
        """All; or all that somebody waits for, and what is as good as free beside them."""
        ahead = [seq for seq in self.running if not seq.is_behind]
        if ahead:
            self._seen_ahead = now
        if not ahead or len(ahead) == len(self.running):
            return list(self.running)
        return [*ahead, *self._free_riders(ahead)]

    def _free_riders(self, ahead: list[Sequence]) -> list[Sequence]:
        """The decoding sequences in the background, as many as cost those ahead next to nothing."""
        decoding = [seq for seq in ahead if seq.n_pending == 1]
        if not self.costs or not any(seq.n_generated for seq in decoding):
            return []
        behind = [seq for seq in self.running if seq.is_behind and seq.n_pending == 1]
        behind.sort(key=lambda seq: _span([*decoding, seq]))
        n_past = self._depth([*decoding, *behind])
        most_s = (1 + _FREE) * self.costs.steps_s(len(decoding), n_past)
        n_free = 0
        for n in range(1, len(behind) + 1):
            together = [*decoding, *behind[:n]]
            n_rows = len(together) if self._mixed else _span(together)
            if self.costs.decode_s(n_rows, n_past) <= most_s:
                n_free = n
        return behind[:n_free]

    # -- before the first stream ------------------------------------------------------------------

    def _catch_up_s(self) -> float:
        """Seconds until all prompts are done; 0 if that does not matter, as when somebody streams."""
        if not self._budget.is_bounded or any(
            seq.n_generated and seq.n_pending == 1 for seq in self._together
        ):
            return 0.0
        return sum(seq.n_pending for seq in self._prompts) * self.costs.prompt_token_s

    @property
    def _prompts(self) -> list[Sequence]:
        return [seq for seq in self._together if seq.n_pending > 1 and not seq.is_blocked]

    def _candidates(self, now: float) -> list[Sequence]:
        """The sequences that may have the next turn: those with finished prompts wait while
        sequences of other adapters catch up."""
        rest_s = self._catch_up_s()
        if not rest_s or len(prompts := self._prompts) == len(self._together):
            return self._together
        done = [seq for seq in self._together if seq.n_pending == 1]
        return prompts if self._is_held(done, rest_s, now) else self._together

    def _is_held(self, done: SequenceOf[Sequence], rest_s: float, now: float) -> bool:
        """Whether these sequences, whose prompts are done, wait for the others'."""
        if not rest_s or self._are_enough(len(done)):
            return False
        return all(self._can_wait(sequence, rest_s, now) for sequence in done)

    def _are_enough(self, n_done: int) -> bool:
        """Whether streams begin when so many of all that take turns have their prompts."""
        return n_done >= _ENOUGH_DONE * len(self._together)

    def _begin(self, decoding: list[Sequence]) -> bool:
        """Whether some of these have waited for their first tokens, which no prompt should delay more."""
        bounded = self._budget.is_bounded and not self._mixed
        return bounded and any(not sequence.n_generated for sequence in decoding)

    def _can_wait(self, sequence: Sequence, rest_s: float, now: float) -> bool:
        """Whether a sequence would have waited that long if all shared the machine alike. Before it got its
        slot it may have waited for a prefix that it need not compute now: that does not count."""
        own_s = sequence.n_computed * self.costs.prompt_token_s
        since = (
            sequence.trace.submitted if sequence.trace.admitted is None else sequence.trace.admitted
        )
        return now - since + rest_s <= _PATIENCE * len(self._together) * own_s

    def _without_last_tokens(
        self, prompts: list[SequenceRows], rest_s: float, now: float
    ) -> list[SequenceRows]:
        """Have prompts that can wait stop before their last token, unless enough are done now."""
        n_done = sum(turn.n_rows == turn.sequence.n_pending for turn in prompts)
        n_done += sum(seq.n_pending == 1 for seq in self._together)
        if self._are_enough(n_done):
            return prompts
        return [
            turn._replace(n_rows=turn.n_rows - 1)
            if turn.n_rows == turn.sequence.n_pending and self._can_wait(turn.sequence, rest_s, now)
            else turn
            for turn in prompts
        ]

    # -- decoding ---------------------------------------------------------------------------------

    def _decode_turns(self, decoding: list[Sequence]) -> list[list[SequenceRows]]:
        if not decoding:
            return []
        n_past = self._depth(decoding)
        drafting: Drafts = {}
        if self.drafts is not None and self.costs:
            drafting = self.drafts.drafts(decoding, n_past, mixed=self._mixed)
        plain = [sequence for sequence in decoding if sequence.id not in drafting]
        parts = iter(plain)
        groups = [
            [SequenceRows(next(parts), 1) for _ in range(size)]
            for size in self._split(plain, n_past)
        ]
        if drafting:
            groups.append(
                [SequenceRows(seq, 1, drafting[seq.id]) for seq in decoding if seq.id in drafting]
            )
        return groups

    def _plan(self, turns: list[SequenceRows]) -> Batch:
        has_gaps = _span(turn.sequence for turn in turns) > len(turns)
        fills = bool(self.costs) and not turns[0].draft and has_gaps
        ends = self._slot_ends() if fills and self._slot_ends else None
        return plan_batch(turns, self._n_cells, ends)

    def _split(self, decoding: list[Sequence], n_past: float) -> tuple[int, ...]:
        """How many of these, ordered by slot, each batch computes."""
        if not decoding:
            return ()
        slots = tuple(sequence.slot_id for sequence in decoding)
        if self._mixed:  # all slots are computed together
            slots = tuple(range(len(slots)))
        between = set(range(slots[0], slots[-1])).difference(slots)
        if between and self._slot_ends:
            between.difference_update(self._slot_ends())
        return self.costs.split(slots, n_past, frozenset(between))

    # -- prompts ----------------------------------------------------------------------------------

    @property
    def _ready_prompts(self) -> list[Sequence]:
        return [seq for seq in self._served if seq.n_pending > 1 and not seq.is_blocked]

    def _prompt_turns(self, decoding: list[list[SequenceRows]], now: float) -> list[SequenceRows]:
        prompts = self._ready_prompts
        if not prompts:
            return []
        decode_s = spent_s = sum(self._batch_s(turns) for turns in decoding)
        n_decoding = sum(1 + len(turn.draft) for turn in chain(*decoding))
        bounded = self._budget.is_bounded and bool(self.costs)
        bounded &= (
            bool(decoding) or self._others_stream or self._in_background or self._budget.is_shared
        )
        within_s = self._budget.prompts_s(decode_s, self._n_prompting)
        if self._in_background:
            lost_s = max(_LOST_S, _LOST_PART * (now - self._seen_ahead))
            within_s = min(decode_s + min(_MOST_LOST_S, lost_s), self._budget.turn_left_s)
        left, left_scored = self._n_batch, MAX_SCORED_ROWS
        turns: list[SequenceRows] = []
        n_slots = Counter(seq.request.account for seq in self._served)
        n_most = len(self._served)
        for sequence in _in_fair_parts(self._most_urgent_first(prompts, n_slots, now), n_slots):
            if n_slots[sequence.request.account] > n_most:
                continue
            to_stop = min(sequence.n_pending, sequence.n_to_stop)
            depth, n_rows = self._depth([sequence]), min(left, to_stop)
            if sequence.unscored_positions:
                if not left_scored:
                    continue
                n_rows = min(n_rows, left_scored)
                left_scored -= n_rows
            if bounded:
                n_beside = n_decoding + self._n_batch - left if self._mixed else 0
                beside_s = 0.0 if self._mixed else spent_s
                n_rows = self._chunk(n_rows, n_beside, depth, within_s, beside_s)
            if bounded and sequence.unscored_positions:  # their logits take as long again at most
                n_rows = -(-n_rows // 2)
            if n_rows == 0 and turns:
                break
            n_rows = n_rows or self.costs.smallest_chunk(min(MAX_SCORED_ROWS, to_stop), depth)
            span = sequence.span
            if span is not None and span.is_whole:  # all of it, or nothing
                if turns and n_rows < span.end - span.start:
                    continue
                n_rows = span.end - span.start
            turns.append(SequenceRows(sequence, n_rows))
            if n_rows == sequence.n_pending:  # a first token waits for no client with more slots
                n_most = min(n_most, n_slots[sequence.request.account])
            left -= n_rows
            if left <= 0:
                break
            spent_s += self.costs.prefill_s(n_rows, depth)
        return turns

    def _chunk(
        self, n_rows: int, n_beside: int, depth: float, within_s: float, beside_s: float
    ) -> int:
        """How many next rows of a prompt fit into a step of `within_s` whose rest takes `beside_s`."""
        return self.costs.chunk(
            n_rows,
            depth,
            within_s=within_s - beside_s,
            beside_s=0.0 if self._mixed else beside_s,
            n_beside=n_beside,
        )

    def _batch_s(self, turns: list[SequenceRows]) -> float:
        n_past = self._depth(turn.sequence for turn in turns)
        if turns[0].draft or self._mixed or self._slot_ends is None:
            return self.costs.verify_s(len(turns), len(turns[0].draft), n_past)
        return self.costs.decode_s(_span(turn.sequence for turn in turns), n_past)

    def _most_urgent_first(
        self, prompts: list[Sequence], n_slots: Mapping[str, int], now: float
    ) -> list[Sequence]:
        """The prompts, the longest wait for its need first. A client's slots share what it may hurry."""

        def urgency(sequence: Sequence) -> float:
            needs_s = self.costs.prefill_s(sequence.n_pending, self._depth([sequence]))
            waited_s = now - sequence.trace.submitted
            return waited_s / (needs_s or sequence.n_pending) / n_slots[sequence.request.account]

        return sorted(prompts, key=urgency, reverse=True)


def _in_fair_parts(prompts: list[Sequence], n_slots: Mapping[str, int]) -> list[Sequence]:
    """The prompts that may get on in one step. Beside other clients, a client's step is hardly longer than
    with one of its prompts: its next one joins only behind short ones."""
    if len(n_slots) == 1:
        return prompts
    n_rows, parts = Counter[str](), []
    for seq in prompts:
        if n_rows[seq.request.account] < _ENOUGH_ROWS:
            parts.append(seq)
        n_rows[seq.request.account] += seq.n_pending
    return parts


def _span(sequences: Iterable[Sequence]) -> int:
    slots = [sequence.slot_id for sequence in sequences]
    return max(slots) - min(slots) + 1

"""Decides whose drafts are verified in a step. Pure but for the draft model and the step's budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from itertools import takewhile
from typing import NamedTuple

from serve_app.engine.cache.packing import TokenArray
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.scheduler.batch import Batch
from serve_app.engine.core.scheduler.scheduler import Drafts
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.guests.drafts.drafter import MOST_FED, Drafter
from serve_app.engine.guests.drafts.ngram_proposer import MAX_INDEXED, NgramProposer

# Drafts that are tried, and how many drafted rows one step may have in all.
_DRAFTS = (1, 3, 7, 15)
MAX_DRAFTED_ROWS = 16
# What speculation must promise to be tried. What feeding a draft model must save, for its price. The
# tokens that a sequence is thought to go on for, at least: it may end with any.
_LEAST_GAIN = 0.05
_LEAST_RETURN = 2.0
_LEAST_HOPE = 16
# Of the stall budget, what feeding may take in a step. And how much longer than plain decoding a step with
# drafts may take, if that is above the budget.
_FED_PART = 0.4
_MOST_LONGER = 2.0


class _Plan(NamedTuple):
    """Drafts of one length, and what they promise."""

    tokens_per_s: float
    n_drafted: int = 0
    looked_up: tuple[Sequence, ...] = ()
    proposed: tuple[Sequence, ...] = ()


class _Option(NamedTuple):
    """A sequence that could have a draft of some length, and the tokens that its batch is worth then."""

    value: float
    by_model: bool
    sequence: Sequence


class Drafting(Guest):
    """Finds the drafts with which a step has most tokens a second, by the cost model. All are of one
    length, verified in one batch, and no longer than slots can be rewound behind it. Their passes run while
    the step is planned. Neither these nor the verification take more than the step's budget has left.
    """

    def __init__(
        self,
        costs: CostModel,
        steps: Steps,
        *,
        lookup: bool,
        drafter: Drafter | None = None,
        n_rewind: int = sys.maxsize,
    ) -> None:
        """`n_rewind` is that of `CacheTraits`, at least 1."""
        self._lengths = [n for n in _DRAFTS if n <= n_rewind]
        self._in_one_piece = n_rewind < MAX_DRAFTED_ROWS
        """Whether slots can be rewound only if llama.cpp computes them all together."""
        self._costs = costs
        self._steps = steps
        self._lookup = lookup
        self._drafter = drafter
        self._lookups: dict[str, tuple[TokenArray, NgramProposer]] = {}
        """The proposers of sequences, with the arrays that their n-grams are of."""
        self._most_s = 0.0

    def drafts(self, decoding: list[Sequence], n_past: float, *, mixed: bool) -> Drafts:
        """The drafts that are worth a batch of their own, of sequences that are ordered by slot. `mixed`:
        the cache is unified, so that all slots are computed together."""
        looked_up = self._look_up(decoding) if self._lookup else {}
        drafter = self._drafter or None  # which may be broken
        if not self._costs or not (looked_up or drafter):
            return {}
        able, behind = list[Sequence](), dict[str, int]()
        if drafter is not None:
            able = [seq for seq in decoding if not seq.spans]
            able = [seq for seq in able if seq.draft_room > 0]
            behind = drafter.begin(able, self._lengths[-1])
        plain_s = self._costs.steps_s(len(decoding), n_past)
        self._most_s = max(self._steps.budget.left_s, _MOST_LONGER * plain_s)
        best = self._best(decoding, looked_up, behind, n_past, mixed)
        late = [seq for seq in best.proposed if behind[seq.id] > MOST_FED]
        if late and drafter is not None:
            ready = {name: n for name, n in behind.items() if n <= MOST_FED}
            now = self._best(decoding, looked_up, ready, n_past, mixed)
            if self._pays(late, best, now, sum(drafter.feed_s(behind[seq.id]) for seq in late)):
                bound_s = self._steps.budget.max_stall_s
                drafter.catch_up(late, min(_FED_PART * bound_s, self._most_s))
            best = now
        drafts = {seq.id: looked_up[seq.id][: best.n_drafted] for seq in best.looked_up}
        if best.proposed and drafter is not None:
            drafts |= drafter.propose(best.proposed, best.n_drafted)
        if drafter is not None:
            drafter.forgive([seq for seq in able if seq.id not in drafts])
        return drafts

    def record(self, sequence: Sequence, n_drafted: int, n_accepted: int) -> bool:
        """Learn from a draft with `n_accepted` right tokens; whether the draft model proposed it."""
        if self._drafter is not None and self._drafter.record(sequence, n_drafted, n_accepted):
            return True
        self._lookup_of(sequence).record(n_drafted, n_accepted)
        return False

    def before_decode(self, batches: SequenceOf[Batch]) -> None:
        """Charge the passes of the draft model to the clients whose sequences they were for."""
        for sequence, seconds in self._drafter.take_spent() if self._drafter is not None else ():
            self._steps.charge(sequence, seconds)
            self._steps.counts.draft_s += seconds

    def forget(self, sequence: Sequence) -> None:
        self._lookups.pop(sequence.id, None)

    # -- lookup -----------------------------------------------------------------------------------

    def _look_up(self, decoding: list[Sequence]) -> Drafts:
        share = MAX_INDEXED // len(decoding) + 1
        drafts: Drafts = {}
        for sequence in decoding:
            n_most = min(self._lengths[-1], sequence.draft_room)
            draft = self._lookup_of(sequence).draft(sequence.tokens, n_most, share)
            if sequence.spans:  # what follows may be a picture
                draft = tuple(takewhile(lambda token: token >= 0, draft))
            drafts[sequence.id] = draft
        return drafts if any(drafts.values()) else {}

    def _lookup_of(self, sequence: Sequence) -> NgramProposer:
        """The proposer of a sequence, which knows nothing any more after a context shift."""
        known = self._lookups.get(sequence.id)
        proposer = NgramProposer() if known is None else known[1]
        if known is None or known[0] is not sequence.tokens:
            proposer.forget()
            self._lookups[sequence.id] = sequence.tokens, proposer
        return proposer

    def _pays(self, late: list[Sequence], then: _Plan, now: _Plan, price_s: float) -> bool:
        """Whether to feed these. They are thought to go on for as long as they did, which is right half the
        time where nothing is known."""
        n_left = 0
        for seq in late:
            hope = max(_LEAST_HOPE, seq.n_generated)
            n_left += hope if seq.n_left is None else min(hope, seq.n_left)
        saved_s = 1 / now.tokens_per_s - 1 / then.tokens_per_s
        return n_left * saved_s > _LEAST_RETURN * price_s

    def _best(
        self,
        decoding: list[Sequence],
        looked_up: Drafts,
        ready: dict[str, int],
        n_past: float,
        mixed: bool,
    ) -> _Plan:
        """`ready` are those that the draft model could propose for, and how many tokens are fed before."""
        drafter = self._drafter
        n, plain_s = len(decoding), self._costs.steps_s(len(decoding), n_past)
        best = _Plan(n / plain_s)
        least = (1 + _LEAST_GAIN) * best.tokens_per_s
        for n_drafted in self._lengths:
            options: list[_Option] = []
            for seq in decoding:
                known = len(looked_up.get(seq.id, ())) >= n_drafted
                value = self._lookup_of(seq).rate.expected_tokens(n_drafted) if known else 0.0
                proposes = seq.id in ready and n_drafted <= seq.draft_room
                own = 0.0
                if proposes and drafter is not None:
                    own = drafter.rate(seq).expected_tokens(n_drafted)
                if known or proposes:
                    options.append(_Option(max(value, own), own > value, seq))
            most = min(len(options), MAX_DRAFTED_ROWS // n_drafted)
            if not most:
                continue
            for size in _sizes(most) if ready else [most]:
                chosen = _best_group(options, size, in_one_piece=self._in_one_piece and not mixed)
                proposed = tuple(seq for _, by_model, seq in chosen if by_model)
                seconds = self._verify_s([seq for *_, seq in chosen], n_drafted, n_past, mixed)
                n_plain = n - len(chosen)
                seconds += self._costs.steps_s(n_plain, n_past) if n_plain else 0.0
                if proposed and drafter is not None:
                    n_fed = sum(min(ready[seq.id], 2) for seq in proposed)
                    seconds += drafter.draft_s(len(proposed), n_drafted, n_fed)
                rate = (n_plain + sum(value for value, *_ in chosen)) / seconds
                if rate > max(least, best.tokens_per_s) and seconds <= self._most_s:
                    rest = tuple(seq for _, by_model, seq in chosen if not by_model)
                    best = _Plan(rate, n_drafted, rest, proposed)
        return best

    def _verify_s(self, group: list[Sequence], n_drafted: int, n_past: float, mixed: bool) -> float:
        """llama.cpp computes runs of consecutive slots one after the other, unless the cache is unified."""
        if mixed:
            return self._costs.verify_s(len(group), n_drafted, n_past)
        seconds, n_run = 0.0, 1
        for before, seq in zip(group, [*group[1:], None], strict=True):
            if seq is not None and seq.slot_id == before.slot_id + 1:
                n_run += 1
                continue
            seconds += self._costs.verify_s(n_run, n_drafted, n_past)
            n_run = 1
        return seconds


def _best_group(
    options: SequenceOf[_Option], size: int, *, in_one_piece: bool
) -> SequenceOf[_Option]:
    """Choose at most so many options, ordered by slot as all are: those of most value, or `in_one_piece`
    the consecutive slots of most value."""
    if not in_one_piece:
        best = sorted(options, key=lambda option: -option.value)[:size]
        return sorted(best, key=lambda option: option.sequence.slot_id)
    groups: list[list[_Option]] = []
    for option in options:
        group = groups[-1] if groups else []
        if group and option.sequence.slot_id == group[-1].sequence.slot_id + 1:
            groups.append([*group, option][-size:])
        else:
            groups.append([option])
    return max(groups, key=lambda group: sum(option.value for option in group))


def _sizes(most: int) -> list[int]:
    return [*(n for n in (1, 2, 3, 4, 6, 8, 12) if n < most), most]

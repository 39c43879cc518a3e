"""Measures, while nobody waits, the batches of which too little is known, and keeps what was learned."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from serve_app.base.errors import CacheFullError, DecodeCancelledError, DecodeError
from serve_app.engine.backends.base import Backend, Row
from serve_app.engine.cache.slots import SlotTable
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.costs.clocks import UNDISTURBED, Clocks
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.costs.profiler import some_token

# Seconds until the next trial after one that other programs disturbed: at first, and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
# Seconds without work after which other programs are forgotten.
_FORGET_S = 2.0
# Seconds of work after which the engine keeps what it learned, when it rests or ends.
_KEEP_AFTER_S = 20.0


class RestTrials(Guest):
    """Runs batches behind what idle slots hold, and has them forgotten again. Decoder thread only.

    The cost model says which batches are worth a trial: those of a profile that was measured beside other
    programs, or that contradicts itself. It learns from a trial as from any batch. A trial ends at once
    when somebody comes, and small ones are first. As long as other programs compute, there are pauses.

    The next start begins with what was learned, here and from traffic. Trials need threads whose CPU time
    tells whether others disturbed them, and slots that can forget rows without a trace.
    """

    def __init__(
        self, backend: Backend, costs: CostModel, table: SlotTable, steps: Steps, clocks: Clocks
    ) -> None:
        self._backend, self._costs, self._table, self._steps = backend, costs, table, steps
        setup, traits = self._backend.setup, self._backend.traits
        self._is_able = setup.spins and not traits.forgets
        self._clocks = clocks
        self._not_before = 0.0
        self._pause_s = _PAUSE_S
        self._kept_at_s = steps.counts.step_s
        """The seconds of work until which the costs were kept."""
        self._tried = False
        """Whether there were trials since then that nobody disturbed."""

    def before_schedule(self) -> None:
        """Expect, after a pause, that no other program computes, so that nobody waits for fear of it."""
        if time.monotonic() >= self._steps.worked_at + _FORGET_S:
            self._costs.rested()

    @property
    def rest_at(self) -> float:
        """The end of a pause, if a trial is worth it and has room."""
        return self._not_before if self._next() is not None else math.inf

    def at_rest(self) -> None:
        """Try one batch; keep the costs if that was the last one, or the last one before a pause."""
        trial = self._next()
        if trial is not None:
            kind, n_rows, ends = trial
            self._try(kind, n_rows, ends)
            pauses = self._not_before > time.monotonic()
            if self._tried and (pauses or not self._costs.worth_a_trial):
                self._keep()

    def after_step(self, step_s: float, *, idle: bool) -> None:
        """Keep the costs now and then, when the last request has ended."""
        if not self._steps.running:
            self._keep_if_due()

    def close(self, *, healthy: bool) -> None:
        """Keep what was learned since the costs were kept last."""
        if healthy and self._tried:
            self._keep()
        elif healthy:
            self._keep_if_due()

    def _keep_if_due(self) -> None:
        if self._steps.counts.step_s >= self._kept_at_s + _KEEP_AFTER_S:
            self._keep()

    def _keep(self) -> None:
        self._backend.keep(self._costs.learned())
        self._kept_at_s, self._tried = self._steps.counts.step_s, False

    def _next(self) -> tuple[str, int, Mapping[int, int]] | None:
        """The kind of the next trial, its number of rows, and where its slots end."""
        if not self._is_able:
            return None
        for kind, n_rows in self._costs.worth_a_trial:
            if ends := self._ends(kind, n_rows):
                return kind, n_rows, ends
        return None

    def _ends(self, kind: str, n_rows: int) -> dict[int, int]:
        """The slots of a batch and where they end; empty if they have no room for it. Of consecutive slots,
        those that hold the least: what a batch takes with nothing before it is the clearest."""
        n_slots, n_each = (n_rows, 1) if kind == "decode" else (1, n_rows)
        slots = [slot for slot in self._table.slots if slot.idle]
        groups = [slots[i : i + n_slots] for i in range(len(slots) - n_slots + 1)]
        ends = [{slot.id: len(slot.idle_tokens) for slot in group} for group in groups]
        least = min(ends, key=lambda group: sum(group.values()), default={})
        has_room = least and max(least.values()) + n_each <= self._table.room
        return least if has_room else {}

    def _try(self, kind: str, n_rows: int, ends: Mapping[int, int]) -> None:
        n_each = n_rows // len(ends)
        rows: list[Row] = [
            (some_token(slot_id + i), i, slot_id, kind == "verify" or i == end + n_each - 1)
            for slot_id, end in ends.items()
            for i in range(end, end + n_each)
        ]
        depth = sum(ends.values()) / len(ends)
        if self._backend.setup.mode.kv_unified:
            depth = self._costs.attended(depth, self._table.n_cells)
        is_whole = not self._backend.slots_with_pending_copy
        self._clocks.begin()
        try:
            with self._steps.resting():
                self._backend.decode(rows)
        except DecodeCancelledError:
            is_whole = False
        except CacheFullError:  # of other idle slots' tokens
            is_whole, self._not_before = False, time.monotonic() + _LONGEST_PAUSE_S
        except DecodeError:  # nobody waits for it
            self._is_able = is_whole = False
        seconds, share = self._clocks.end(n_rows)
        for slot_id, end in ends.items():
            self._backend.truncate(slot_id, end)
        if is_whole:
            self._learn(kind, n_rows, len(ends), depth, seconds, share)

    def _learn(
        self, kind: str, n_rows: int, n_slots: int, depth: float, seconds: float, share: float
    ) -> None:
        if kind == "prefill":
            self._costs.observe_prefill(n_rows, depth, seconds, share)
        else:
            self._costs.observe_decode(n_slots, n_rows, depth, seconds, share)
        if share >= UNDISTURBED:
            self._tried, self._pause_s, self._not_before = True, _PAUSE_S, 0.0
        else:
            self._not_before = time.monotonic() + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)

"""Measures again, while the engine is idle, what the profile leaves in doubt."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import Backend, Row
from serve_app.engine.core.guest import Guest
from serve_app.engine.kv_cache.slots import SlotTable
from serve_app.errors import DecodeError

if TYPE_CHECKING:
    from serve_app.engine.core.engine_core import EngineCore

# How often each doubtful number of rows is tried: somebody who comes waits for one trial at most.
_TRIALS = 3
# Tokens in a slot, at least, from which a batch tells what depth adds.
_DEEP = 512


class QuietTrials(Guest):
    """Runs doubtful batches behind what idle slots hold, and has it forgotten again. Decoder thread only.

    Only where slots can forget rows without a trace, and have cells of their own. Where it is doubted what
    depth adds, a batch is run as soon as slots are deep enough.
    """

    def __init__(
        self, backend: Backend, costs: CostModel, table: SlotTable, n_ctx_slot: int
    ) -> None:
        self._backend = backend
        self._costs = costs
        self._table = table
        self._n_ctx_slot = n_ctx_slot
        self._begin()

    def _begin(self) -> None:
        self._mode, costs = self._backend.setup.mode, self._costs
        able = self._backend.traits.fills_gaps
        self._pending = deque(costs.doubts * _TRIALS if able else [])
        self._slopes = deque(costs.doubted_slopes * _TRIALS if able else [])

    @property
    def has_rest_work(self) -> bool:
        """Whether there is something to be tried now."""
        if self._backend.setup.mode != self._mode:
            self._begin()
        return bool(self)

    def at_rest(self, core: EngineCore) -> None:
        """Try one batch."""
        self.step()

    def __bool__(self) -> bool:
        """Whether there is something to be tried now."""
        return bool(self._pending or self._deep_enough)

    def step(self) -> None:
        """Try one batch, if slots have room for it. No sequence may be running."""
        if self._pending:
            kind, n = self._pending.popleft()
        elif (slope := self._deep_enough) is not None:
            kind, n = slope
            self._slopes.remove(slope)
        else:
            return
        ends, n_each = self._slots(kind, n)
        if ends and max(ends.values()) + n_each <= self._n_ctx_slot:
            self._try(kind, ends, n_each)

    @property
    def _deep_enough(self) -> tuple[str, int] | None:
        """The next batch that is to tell what depth adds, and whose slots are deep."""
        for slope in self._slopes:
            ends, _ = self._slots(*slope)
            if ends and min(ends.values()) >= _DEEP:
                return slope
        return None

    def _slots(self, kind: str, n: int) -> tuple[dict[int, int], int]:
        """The slots of a batch and where they end, none if there are not so many; and each one's rows."""
        n_slots, n_each = (n, 1) if kind == "decode" else (1, n)
        slots = self._table.slots
        if n_slots == 1:  # the deepest that has room
            slots = [one for one in slots if len(one.idle_tokens) + n_each <= self._n_ctx_slot]
            slots = sorted(slots, key=lambda one: (-len(one.idle_tokens), one.id))
        ends = {slot.id: len(slot.idle_tokens) for slot in slots[:n_slots]}
        return (ends if len(ends) == n_slots else {}), n_each

    def _try(self, kind: str, ends: dict[int, int], n_each: int) -> None:
        rows: list[Row] = [
            (0, i, slot_id, kind == "verify" or i == end + n_each - 1)
            for slot_id, end in ends.items()
            for i in range(end, end + n_each)
        ]
        settled, began = not self._backend.slots_with_pending_copy, time.monotonic()
        try:
            self._backend.decode(rows)
        except DecodeError:  # nobody waits for it
            settled = False
            self._pending.clear()
            self._slopes.clear()
        seconds = time.monotonic() - began
        for slot_id, end in ends.items():
            self._backend.truncate(slot_id, end)
        if settled:
            self._learn(kind, len(ends), n_each, sum(ends.values()) / len(ends), seconds)

    def _learn(self, kind: str, n_slots: int, n_each: int, depth: float, seconds: float) -> None:
        if kind == "prefill":
            self._costs.observe_prefill(n_each, depth, seconds)
        else:
            self._costs.observe_decode(n_slots, n_slots * n_each, depth, seconds)

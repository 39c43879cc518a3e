"""Measures again, while the engine is idle, what the profile leaves in doubt."""

from __future__ import annotations

import time
from collections import deque

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import Backend, Row
from serve_app.engine.kv_cache.slots import SlotTable
from serve_app.errors import DecodeError

# How often each doubtful number of rows is tried: somebody who comes waits for one trial at most.
_TRIALS = 3


class QuietTrials:
    """Runs doubtful batches behind what idle slots hold, and has it forgotten again. Decoder thread only.

    Only where slots can forget rows without a trace, and have cells of their own.
    """

    def __init__(
        self, backend: Backend, costs: CostModel, table: SlotTable, n_ctx_slot: int
    ) -> None:
        self._backend = backend
        self._costs = costs
        self._table = table
        self._n_ctx_slot = n_ctx_slot
        doubts = costs.doubts if backend.fills_gaps else []
        self._pending = deque(doubts * _TRIALS)

    def __bool__(self) -> bool:
        """Whether there is something to be tried."""
        return bool(self._pending)

    def step(self) -> None:
        """Try one batch, if slots have room for it. No sequence may be running."""
        if not self._pending:
            return
        kind, n = self._pending.popleft()
        n_slots, n_each = (n, 1) if kind == "decode" else (1, n)
        ends = {slot.id: len(slot.idle_tokens) for slot in self._table.slots[:n_slots]}
        if len(ends) == n_slots and max(ends.values()) + n_each <= self._n_ctx_slot:
            self._try(kind, ends, n_each)

    def _try(self, kind: str, ends: dict[int, int], n_each: int) -> None:
        rows: list[Row] = [
            (0, i, slot_id, kind == "verify" or i == end + n_each - 1)
            for slot_id, end in ends.items()
            for i in range(end, end + n_each)
        ]
        settled, began = not self._backend.unsettled, time.monotonic()
        try:
            self._backend.decode(rows)
        except DecodeError:  # nobody waits for it
            settled = False
            self._pending.clear()
        seconds = time.monotonic() - began
        for slot_id, end in ends.items():
            self._backend.truncate(slot_id, end)
        if settled:
            self._learn(kind, len(ends), n_each, sum(ends.values()) / len(ends), seconds)

    def _learn(self, kind: str, n_slots: int, n_each: int, depth: float, seconds: float) -> None:
        if kind == "prefill":
            self._costs.saw_prefill(n_each, depth, seconds)
        else:
            self._costs.saw_decode(n_slots, n_slots * n_each, depth, seconds)

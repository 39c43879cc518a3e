"""A machine whose batches take what a formula says, by a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.base.formats import Row, State


class Machine:
    """A batch takes 10 ms, 1 ms a row, and 1 microsecond for each row and token that it attends to."""

    def __init__(self, n_slots: int, n_ctx_slot: int, n_batch: int) -> None:
        self.now = 0.0
        self.slots = [0] * n_slots
        """By positions, where a slot ends."""
        self.appended = [0] * n_slots
        """Cells that it attends to besides."""
        self.n_ctx_slot, self.n_batch = n_ctx_slot, n_batch
        self.n_batches = 0

    def decode(self, rows: Sequence[Row]) -> None:
        assert 0 < len(rows) <= self.n_batch + len(self.slots)
        for _, position, slot, _ in rows:
            assert position == self.slots[slot] < self.n_ctx_slot
            self.slots[slot] += 1
        self.now += 0.01 + sum(0.001 + 1e-6 * (row[1] + self.appended[row[2]]) for row in rows)
        self.n_batches += 1

    def truncate(self, seq_id: int, n_past: int) -> None:
        self.slots[seq_id] = min(self.slots[seq_id], n_past)
        self.appended[seq_id] *= bool(n_past)

    def copy(self, source: int, target: int) -> None:
        self.slots[target], self.appended[target] = self.slots[source], self.appended[source]

    def save(self, seq_id: int) -> State:
        return bytes(self.slots[seq_id])

    def restore(self, seq_id: int, state: State) -> None:
        self.slots[seq_id], self.appended[seq_id] = len(state), 0

    def append(self, source: int, target: int) -> None:
        if self.slots[target] < self.slots[source]:
            self.slots[target] = self.slots[source]
        else:
            self.appended[target] += self.slots[source] + self.appended[source]

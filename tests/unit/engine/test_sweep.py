"""The sweep over a machine whose passes take what a formula says, by a clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from serve_app.engine.backend import Row
from serve_app.engine.sweep import Sweep


class Machine:
    """A pass takes 10 ms, 1 ms a row, and 1 microsecond for each row and token before it."""

    def __init__(self, n_slots: int, n_ctx_slot: int, n_batch: int) -> None:
        self.now = 0.0
        self.lanes = [0] * n_slots
        self.n_ctx_slot, self.n_batch = n_ctx_slot, n_batch
        self.passes = 0

    def decode(self, rows: Sequence[Row]) -> None:
        assert 0 < len(rows) <= self.n_batch + len(self.lanes)
        self.passes += 1
        for _, position, lane, _ in rows:
            assert position == self.lanes[lane] < self.n_ctx_slot
            self.lanes[lane] += 1
        outputs = Counter(lane for _, _, lane, wants_logits in rows if wants_logits)
        assert outputs == Counter({lane for _, _, lane, _ in rows})
        self.now += 0.01 + sum(0.001 + 1e-6 * row[1] for row in rows)

    def truncate(self, lane: int, n_past: int) -> None:
        self.lanes[lane] = n_past

    def sweep(self, limit_s: float) -> Sweep:
        return Sweep(
            self.decode,
            self.truncate,
            n_slots=len(self.lanes),
            n_ctx_slot=self.n_ctx_slot,
            n_batch=self.n_batch,
            limit_s=limit_s,
            clock=lambda: self.now,
        )


@pytest.mark.parametrize("n_slots", [1, 2, 6, 16])
def test_a_whole_sweep(n_slots: int) -> None:
    machine = Machine(n_slots, 2048, 512)
    measured = machine.sweep(limit_s=60).run()
    assert machine.lanes == [0] * n_slots
    for n, seconds in measured.decode_s.items():
        assert seconds == pytest.approx(0.01 + 0.001 * n)
    assert max(measured.decode_s) == n_slots
    assert list(measured.prefill_s) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert measured.prefill_s[64] == pytest.approx(0.074, rel=0.05)
    assert measured.row_and_cached_token_s == pytest.approx(1e-6, rel=0.01)


@pytest.mark.parametrize("limit_s", [0.0, 0.1, 0.5, 2.0])
def test_it_keeps_to_its_time(limit_s: float) -> None:
    machine = Machine(16, 2048, 512)
    measured = machine.sweep(limit_s).run()
    assert measured.decode_s
    assert measured.prefill_s
    # The first passes of each kind are always made; the probe at depth follows the largest.
    assert machine.now <= limit_s + 1.0
    assert len(measured.prefill_s) < 12


@pytest.mark.parametrize("n_ctx_slot", [34, 48, 100])
def test_a_short_context_is_enough(n_ctx_slot: int) -> None:
    machine = Machine(2, n_ctx_slot, 512)
    measured = machine.sweep(60).run()
    assert all(size <= n_ctx_slot for size in measured.prefill_s)
    assert machine.lanes == [0, 0]

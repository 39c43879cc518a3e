"""The profile over a machine whose batches take what a formula says, by a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.autotune.profiler import Profiler, in_turns
from serve_app.engine.backends.base import Row, State


class Machine:
    """A batch takes 10 ms, 1 ms a row, and 1 microsecond for each row and token before it, and 7 ms more
    for each slot that was copied before it."""

    def __init__(self, n_slots: int, n_ctx_slot: int, n_batch: int) -> None:
        self.now = 0.0
        self.slots = [0] * n_slots
        self.n_ctx_slot, self.n_batch = n_ctx_slot, n_batch
        self.n_copied = 0
        self.restored: list[int] = []
        self.batches_with_copy = 0

    def decode(self, rows: Sequence[Row]) -> None:
        assert 0 < len(rows) <= self.n_batch + len(self.slots)
        for _, position, slot, _ in rows:
            assert position == self.slots[slot] < self.n_ctx_slot
            self.slots[slot] += 1
        self.now += 0.01 + sum(0.001 + 1e-6 * row[1] for row in rows) + 0.007 * self.n_copied
        self.batches_with_copy += bool(self.n_copied)
        self.n_copied = 0

    def truncate(self, seq_id: int, n_past: int) -> None:
        self.slots[seq_id] = min(self.slots[seq_id], n_past)

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]
        self.n_copied += 1

    def save(self, seq_id: int) -> State:
        assert not self.n_copied
        return bytes(self.slots[seq_id])

    def restore(self, seq_id: int, state: State) -> None:
        assert self.slots[seq_id] == self.n_copied == 0
        self.slots[seq_id] = len(state)
        self.restored.append(seq_id)

    def measured(self, limit_s: float, *, unified: bool = False) -> Profile:
        """All of a profile, with half of the time for each of its two parts."""
        profiler = self.profiler(unified=unified)
        in_turns([profiler], limit_s / 2)
        profiler.rest(limit_s / 2)
        return profiler.profile

    def profiler(self, *, unified: bool = False, can_rewind: bool = True) -> Profiler:
        return Profiler(
            self,
            n_slots=len(self.slots),
            n_ctx_slot=self.n_ctx_slot,
            n_batch=self.n_batch,
            unified=unified,
            can_rewind=can_rewind,
            clock=lambda: self.now,
        )


@pytest.mark.parametrize("n_slots", [1, 2, 6, 16])
def test_a_whole_profile(n_slots: int) -> None:
    machine = Machine(n_slots, 2048, 512)
    measured = machine.measured(limit_s=60)
    assert machine.slots == [0] * n_slots
    assert machine.restored == [*range(1, n_slots), *range(n_slots)]
    for n, seconds in measured.decode_s.items():
        assert seconds == pytest.approx(0.01 + 0.001 * n)
    assert min(measured.decode_s) == 1
    assert max(measured.decode_s) == n_slots
    expected = {8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 256, 512}
    assert set(measured.prefill_s) == expected
    assert measured.prefill_s[64] == pytest.approx(0.074, rel=0.05)
    assert set(measured.verify_s) == {2, 3, 4, 6, 8}
    assert measured.verify_s[4] == pytest.approx(0.014, rel=0.05)
    assert measured.depth == 256
    assert measured.deep_decode_s[n_slots] == pytest.approx(0.01 + n_slots * 0.001256)
    assert measured.deep_prefill_s[32] == pytest.approx(0.042 + 32 * 272e-6, rel=0.01)
    assert measured.copy_s == pytest.approx(0.007 if n_slots > 1 else 0.0)


def test_slots_that_cannot_forget_are_not_measured_at_depth() -> None:
    machine = Machine(4, 2048, 512)
    profiler = machine.profiler(can_rewind=False)
    in_turns([profiler], 60)
    profiler.rest(60)
    assert profiler.profile.depth == 0
    assert not profiler.profile.deep_decode_s
    assert len(profiler.profile.prefill_s) > 8
    assert machine.restored == []


class BusyMachine(Machine):
    """Something else runs during the first batch with a copy."""

    def decode(self, rows: Sequence[Row]) -> None:
        self.now += 0.2 if self.n_copied and not self.batches_with_copy else 0.0
        super().decode(rows)


def test_a_copy_costs_no_more_because_something_else_ran() -> None:
    """It would have every shared prompt computed again for as long as the profile is kept."""
    measured = BusyMachine(4, 2048, 512).measured(limit_s=60)
    assert measured.copy_s == pytest.approx(0.007)


class SharedMachine(Machine):
    """Half as fast from the ninth batch on, in whichever context that is."""

    def __init__(self, batches: list[None]) -> None:
        super().__init__(4, 2048, 512)
        self.batches = batches

    def decode(self, rows: Sequence[Row]) -> None:
        began = self.now
        super().decode(rows)
        self.now += (self.now - began) * (len(self.batches) >= 8)
        self.batches.append(None)


def test_profilers_in_turns_meet_the_same_machine() -> None:
    batches: list[None] = []
    first, second = (SharedMachine(batches).profiler() for _ in range(2))
    in_turns([first, second], 120)
    assert len(batches) > 16
    assert first.profile == second.profile
    alone = Machine(4, 2048, 512).measured(60)
    assert first.profile.decode_s[4] == alone.decode_s[4]
    assert first.profile.deep_prefill_s[64] == pytest.approx(2 * alone.deep_prefill_s[64])


class UnifiedMachine(Machine):
    """Copies share their cells, at once. A row takes `masked` microseconds for each cell in use that is not
    before it in its own slot."""

    def __init__(self, n_slots: int, masked: float) -> None:
        super().__init__(n_slots, 2048, 512)
        self.masked = masked
        self.shared = [0] * n_slots

    def decode(self, rows: Sequence[Row]) -> None:
        n_cells = sum(self.slots) - sum(self.shared)
        self.now += sum(self.masked * 1e-6 * (n_cells - row[1]) for row in rows)
        super().decode(rows)

    def copy(self, source: int, target: int) -> None:
        self.slots[target] = self.shared[target] = self.slots[source]

    def truncate(self, seq_id: int, n_past: int) -> None:
        super().truncate(seq_id, n_past)
        self.shared[seq_id] = min(self.shared[seq_id], n_past)


@pytest.mark.parametrize("masked", [0.0, 0.2, 1.5])
def test_cells_of_others_are_measured_apart(masked: float) -> None:
    machine = UnifiedMachine(4, masked)
    measured = machine.measured(60, unified=True)
    assert measured.depth == 256
    assert measured.deep_decode_s[4] == pytest.approx(0.01 + 4 * 0.001256, rel=0.02)
    assert measured.masked == pytest.approx(masked, abs=0.02)
    assert measured.copy_s == pytest.approx(0, abs=1e-9)
    assert machine.restored == [1, 2, 3, 0]
    assert machine.slots == [0] * 4


@pytest.mark.parametrize(("n_slots", "limit_s"), [(1, 60), (4, 0.0), (4, 0.5)])
def test_without_others_or_time_they_cost_as_much(n_slots: int, limit_s: float) -> None:
    assert UnifiedMachine(n_slots, 0.2).measured(limit_s, unified=True).masked == 1.0


@pytest.mark.parametrize("limit_s", [0.0, 0.1, 0.5, 2.0])
def test_it_keeps_to_its_time(limit_s: float) -> None:
    machine = Machine(16, 2048, 512)
    measured = machine.measured(limit_s)
    assert measured.decode_s
    assert measured.prefill_s
    # One batch of each kind is always made; what copies at depth cost is known by two more.
    assert machine.now <= limit_s + 0.2
    assert len(measured.prefill_s) < 12


@pytest.mark.parametrize("n_ctx_slot", [34, 48, 100])
def test_a_short_context_is_enough(n_ctx_slot: int) -> None:
    machine = Machine(2, n_ctx_slot, 512)
    measured = machine.measured(60)
    assert all(size <= n_ctx_slot for size in measured.prefill_s)
    assert machine.slots == [0, 0]


@pytest.mark.parametrize(("n_ctx_slot", "n_batch"), [(2, 512), (16, 512), (2048, 1), (2048, 3)])
def test_the_least_of_batches_has_a_measured_chunk(n_ctx_slot: int, n_batch: int) -> None:
    measured = Machine(2, n_ctx_slot, n_batch).measured(60)
    assert CostModel(measured).prompt_token_s > 0
    assert all(size <= min(n_batch, n_ctx_slot) for size in measured.prefill_s)

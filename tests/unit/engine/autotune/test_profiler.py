"""The profile over a machine whose batches take what a formula says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.autotune.profiler import Profiler, in_turns
from serve_app.engine.backends.base import Row
from tests.unit.engine.autotune.machine import Machine


def profiler(machine: Machine, *, can_rewind: bool = True) -> Profiler:
    return Profiler(
        machine,
        n_slots=len(machine.slots),
        n_ctx_slot=machine.n_ctx_slot,
        n_batch=machine.n_batch,
        can_rewind=can_rewind,
        clock=lambda: machine.now,
    )


def measured(machine: Machine, limit_s: float, *, can_rewind: bool = True) -> Profile:
    """All of a profile, with half of the time for each of its two parts."""
    made = profiler(machine, can_rewind=can_rewind)
    in_turns([made], limit_s / 2)
    made.rest(limit_s / 2)
    return made.profile


@pytest.mark.parametrize("n_slots", [1, 2, 6, 16])
def test_a_whole_profile(n_slots: int) -> None:
    machine = Machine(n_slots, 2048, 512)
    found = measured(machine, 60)
    assert machine.slots == [0] * n_slots
    for n, seconds in found.decode_s.items():
        assert seconds == pytest.approx(0.01 + 0.001 * n)
    assert min(found.decode_s) == 1
    assert max(found.decode_s) == n_slots
    chunks = {*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 256, 384, 512}
    assert set(found.prefill_s) == chunks
    assert found.prefill_s[64] == pytest.approx(0.074, rel=0.05)
    assert set(found.verify_s) == {2, 3, 4, 6, 8, 12, 16}
    assert found.verify_s[4] == pytest.approx(0.014, rel=0.05)
    assert found.copy_s == pytest.approx(0.007 if n_slots > 1 else 0.0)


def test_copies_of_slots_that_cannot_forget_are_not_measured() -> None:
    found = measured(Machine(4, 2048, 512), 60, can_rewind=False)
    assert found.copy_s == 0
    assert len(found.prefill_s) > 8


class BusyMachine(Machine):
    """Something else runs while some batches are computed."""

    def __init__(self, busy: set[int], seconds: float) -> None:
        super().__init__(16, 2048, 512)
        self.busy, self.seconds = busy, seconds

    def decode(self, rows: Sequence[Row]) -> None:
        self.now += self.seconds * (self.n_batches in self.busy)
        super().decode(rows)


@pytest.mark.parametrize("begin", range(0, 60, 3))
def test_a_hiccup_is_not_believed(begin: int) -> None:
    """Three batches in a row take 0.3 s longer, whichever they are."""
    calm = measured(Machine(16, 2048, 512), 60)
    found = measured(BusyMachine({begin, begin + 1, begin + 2}, 0.3), 60)
    assert found.decode_s == pytest.approx(calm.decode_s)
    assert found.prefill_s == pytest.approx(calm.prefill_s)
    assert found.verify_s == pytest.approx(calm.verify_s)
    assert found.copy_s == pytest.approx(calm.copy_s)


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
    first, second = (profiler(SharedMachine(batches)) for _ in range(2))
    in_turns([first, second], 120)
    assert len(batches) >= 16
    assert first.profile == second.profile


@pytest.mark.parametrize("limit_s", [0.0, 0.1, 0.5, 2.0])
def test_it_keeps_to_its_time(limit_s: float) -> None:
    machine = Machine(16, 2048, 512)
    found = measured(machine, limit_s)
    assert found.decode_s
    assert found.prefill_s
    # One batch of each kind is always made.
    assert machine.now <= limit_s + 0.2
    assert len(found.prefill_s) < 13


@pytest.mark.parametrize("n_ctx_slot", [34, 48, 100])
def test_a_short_context_is_enough(n_ctx_slot: int) -> None:
    machine = Machine(2, n_ctx_slot, 512)
    found = measured(machine, 60)
    assert all(size <= n_ctx_slot for size in found.prefill_s)
    assert machine.slots == [0, 0]


@pytest.mark.parametrize(("n_ctx_slot", "n_batch"), [(2, 512), (16, 512), (2048, 1), (2048, 3)])
def test_the_least_of_batches_has_a_measured_chunk(n_ctx_slot: int, n_batch: int) -> None:
    found = measured(Machine(2, n_ctx_slot, n_batch), 60)
    assert CostModel(found).prompt_token_s > 0
    assert all(size <= min(n_batch, n_ctx_slot) for size in found.prefill_s)

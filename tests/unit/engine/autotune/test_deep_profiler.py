"""What a depth adds, over a machine whose batches take what a formula says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.deep_profiler import DEPTH, DeepProfiler, Depth
from serve_app.engine.autotune.profiler import in_turns
from serve_app.engine.backends.base import Row, State
from tests.unit.engine.autotune.machine import Machine


class UnifiedMachine(Machine):
    """Copies are free. A row takes `masked` microseconds for each cell that it does not attend to."""

    def __init__(self, n_slots: int, masked: float = 0.0, n_batch: int = 512) -> None:
        super().__init__(max(2, n_slots) + 1, DEPTH + 64, n_batch)
        self.masked = masked
        self.filled = 0
        """Cells that were restored."""
        self.hiccups: dict[int, float] = {}
        """Seconds that batches take besides, by their number."""

    def decode(self, rows: Sequence[Row]) -> None:
        others = [max(0, self.filled - row[1] - self.appended[row[2]]) for row in rows]
        self.now += sum(self.masked * 1e-6 * n for n in others)
        self.now += self.hiccups.get(self.n_batches, 0.0)
        super().decode(rows)

    def restore(self, seq_id: int, state: State) -> None:
        super().restore(seq_id, state)
        self.filled += len(state)

    def truncate(self, seq_id: int, n_past: int) -> None:
        super().truncate(seq_id, n_past)
        self.filled *= any(self.slots)

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        self.n_copied = 0


def measured(machine: Machine, n_slots: int, limit_s: float = 60) -> Depth:
    made = DeepProfiler(
        machine,
        n_slots=n_slots,
        depth=DEPTH,
        n_batch=machine.n_batch,
        clock=lambda: machine.now,
    )
    in_turns([made], limit_s / 2)
    made.rest(limit_s / 2)
    return made.depth


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("masked", [0.0, 0.4, 1.5])
def test_a_depth(n_slots: int, masked: float) -> None:
    machine = UnifiedMachine(n_slots, masked)
    found = measured(machine, n_slots)
    assert found.n_tokens == DEPTH
    assert found.decode_s == pytest.approx({n: n * DEPTH * 1e-6 for n in {1, n_slots}}, rel=0.01)
    assert set(found.prefill_s) == {16, 32, 56, 64}
    assert found.prefill_s[64] == pytest.approx(64 * DEPTH * 1e-6, rel=0.05)
    assert found.masked == pytest.approx(masked, abs=0.02)
    assert machine.now < 4, "what is there is restored, not computed"


@pytest.mark.parametrize("n", range(40))
def test_a_hiccup_changes_nothing(n: int) -> None:
    machine = UnifiedMachine(4, 0.4)
    machine.hiccups = {n: 0.3}
    found = measured(machine, 4)
    assert found.decode_s[4] == pytest.approx(4 * DEPTH * 1e-6, rel=0.01)
    assert found.masked == pytest.approx(0.4, abs=0.02)


def test_what_breaks_a_physical_order_is_measured_a_third_time() -> None:
    sure, unsure = UnifiedMachine(4, 0.4), UnifiedMachine(4, 0.4)
    measured(sure, 4)
    unsure.hiccups = dict.fromkeys((*range(8), *range(19, 23)), 0.3)  # what is not deep, twice
    found = measured(unsure, 4)
    assert found.decode_s[4] == pytest.approx(4 * DEPTH * 1e-6, rel=0.01)
    assert found.masked == pytest.approx(0.4, abs=0.02)
    assert unsure.n_batches > sure.n_batches + 5


def test_it_is_added_to_what_was_measured_without_depth() -> None:
    depth = Depth(1000, {1: 0.01, 4: 0.02}, {16: 0.3}, masked=0.25)
    shallow = Profile({1: 0.02, 2: 0.03, 4: 0.05}, {16: 0.1, 64: 0.2})
    split, unified = (depth.added_to(shallow, unified=kind) for kind in (False, True))
    assert split.deep_decode_s == pytest.approx({1: 0.03, 2: 0.05, 4: 0.09})
    assert unified.deep_decode_s == pytest.approx({1: 0.03, 4: 0.07})
    assert split.deep_prefill_s == unified.deep_prefill_s == pytest.approx({16: 0.4})
    assert (split.depth, split.masked) == (1000, 0.25)
    assert Depth().added_to(shallow, unified=True) == shallow


def test_without_time_only_the_least_of_batches_is_measured() -> None:
    machine = UnifiedMachine(4)
    found = measured(machine, 4, limit_s=0)
    assert set(found.decode_s) == {1}
    assert set(found.prefill_s) == {16}


@pytest.mark.parametrize("n_batch", [1, 3, 40])
def test_small_batches_are_enough(n_batch: int) -> None:
    found = measured(UnifiedMachine(2, n_batch=n_batch), 2)
    assert found.decode_s[1] == pytest.approx(DEPTH * 1e-6, rel=0.03)
    assert all(n <= n_batch for n in found.prefill_s)

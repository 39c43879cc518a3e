"""Profiles over machines whose batches take what a formula says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from serve_app.base.formats import Row, State
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import CostModel, Profile, envelope
from serve_app.engine.costs.profiler import (
    CHUNKS,
    DEPTH,
    DeepProfiler,
    Depth,
    Measured,
    Profiler,
    Trials,
    in_turns,
    paged_depth,
)
from tests.unit.engine.costs.machine import Machine


@pytest.mark.parametrize(
    ("times", "monotone", "by_row"),
    [
        ({}, {}, {}),
        ({1: 0.02, 2: 0.03, 4: 0.05}, {}, {}),
        ({6: 0.116, 8: 0.044}, {6: 0.044}, {6: 0.044}),
        ({1: 0.02, 2: 0.06, 4: 0.05}, {2: 0.05}, {2: 0.04}),
        ({1: 0.02, 4: 0.2, 8: 0.25}, {}, {4: 0.08, 8: 0.16}),
        ({63: 0.5, 64: 0.25}, {63: 0.25}, {63: 0.25}),
    ],
)
def test_the_envelope_is_the_most_that_batches_can_take_by_the_times_of_others(
    times: dict[int, float], monotone: dict[int, float], by_row: dict[int, float]
) -> None:
    assert envelope(times, by_row=False) == pytest.approx(times | monotone)
    assert envelope(times) == pytest.approx(times | by_row)


def test_what_stays_so_is_believed_after_a_few_more_rounds() -> None:
    """Two rows are slower than four, as with some kernels; six were not."""
    now, tried = [0.0], list[int]()
    true_s = {1: 0.02, 2: 0.06, 4: 0.05, 6: 0.06, 8: 0.07}

    def trial(n: int) -> Measured:
        tried.append(n)
        hiccup = 0.5 if n == 6 and tried.count(6) <= 2 else 0.0
        return trials.time(lambda: now.__setitem__(0, now[0] + true_s[n] + hiccup))

    trials = Trials(Machine(1, 1, 1), Clocks(wall=lambda: now[0]))
    trials.left_s = 60.0
    found: dict[int, float] = {}
    for _ in trials.measure(found, list(true_s), trial):
        pass
    assert found == pytest.approx(true_s)
    assert tried[:6] == [1, 2, 4, 6, 8, 1], "each size comes again only after the others"
    assert {n: tried.count(n) for n in true_s} == {1: 6, 2: 8, 4: 6, 6: 3, 8: 6}


def clocks_of(machine: Machine) -> Clocks:
    return Clocks(wall=lambda: machine.now)


class Shared(Machine):
    """Its two threads share two cores with other programs, until it is `quiet`. A batch takes longer by the
    square of the share of their time that they have."""

    def __init__(self, shares: Callable[[], float]) -> None:
        super().__init__(16, 2048, 512)
        self.shares, self.cpu, self.quiet = shares, 0.0, math.inf

    def decode(self, rows: Sequence[Row]) -> None:
        began, share = self.now, 1.0 if self.now >= self.quiet else self.shares()
        super().decode(rows)
        self.now = began + (self.now - began) / share**2
        self.cpu += 2 * share * (self.now - began)

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda _rows: 2, lambda: self.now, lambda: self.cpu)


@pytest.mark.parametrize(("quiet", "within"), [(math.inf, 0.25), (1.0, 0.01)])
def test_a_profile_beside_a_full_load(
    monkeypatch: pytest.MonkeyPatch, quiet: float, within: float
) -> None:
    """Batches take two to seven times as long, each for itself. What the threads needed is known all the
    same, and better as soon as they have all of their time."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    rng = random.Random(3)
    machine = Shared(lambda: rng.uniform(0.38, 0.7))
    machine.quiet = quiet
    made = Profiler(machine, n_slots=16, n_ctx_slot=2048, n_batch=512, clocks=machine.clocks)
    in_turns([made], 30)
    made.rest(30)
    calm = measured(Machine(16, 2048, 512), 60)
    assert made.profile.decode_s == pytest.approx(calm.decode_s, rel=within)
    assert made.profile.prefill_s == pytest.approx(calm.prefill_s, rel=within)
    assert set(made.profile.decode_s) == set(calm.decode_s)
    if quiet == math.inf:
        assert made.profile.share == pytest.approx(0.54, abs=0.08)


def profiler(machine: Machine) -> Profiler:
    return Profiler(
        machine,
        n_slots=len(machine.slots),
        n_ctx_slot=machine.n_ctx_slot,
        n_batch=machine.n_batch,
        clocks=clocks_of(machine),
    )


def measured(machine: Machine, limit_s: float) -> Profile:
    """All of a profile, with half of the time for each of its two parts."""
    made = profiler(machine)
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


def test_batches_are_measured_behind_tokens_that_every_slot_has() -> None:
    machine = Machine(4, 2048, 512)
    made = profiler(machine)
    made.fill(256, 4)
    in_turns([made], 60)
    assert machine.slots == [256] * 4
    assert made.profile.decode_s[4] == pytest.approx(0.01 + 4 * (0.001 + 256e-6), rel=0.01)


def test_more_chunks_may_be_among_the_essentials() -> None:
    machine = Machine(2, 256, 256)
    clocks = clocks_of(machine)
    made = Profiler(
        machine, n_slots=2, n_ctx_slot=256, n_batch=256, clocks=clocks, chunks=(*CHUNKS, 256)
    )
    in_turns([made], 30)
    assert set(made.profile.prefill_s) == {16, 64, 256}


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


class UnifiedMachine(Machine):
    """A row takes `masked` microseconds for each cell that it does not attend to."""

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


def deep_measured(machine: Machine, n_slots: int, limit_s: float = 60) -> Depth:
    made = DeepProfiler(
        machine, n_slots=n_slots, depth=DEPTH, n_batch=machine.n_batch, clocks=clocks_of(machine)
    )
    in_turns([made], limit_s / 2)
    made.rest(limit_s / 2)
    return made.depth


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("masked", [0.0, 0.4, 1.5])
def test_a_depth(n_slots: int, masked: float) -> None:
    machine = UnifiedMachine(n_slots, masked)
    found = deep_measured(machine, n_slots)
    assert found.n_tokens == DEPTH
    assert found.decode_s == pytest.approx({n: n * DEPTH * 1e-6 for n in {1, n_slots}}, rel=0.01)
    assert set(found.prefill_s) == {16, 32, 56, 64}
    assert found.prefill_s[64] == pytest.approx(64 * DEPTH * 1e-6, rel=0.05)
    assert found.masked == pytest.approx(masked, abs=0.02)
    assert machine.now < 5, "what is there is restored, not computed"


@pytest.mark.parametrize("n", range(40))
def test_a_hiccup_changes_nothing(n: int) -> None:
    machine = UnifiedMachine(4, 0.4)
    machine.hiccups = {n: 0.3}
    found = deep_measured(machine, 4)
    assert found.decode_s[4] == pytest.approx(4 * DEPTH * 1e-6, rel=0.01)
    assert found.masked == pytest.approx(0.4, abs=0.02)


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
    found = deep_measured(machine, 4, limit_s=0)
    assert set(found.decode_s) == {1}
    assert set(found.prefill_s) == {16}


@pytest.mark.parametrize("n_batch", [1, 3, 40])
def test_small_batches_are_enough(n_batch: int) -> None:
    found = deep_measured(UnifiedMachine(2, n_batch=n_batch), 2)
    assert found.decode_s[1] == pytest.approx(DEPTH * 1e-6, rel=0.03)
    assert all(n <= n_batch for n in found.prefill_s)


PAGED = Profile({1: 0.01, 4: 0.02}, {16: 0.05, 64: 0.15, 512: 1.0})


class PagedCache:
    """A batch takes 10 us for each row and token before it, besides what it takes in an empty cache."""

    def __init__(self) -> None:
        self.now, self.length = 0.0, 0

    def clock(self) -> float:
        return self.now

    def pretend(self, seq_id: int, n_tokens: int) -> None:
        assert (seq_id, self.length) == (0, 0)
        self.length = n_tokens

    def decode(self, rows: Sequence[Row]) -> None:
        n = len(rows)
        assert [row[1] for row in rows] == list(range(self.length, self.length + n))
        shallow = PAGED.decode_s if n == 1 else PAGED.prefill_s
        self.now += shallow[n] + n * self.length * 1e-5
        self.length += n

    def truncate(self, seq_id: int, n_past: int) -> None:
        self.length = min(self.length, n_past)

    def copy(self, source: int, target: int) -> None: ...

    def save(self, seq_id: int) -> bytes:
        return b""

    def restore(self, seq_id: int, state: bytes | memoryview) -> None: ...


def test_a_depth_of_a_paged_cache_is_added_to_all_batches() -> None:
    cache = PagedCache()
    depth = paged_depth(cache, PAGED, 1024, 60.0, Clocks(wall=cache.clock))
    assert cache.length == 0
    assert depth.decode_s == pytest.approx({1: 0.01024})
    assert depth.prefill_s == pytest.approx({16: 0.16384, 64: 0.65536})
    costs = CostModel(depth.added_to(PAGED, unified=False))
    assert costs.decode_s(4, 1024) == pytest.approx(0.02 + 4 * 0.01024)
    assert costs.prefill_s(64, 512) == pytest.approx(0.15 + 64 * 512e-5)


def test_without_time_one_batch_of_a_paged_cache_tells() -> None:
    cache = PagedCache()
    depth = paged_depth(cache, PAGED, 1024, 0.0, Clocks(wall=cache.clock))
    assert depth.decode_s == pytest.approx({1: 0.01024})
    assert cache.length == 0

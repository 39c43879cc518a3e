"""With how many threads batches of few rows are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from serve_app.base.formats import Threads
from serve_app.engine.backends.base import Row
from serve_app.engine.choice.threads import best_threads, candidates

Cost = Callable[[int, int], float]
"""Seconds of a batch of so many rows with so many threads."""


class Machine:
    """A context whose batches take as long as a function says, by a clock that only they advance. A change
    of threads takes `change_s`."""

    def __init__(self, cost: Cost, change_s: float = 0.0) -> None:
        self.now = 0.0
        self.n_batches = 0
        self._cost = cost
        self._change_s = change_s
        self._threads = Threads.alike(1, None)
        self._last = 0
        self._held: dict[int, int] = {}

    def clock(self) -> float:
        return self.now

    def use_threads(self, threads: Threads) -> None:
        self._threads = threads

    def decode(self, rows: Sequence[Row]) -> None:
        n, of = len(rows), self._threads
        threads = of.one_row if n == 1 else of.few_rows if n <= 16 else of.many_rows
        self.now += self._cost(n, threads) + (self._change_s if threads != self._last else 0)
        self._last = threads
        self.n_batches += 1
        for _, position, seq_id, _ in rows:
            assert position == self._held.get(seq_id, 0)
            self._held[seq_id] = position + 1

    def truncate(self, seq_id: int, n_past: int) -> None:
        self._held[seq_id] = n_past

    def run(self, most: int, limit_s: float = 60, n_slots: int = 32) -> Threads:
        threads = best_threads(
            self, n_slots=n_slots, n_ctx_slot=512, most=most, limit_s=limit_s, clock=self.clock
        )
        assert not any(self._held.values()), "the cache is left empty"
        return threads


def crowded(n_rows: int, threads: int) -> float:
    """Memory feeds 32 threads; more of them only wait for each other. Many rows are bound by cores."""
    if n_rows > 16:
        return 0.5 / threads
    return 0.1 / min(threads, 32) + (0.0002 * threads if n_rows == 1 else 0.000002 * threads)


def test_few_rows_get_what_is_fastest_and_many_all() -> None:
    threads = Machine(crowded).run(64)
    assert (threads.one_row, threads.few_rows, threads.many_rows) == (32, 64, 64)
    assert threads.reason.startswith("32 for 1 row (with a prompt's after it: 23.7 ms with 64, ")
    assert "; 64 for 2 to 16 rows (" in threads.reason


def test_what_the_change_of_threads_costs_counts() -> None:
    assert Machine(crowded, change_s=0.001).run(64).one_row == 32
    assert Machine(crowded, change_s=0.01).run(64).one_row == 64


@pytest.mark.parametrize("most", [1, 2, 4])
def test_with_few_cores_nothing_is_tried(most: int) -> None:
    assert Machine(crowded).run(most) == Threads.alike(most, None)


def test_without_time_all_threads_are_used() -> None:
    threads = Machine(lambda n_rows, threads: 1.0).run(64, limit_s=2.7)
    assert (threads.one_row, threads.few_rows, threads.many_rows) == (64, 64, 64)
    assert "too long" in threads.reason


def test_one_slot_never_decodes_several_rows() -> None:
    threads = Machine(crowded).run(64, n_slots=1)
    assert (threads.one_row, threads.few_rows) == (32, 64)


def test_slots_too_short_for_a_trial() -> None:
    machine = Machine(crowded)
    threads = best_threads(
        machine, n_slots=2, n_ctx_slot=16, most=64, limit_s=60, clock=machine.clock
    )
    assert threads == Threads.alike(64, None)


def test_a_hiccup_decides_nothing() -> None:
    machine = Machine(lambda n_rows, threads: 0.01)
    plain = machine._cost
    machine._cost = lambda n_rows, threads: (
        5.0 if machine.n_batches in (9, 20) else plain(n_rows, threads)
    )
    assert machine.run(8).one_row == 8


@pytest.mark.parametrize(
    ("most", "expected"), [(4, [4]), (5, [5, 3, 2]), (8, [8, 6, 4]), (64, [64, 48, 32])]
)
def test_candidates(most: int, expected: list[int]) -> None:
    assert candidates(most) == expected


@pytest.mark.parametrize(
    ("few_s", "many_s", "expected"),
    [(0.090, 0.100, 4), (0.098, 0.100, 8), (0.050, 0.160, 8)],
    ids=["a gain", "noise", "eaten by what follows"],
)
def test_other_threads_must_gain_in_both_batches(
    few_s: float, many_s: float, expected: int
) -> None:
    """Eight and six threads take 100 ms for few rows and for many, four these times."""
    machine = Machine(lambda n_rows, threads: 0.1)

    def decode(rows: Sequence[Row]) -> None:
        machine._cost = lambda n_rows, threads: (
            0.1 if tried != 4 else many_s if n_rows > 16 else few_s
        )
        tried = machine._threads.one_row
        Machine.decode(machine, rows)

    machine.decode = decode  # type: ignore[method-assign]
    assert machine.run(8).one_row == expected

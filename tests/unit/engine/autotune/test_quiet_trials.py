"""Doubtful measurements are made again while nobody waits."""

from __future__ import annotations

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.autotune.quiet_trials import QuietTrials
from serve_app.engine.kv_cache.packing import token_array
from serve_app.engine.kv_cache.slots import SlotTable
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import endless

DOUBTFUL = Profile({1: 0.01, 2: 9.0, 4: 0.02}, {8: 7.0, 16: 0.02}, {2: 0.01, 4: 8.0, 8: 0.02})
N_CTX_SLOT = 32


def trials(backend: FakeBackend, costs: CostModel) -> QuietTrials:
    return QuietTrials(backend, costs, SlotTable(len(backend.slots), 16), N_CTX_SLOT)


def test_what_is_doubted_is_tried_until_it_is_known() -> None:
    backend, costs = FakeBackend(endless, n_slots=4), CostModel(DOUBTFUL)
    assert costs.doubts == [("decode", 2), ("prefill", 8), ("verify", 4)]
    quiet = trials(backend, costs)
    n_tried = 0
    while quiet:
        quiet.step()
        n_tried += 1
        assert backend.slots == [[]] * 4, "all is forgotten again"
    quiet.step()
    assert n_tried == len(backend.batches) == 9
    assert [[row[:3] for row in batch] for batch in backend.batches[:3]] == [
        [(0, 0, 0), (0, 0, 1)],
        [(0, i, 0) for i in range(8)],
        [(0, i, 0) for i in range(4)],
    ]
    assert costs.decode_s(2) < 2
    assert costs.prefill_s(8, 0) < 2
    assert costs.verify_s(1, 3, 0) < 2


def test_nothing_is_tried_where_nothing_is_doubted_or_slots_cannot_forget() -> None:
    backend = FakeBackend(endless, n_slots=4)
    assert not trials(backend, CostModel(Profile({1: 0.01, 4: 0.02}, {16: 0.02})))
    backend.fills_gaps = False
    assert not trials(backend, CostModel(DOUBTFUL))


def test_what_has_no_room_is_left_out() -> None:
    backend = FakeBackend(endless, n_slots=1)
    quiet = trials(backend, CostModel(DOUBTFUL))
    while quiet:
        quiet.step()
    assert {len(batch) for batch in backend.batches} == {4, 8}


def test_an_engine_that_is_closed_does_not_wait_for_them() -> None:
    backend, costs = FakeBackend(endless, n_slots=4), CostModel(DOUBTFUL)
    quiet, before_s = trials(backend, costs), costs.decode_s(2)
    backend.cancel(True)
    quiet.step()
    assert not quiet
    assert backend.slots == [[]] * 4
    assert costs.decode_s(2) == before_s


def test_what_depth_adds_is_tried_again_as_soon_as_a_slot_is_deep() -> None:
    shallow, deep = {1: 0.01, 4: 0.02}, {1: 0.02, 4: 0.04}
    unsure = Profile(shallow, {8: 0.02, 16: 0.03}, {}, 1000, deep, {8: 0.03, 16: 0.02})
    backend, costs = FakeBackend(endless, n_slots=4), CostModel(unsure)
    assert costs.doubts == []
    assert costs.doubted_slopes == [("prefill", 8), ("prefill", 16)]
    table = SlotTable(len(backend.slots), 16)
    quiet = QuietTrials(backend, costs, table, 2048)
    assert not quiet
    quiet.step()
    assert backend.batches == []
    tokens = [1] * 1024
    FakeBackend.decode(backend, [(1, i, 2, False) for i in range(1024)])
    table.slots[2].idle_tokens = token_array(tokens)
    backend.batches.clear()
    while quiet:
        quiet.step()
    assert [len(batch) for batch in backend.batches] == [8, 16] * 3
    assert {row[1:3] for row in backend.batches[0]} == {(1024 + i, 2) for i in range(8)}
    assert backend.slots[2] == tokens
    assert costs.prefill_s(16, 1024) < 0.03

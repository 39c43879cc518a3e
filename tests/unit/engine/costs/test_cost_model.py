"""How long a step takes, by what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.costs.cost_model import CostModel, Profile

MEASURED = Profile(
    decode_s={1: 0.02, 4: 0.05, 16: 0.11},
    prefill_s={16: 0.1, 32: 0.11, 64: 0.2, 128: 0.38},
    verify_s={2: 0.03, 4: 0.04},
    depth=1000,
    deep_decode_s={1: 0.03, 16: 0.27},
    deep_prefill_s={16: 0.26, 32: 0.43, 128: 1.66},
)


@pytest.mark.parametrize(
    ("n_rows", "expected"), [(1, 0.02), (2, 0.03), (4, 0.05), (10, 0.08), (16, 0.11), (32, 0.22)]
)
def test_decode_is_straight_between_measured_points(n_rows: int, expected: float) -> None:
    assert CostModel(MEASURED).decode_s(n_rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n_rows", "n_past", "expected"),
    [
        (32, 0, 0.11),
        (48, 0, 0.155),
        (8, 0, 0.1),
        (256, 0, 0.76),
        (32, 1000, 0.43),
        (32, 500, 0.27),
        (64, 1000, 0.2 + 0.32 + (1.28 - 0.32) / 3),
    ],
)
def test_prefill_grows_with_rows_and_depth(n_rows: int, n_past: int, expected: float) -> None:
    assert CostModel(MEASURED).prefill_s(n_rows, n_past) == pytest.approx(expected)


def test_decode_grows_with_depth() -> None:
    model = CostModel(MEASURED)
    assert model.decode_s(1, 1000) == pytest.approx(0.03)
    assert model.decode_s(16, 500) == pytest.approx(0.19)


def test_cells_of_others_count_as_far_as_they_cost() -> None:
    model = CostModel(replace(MEASURED, masked=0.25))
    # Split, or all its own.
    assert model.effective_past(500, 0) == model.effective_past(500, 500) == 500
    assert model.effective_past(500, 2500) == 1000
    assert CostModel(MEASURED).effective_past(500, 2500) == 2500


@pytest.mark.parametrize(
    ("n_sequences", "n_drafted", "expected"),
    [(1, 0, 0.02), (1, 1, 0.03), (1, 3, 0.04), (2, 1, 0.05)],
)
def test_verifying_drafts(n_sequences: int, n_drafted: int, expected: float) -> None:
    """One sequence's drafts were measured; several are taken to cost what as many sequences do."""
    assert CostModel(MEASURED).verify_s(n_sequences, n_drafted, 0) == pytest.approx(expected)


def test_a_chunk_beside_other_rows() -> None:
    model = CostModel(MEASURED)
    assert model.chunk(500, 0, within_s=0.2, n_beside=16) == 48
    assert model.chunk(20, 0, within_s=0.2, n_beside=16) == 20  # all that is left
    assert model.chunk(500, 0, within_s=0.2, n_beside=56) == 8
    assert model.chunk(500, 0, within_s=0.05, n_beside=16) == 0


@pytest.mark.parametrize(
    ("n_pending", "beside_s", "within_s", "expected"),
    [
        (1000, 0.02, 0.23, 72),
        (1000, 0.02, 0.12, 32),
        (1000, 0.02, 0.08, 0),
        (1000, 0.0, 0.16, 48),
        (40, 0.02, 0.23, 40),
        (128, 0.0, 9.9, 128),
        (20, 0.02, 0.12, 20),
    ],
)
def test_chunk_is_the_one_that_gets_on_fastest(
    n_pending: int, beside_s: float, within_s: float, expected: int
) -> None:
    model = CostModel(MEASURED)
    assert model.chunk(n_pending, 0, beside_s=beside_s, within_s=within_s) == expected


@pytest.mark.parametrize(
    ("within_s", "expected"),
    [(0.051, 48), (0.063, 60), (0.071, 64), (0.081, 80), (0.15, 144), (0.3, 288)],
)
def test_between_measured_sizes_the_steps_grow(within_s: float, expected: int) -> None:
    straight = CostModel(Profile({1: 0.01}, {n: 0.001 * n for n in (16, 64, 256, 512)}))
    assert straight.chunk(1000, 0, within_s=within_s, beside_s=0.02) == expected
    assert straight.chunk(50, 0, within_s=9.9, beside_s=0.02) == 50


@given(st.integers(1, 3000), st.integers(0, 4000), st.floats(0.01, 2), st.floats(0.0, 0.5))
def test_a_chunk_fits_or_is_nothing(
    n_pending: int, n_past: int, within_s: float, beside_s: float
) -> None:
    model = CostModel(MEASURED)
    size = model.chunk(n_pending, n_past, beside_s=beside_s, within_s=within_s)
    assert 0 <= size <= n_pending
    assert size == 0 or model.prefill_s(size, n_past) <= within_s


def test_nothing_measured_costs_nothing() -> None:
    model = CostModel(Profile())
    assert not model
    assert model.decode_s(4) == model.prefill_s(100, 100) == model.prompt_token_s == 0.0
    assert model.chunk(100, 0, within_s=0.1) == 100
    assert model.smallest_chunk(100) == 100
    model.observe_decode(4, 4, 0, 1.0)
    model.observe_prefill(4, 0, 1.0)
    assert model.curve() == {"decode_ms": {}, "prefill_ms": {}, "verify_ms": {}}


def test_it_learns_what_batches_really_take() -> None:
    model = CostModel(MEASURED)
    for _ in range(200):
        model.observe_decode(4, 4, 0, 0.1)
        model.observe_decode(1, 1, 0, 0.02)
        model.observe_decode(1, 2, 0, 0.06)
        model.observe_prefill(32, 1000, 0.86)
    assert model.decode_s(4) == pytest.approx(0.1, rel=0.05)
    assert model.decode_s(1) == pytest.approx(0.02, rel=0.05)
    assert model.verify_s(1, 1, 0) == pytest.approx(0.06, rel=0.05)
    assert model.prefill_s(32, 1000) == pytest.approx(0.86, rel=0.05)


def test_a_machine_that_gets_slower_is_slower_at_what_was_not_seen() -> None:
    model = CostModel(MEASURED)
    for _ in range(30):
        model.observe_decode(4, 4, 0, 0.1)
    assert model.decode_s(4) == pytest.approx(0.1, rel=0.02)
    assert model.decode_s(1) > 1.3 * 0.02
    assert model.prefill_s(128, 0) > 1.3 * 0.38


def test_a_hiccup_counts_little_and_a_wrong_measurement_is_forgotten() -> None:
    model = CostModel(MEASURED)
    for _ in range(20):
        model.observe_decode(4, 4, 0, 0.05)
    model.observe_decode(4, 4, 0, 50.0)
    assert 0.05 < model.decode_s(4) < 0.06
    for _ in range(5):
        model.observe_decode(4, 4, 0, 0.05)
    assert model.decode_s(4) == pytest.approx(0.05, rel=0.02)
    wrong = CostModel(Profile({4: 9.0}, {16: 9.0}))
    for _ in range(200):
        wrong.observe_decode(4, 4, 0, 0.05)
    assert wrong.decode_s(4) == pytest.approx(0.05, rel=0.01)


def test_what_was_badly_measured_and_is_seldom_tried_is_soon_known() -> None:
    """Something else ran when 16 rows were measured: four batches of 4 seem faster, until one is tried."""
    model, true_s = CostModel(Profile({4: 0.045, 16: 0.3}, {16: 0.1})), {4: 0.045, 16: 0.14}
    slots = tuple(range(16))
    assert model.steps_s(16, 0) == pytest.approx(4 * 0.045)
    split = []
    for _ in range(200):
        parts = model.split(slots, 0)
        split.append(len(parts) == 4)
        for n in parts:
            model.observe_decode(n, n, 0, true_s[n])
    assert not any(split[60:])


def test_a_batch_is_split_where_two_rows_cost_more_than_two_batches() -> None:
    """As Q8_0 does on AVX-512; every once in a while it is one batch all the same, to see."""
    model = CostModel(Profile({1: 0.02, 2: 0.06, 4: 0.07, 8: 0.1}, {16: 0.1}))
    assert model.split((4, 5), 0) == (2,)
    assert model.split((4, 5), 0) == (1, 1)
    assert model.steps_s(2, 0) == pytest.approx(0.04)
    eight = tuple(range(8))
    assert [model.split(eight, 0), model.split(eight, 0)] == [(8,), (8,)]
    for _ in range(64):
        model.observe_decode(1, 1, 0, 0.02)
    assert model.split((4, 5), 0) == (2,)


def test_a_batch_that_others_may_follow_is_split_at_gaps_only() -> None:
    model = CostModel(Profile({1: 0.002, 2: 0.006, 4: 0.007, 8: 0.009}, {16: 0.1}))
    assert [model.split((4, 5), 0), model.split((4, 5), 0)] == [(2,), (2,)]
    assert model.split((0, 7), 0) == (1, 1)


@given(
    st.sets(st.integers(0, 15), min_size=1),
    st.sets(st.integers(0, 15)),
    st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
)
def test_a_split_is_of_all_slots_and_never_slower(
    busy: set[int], blocked: set[int], seconds: list[float]
) -> None:
    """Than one batch over all, or one for each run of consecutive slots."""
    model = CostModel(Profile(dict(zip((1, 2, 4, 8, 16), seconds, strict=True)), {16: 0.1}))
    slots, blocked = tuple(sorted(busy)), blocked - busy
    model.split(slots, 0)
    rest = iter(slots)
    parts = [[next(rest) for _ in range(n)] for n in model.split(slots, 0, frozenset(blocked))]
    assert [slot for part in parts for slot in part] == list(slots)
    spans = [range(part[0], part[-1] + 1) for part in parts]
    assert all(blocked.isdisjoint(span) for span in spans)
    taken_s = sum(model.decode_s(len(span)) for span in spans)
    runs = [[slots[0]]]
    for slot in slots[1:]:
        if slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    slack = 1 / (1 - 0.05)
    assert taken_s <= slack * sum(model.decode_s(len(run)) for run in runs) + 1e-9
    whole = range(slots[0], slots[-1] + 1)
    if blocked.isdisjoint(whole):
        assert taken_s <= slack * model.decode_s(len(whole)) + 1e-9


def test_gaps_between_slots_are_filled_where_that_is_faster() -> None:
    model = CostModel(Profile({1: 0.04, 4: 0.05, 16: 0.1}, {16: 0.1}))
    assert model.split((0, 2, 3), 0) == (3,)
    assert model.split((0, 2, 3), 0, frozenset({1})) == (1, 2)
    assert model.split((0, 15), 0) == (1, 1)
    assert model.split((0, 1, 14, 15), 0) == (2, 2)
    assert model.split((0, 5, 9, 15), 0) == (4,)


def test_small_things() -> None:
    model = CostModel(MEASURED)
    assert model.smallest_chunk(100) == 16
    assert model.smallest_chunk(9) == 9
    assert model.prompt_token_s == pytest.approx((0.2 / 64 + 0.38 / 128) / 2)
    assert model.curve()["verify_ms"] == {2: 30.0, 4: 40.0}


def test_a_size_that_was_measured_too_fast_does_not_say_what_prompts_take() -> None:
    times = {n: 0.002 * n for n in (16, 32, 64, 128, 256, 512)}
    assert CostModel(Profile({1: 0.01}, times)).prompt_token_s == pytest.approx(0.002)
    lucky = CostModel(Profile({1: 0.01}, times | {256: 0.3}))
    assert lucky.prompt_token_s == pytest.approx(0.002)


def test_behind_many_tokens_a_chunk_has_fewer_rows_than_were_measured() -> None:
    """Eight rows behind 35,000 tokens take 0.39 s, of which attention is all but the weights' 0.04."""
    prefill = {8: 0.04, 64: 0.12}
    deep = {n: seconds + n * 0.005 for n, seconds in prefill.items()}
    model = CostModel(Profile({1: 0.03}, prefill, depth=4000, deep_prefill_s=deep))
    assert model.prefill_s(8, 35_000) == pytest.approx(0.39)
    assert model.prefill_s(1, 0) == model.prefill_s(8, 0)
    assert model.chunk(1000, 35_000, within_s=0.23, beside_s=0.03) == 4
    assert model.prefill_s(4, 35_000) == pytest.approx(0.215)
    assert model.smallest_chunk(1000, 0) == 8
    assert model.smallest_chunk(1000, 35_000) == 1

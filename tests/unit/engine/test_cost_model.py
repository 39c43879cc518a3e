from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.cost_model import CostModel, Measurements

MEASURED = Measurements(
    decode_s={1: 0.02, 4: 0.05, 16: 0.11},
    prefill_s={16: 0.1, 32: 0.11, 64: 0.2, 128: 0.38},
    row_and_cached_token_s=1e-5,
)


@pytest.mark.parametrize(
    ("n_rows", "expected"), [(1, 0.02), (2, 0.03), (4, 0.05), (10, 0.08), (16, 0.11), (32, 0.22)]
)
def test_decode_is_straight_between_measured_points(n_rows: int, expected: float) -> None:
    assert CostModel(MEASURED).decode_s(n_rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n_rows", "n_past", "expected"),
    [(32, 0, 0.11), (48, 0, 0.155), (8, 0, 0.1), (256, 0, 0.76), (32, 1000, 0.11 + 0.32)],
)
def test_prefill_grows_with_rows_and_depth(n_rows: int, n_past: int, expected: float) -> None:
    assert CostModel(MEASURED).prefill_s(n_rows, n_past) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n_pending", "beside_s", "within_s", "expected"),
    [
        (1000, 0.02, 0.25, 64),
        (1000, 0.02, 0.14, 32),
        (1000, 0.02, 0.1, 0),
        (40, 0.02, 0.25, 40),
        (128, 0.0, 9.9, 128),
        (20, 0.02, 0.14, 20),
    ],
)
def test_chunk_is_the_one_that_gets_on_fastest(
    n_pending: int, beside_s: float, within_s: float, expected: int
) -> None:
    model = CostModel(MEASURED)
    assert model.chunk(n_pending, 0, beside_s=beside_s, within_s=within_s) == expected


def test_a_dear_size_is_left_out_for_a_smaller_one() -> None:
    """32 rows in 0.1 s beat 48 in 0.3 s, though both fit."""
    model = CostModel(Measurements({1: 0.01}, {32: 0.1, 48: 0.3, 64: 0.31}))
    assert model.chunk(500, 0, beside_s=0.01, within_s=0.31) == 32


@given(st.integers(1, 3000), st.integers(0, 4000), st.floats(0.01, 2), st.floats(0.0, 0.5))
def test_a_chunk_fits_or_is_nothing(
    n_pending: int, n_past: int, within_s: float, beside_s: float
) -> None:
    model = CostModel(MEASURED)
    size = model.chunk(n_pending, n_past, beside_s=beside_s, within_s=within_s)
    assert 0 <= size <= n_pending
    assert size == 0 or beside_s + model.prefill_s(size, n_past) <= within_s


def test_nothing_measured_costs_nothing() -> None:
    model = CostModel(Measurements())
    assert model.decode_s(4) == model.prefill_s(100, 100) == 0.0
    assert model.chunk(100, 0, beside_s=0.0, within_s=0.1) == 100
    assert model.smallest_chunk(100) == 100
    model.saw_decode(4, 1.0)
    model.saw_prefill(4, 0, 1.0)
    assert model.curve() == {"decode_ms": {}, "prefill_ms": {}}


def test_it_learns_what_passes_really_take() -> None:
    model = CostModel(MEASURED)
    for _ in range(200):
        model.saw_decode(4, 0.1)
        model.saw_prefill(32, 1000, 0.86)
    assert model.decode_s(4) == pytest.approx(0.1, rel=0.01)
    assert model.decode_s(1) == pytest.approx(0.02)  # not seen, not changed
    assert model.prefill_s(32, 1000) == pytest.approx(0.86, rel=0.01)
    assert model.prefill_s(64, 0) == pytest.approx(0.4, rel=0.01)  # all prompts are twice as dear


def test_a_hiccup_is_not_learned() -> None:
    model = CostModel(MEASURED)
    model.saw_decode(4, 5.0)
    model.saw_prefill(32, 0, 5.0)
    assert model.decode_s(4) == pytest.approx(0.05)
    assert model.prefill_s(32, 0) == pytest.approx(0.11)


def test_smallest_chunk() -> None:
    assert CostModel(MEASURED).smallest_chunk(100) == 16
    assert CostModel(MEASURED).smallest_chunk(9) == 9

"""Numbers of 16 and of 8 bits, as they are kept and as they are computed with."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.kernels.openvino.paged.shifts import BF16, GRID, narrow, widen


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=["bf16", "f16"])
def test_what_was_kept_comes_back(dtype: np.dtype[np.generic]) -> None:
    values = np.array([[0.0, 1.0, -1.5], [2.0**10, -0.25, 1.0078125]], np.float32)
    kept = narrow(values, dtype)
    assert kept.dtype == dtype
    np.testing.assert_array_equal(widen(kept), values)


def test_bf16_has_the_bits_of_an_f32s_upper_half() -> None:
    assert narrow(np.array([1.0, -2.0], np.float32), BF16).tolist() == [0x3F80, 0xC000]


def test_the_nearest_bf16_is_kept_and_of_two_the_even_one() -> None:
    step = 2.0**-7  # between 1 and 2
    between = np.array([1 + 0.4 * step, 1 + 0.6 * step, 1 + 0.5 * step, 1 + 1.5 * step], np.float32)
    expected = [1.0, 1 + step, 1.0, 1 + 2 * step]
    assert widen(narrow(between, BF16)).tolist() == expected
    assert widen(narrow(-between, BF16)).tolist() == [-one for one in expected]


def test_no_number_is_further_away_than_half_a_step() -> None:
    values = np.random.default_rng(3).normal(size=(50, 8)).astype(np.float32)[:, ::2]
    error = np.abs(widen(narrow(values, BF16)) - values)
    assert np.all(error <= np.abs(values) * 2.0**-8)


def test_bytes_have_a_grid_for_each_tokens_head() -> None:
    values = np.random.default_rng(3).normal(2, 3, (5, 2, 16)).astype(np.float32)
    values[1, 0] = 0.25
    kept = narrow(values, np.dtype(np.uint8))
    assert kept.shape == (5, 2, 16 + GRID)
    step = np.ptp(values, axis=-1, keepdims=True) / 255
    assert np.all(np.abs(widen(kept) - values) <= 0.51 * step + 1e-6)
    np.testing.assert_array_equal(narrow(widen(kept), kept.dtype)[..., GRID:], kept[..., GRID:])

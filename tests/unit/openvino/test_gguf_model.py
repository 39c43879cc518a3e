"""How far positions turn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from serve_app.openvino.gguf_model import Rotary

PLAIN = Rotary(head_size=64, base=10000.0, n_ctx_train=4096)


def test_pairs_turn_slower_and_slower() -> None:
    found = PLAIN.frequencies()
    assert found[0] == 1
    np.testing.assert_allclose(found[1:] / found[:-1], 10000 ** (-2 / 64), rtol=1e-5)
    assert PLAIN.attention_scale == 1 / 8


def test_own_factors_divide_them() -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    np.testing.assert_allclose(PLAIN.frequencies(factors) * factors, PLAIN.frequencies(), rtol=1e-6)


def test_linear_scaling_divides_all() -> None:
    linear = replace(PLAIN, factor=4.0)
    np.testing.assert_allclose(linear.frequencies() * 4, PLAIN.frequencies(), rtol=1e-6)
    assert linear.attention_scale == 1 / 8
    none = replace(linear, scaling="none")
    np.testing.assert_array_equal(none.frequencies(), PLAIN.frequencies())


def test_yarn_leaves_fast_pairs_alone() -> None:
    yarn = replace(PLAIN, scaling="yarn", factor=4.0)
    ratio = PLAIN.frequencies() / yarn.frequencies()
    assert ratio[:8] == pytest.approx(1)
    assert ratio[-4:] == pytest.approx(4)
    assert (np.diff(ratio) > -1e-5).all()
    assert yarn.attention_scale == pytest.approx((1 + 0.1 * math.log(4)) ** 2 / 8)

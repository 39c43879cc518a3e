"""How far positions turn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from serve_app.kernels.openvino.gguf_model import Rotary

PLAIN = Rotary(head_size=64, base=10000.0, n_ctx_train=4096)


def test_pairs_turn_slower_and_slower() -> None:
    found = PLAIN.frequencies()
    assert found[0] == 1
    np.testing.assert_allclose(found[1:] / found[:-1], 10000 ** (-2 / 64), rtol=1e-5)
    assert PLAIN.magnitude == 1


def test_own_factors_divide_them() -> None:
    factors = np.linspace(1, 8, 32).astype(np.float32)
    np.testing.assert_allclose(PLAIN.frequencies(factors) * factors, PLAIN.frequencies(), rtol=1e-6)


def test_linear_scaling_divides_all() -> None:
    linear = replace(PLAIN, factor=4.0)
    np.testing.assert_allclose(linear.frequencies() * 4, PLAIN.frequencies(), rtol=1e-6)
    assert linear.magnitude == 1
    none = replace(linear, scaling="none")
    np.testing.assert_array_equal(none.frequencies(), PLAIN.frequencies())


def test_yarn_leaves_fast_pairs_alone() -> None:
    yarn = replace(PLAIN, scaling="yarn", factor=4.0)
    ratio = PLAIN.frequencies() / yarn.frequencies()
    assert ratio[:8] == pytest.approx(1)
    assert ratio[-4:] == pytest.approx(4)
    assert (np.diff(ratio) > -1e-5).all()
    assert yarn.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    assert replace(yarn, log_multiplier=1.0).magnitude == 1


def test_what_does_not_turn_has_no_frequency_and_follows_what_turns_in_each_half() -> None:
    partial = replace(PLAIN, head_size=8, n_turned=4)
    assert (partial.frequencies() > 0).tolist() == [True, True, False, False]
    assert partial.order(neighbours=True).tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    assert partial.order(neighbours=False).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]

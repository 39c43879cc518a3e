"""Matrices as integers with scales, beside the gguf package's own reading of the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from serve_app.kernels.openvino.weights import (
    GROUP,
    HADAMARD,
    Quantised,
    is_rounded,
    quantise,
    round_matrix,
)

_HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
}
"""Where blocks have 16-bit floats."""


def floats_of(matrix: Quantised) -> NDArray[np.float32]:
    """The weights that the kernels compute with."""
    zeros = 0 if matrix.zeros is None else matrix.zeros[..., None].astype(np.float32)
    weights = (matrix.codes - zeros) * matrix.scales[..., None]
    if matrix.offsets is not None:
        weights += matrix.offsets[..., None]
    return weights.reshape(len(weights), -1).astype(np.float32)


def blocks(kind: Kind) -> NDArray[np.uint8]:
    """Seven rows of 512 random weights."""
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    found = rng.integers(0, 256, (7, 512 // size, n_bytes), np.uint8)
    for at in _HALVES[kind]:
        halves = rng.uniform(0.001, 0.002, (7, 512 // size, 1)).astype(np.float16)
        if at == 2 and n_bytes < 100:  # the least weight itself
            halves = -8 * halves
        found[..., at : at + 2] = halves.view(np.uint8)
    return found.reshape(7, -1)


@pytest.mark.parametrize("kind", [kind for kind in _HALVES if not is_rounded(kind)])
def test_weights_are_those_of_the_file(kind: Kind) -> None:
    data = blocks(kind)
    found, expected = quantise(data, kind), gguf.dequantize(data, kind)
    np.testing.assert_allclose(floats_of(found), expected, rtol=0, atol=1e-6)
    bits = found.bits
    least, most = (0, 15) if found.zeros is not None else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert found.codes.min() >= least
    assert found.codes.max() <= most


@pytest.mark.parametrize("kind", [kind for kind in _HALVES if is_rounded(kind)])
def test_other_formats_are_rounded_to_the_127th_part_of_the_largest(kind: Kind) -> None:
    data = blocks(kind)
    found, expected = floats_of(quantise(data, kind)), gguf.dequantize(data, kind)
    largest = np.abs(expected.reshape(7, -1, 32)).max(axis=-1, keepdims=True)
    wrong = np.abs(found - expected).reshape(7, -1, 32)
    assert (wrong <= largest / 127 / 2 * 1.0001).all()
    assert wrong.max() > 0


def test_offsets_are_less_than_a_step() -> None:
    weights = np.random.default_rng(1).normal(0, 1, (5, 256)).astype(np.float32)
    found = quantise(gguf.quantize(weights, Kind.Q4_1), Kind.Q4_1)
    assert found.offsets is not None
    assert (np.abs(found.offsets) <= found.scales / 2 + 1e-6).all()


@pytest.mark.parametrize("value", [-0.3, 0.3])
def test_rows_of_equal_weights_have_no_steps(value: float) -> None:
    weights = np.full((2, 64), value, np.float16).astype(np.float32)
    found = quantise(gguf.quantize(weights, Kind.Q4_1), Kind.Q4_1)
    np.testing.assert_allclose(floats_of(found), weights, rtol=1e-6)


def with_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a matrix `with_sums` is multiplied by: behind 256 values, the sums of their groups."""
    sums = np.zeros(GROUP)
    sums[: 256 // GROUP] = values.reshape(-1, GROUP).sum(axis=1)
    return np.concatenate([values, sums])


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1])
@pytest.mark.parametrize("middle", [-3.0, -0.5, 0.03, 0.5, 3.0])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e-2])
def test_a_group_far_from_0_leaves_the_others_as_they_are(
    kind: Kind, middle: float, spread: float
) -> None:
    """Its own weights are as exact as those of Q8_0."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, (16, 256)).astype(np.float32)
    plain = floats_of(quantise(gguf.quantize(weights, kind), kind).with_sums())
    weights[:, 64:96] = middle + spread * rng.normal(0, 1, (16, 32))
    data = gguf.quantize(weights, kind)
    matrix, exact = quantise(data, kind), gguf.dequantize(data, kind)
    error = np.abs(floats_of(matrix) - exact)
    assert error[:, 64:96].max() <= np.abs(exact).max() / 254 * 1.001
    error[:, 64:96] = 0
    assert error.max() < 1e-6
    others = rng.normal(0, 1, 256)
    others[64:96] = 0
    found = floats_of(matrix.with_sums()) @ with_sums(others)
    np.testing.assert_allclose(found, exact @ others, atol=0.02)
    assert np.std(found - exact @ others) < 2 * np.std(plain @ with_sums(others) - exact @ others)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1])
def test_a_product_with_sums_is_one_with_offsets(kind: Kind) -> None:
    rng = np.random.default_rng(1)
    weights, values = rng.normal(0, 1, (5, 256)).astype(np.float32), rng.normal(0, 1, 256)
    matrix = quantise(gguf.quantize(weights, kind), kind)
    summed = matrix.with_sums()
    product = floats_of(summed) @ with_sums(values)
    assert summed.offsets is None
    assert matrix.offsets is not None
    steps = 14 if kind is Kind.Q4_1 else 254  # of the largest offset, on either side of 0
    error = np.abs(matrix.offsets).max() / steps * np.abs(with_sums(values)[256:]).sum()
    np.testing.assert_allclose(product, floats_of(matrix) @ values, rtol=0, atol=1.001 * error)
    assert (summed.codes >= (0 if kind is Kind.Q4_1 else -128)).all()
    assert (summed.codes <= (15 if kind is Kind.Q4_1 else 127)).all()


def test_what_is_turned_twice_is_as_before() -> None:
    np.testing.assert_array_equal(HADAMARD, HADAMARD.T)
    np.testing.assert_allclose(HADAMARD @ HADAMARD, np.eye(GROUP), atol=1e-6)
    np.testing.assert_allclose(np.abs(HADAMARD), GROUP**-0.5, rtol=1e-6)


@pytest.mark.parametrize("group", [32, 96, 128])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.F16])
def test_products_of_turned_values_are_those_of_the_file_but_for_rounding(
    kind: Kind, group: int
) -> None:
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, (9, 768)).astype(np.float32)
    data = gguf.quantize(weights, kind)
    exact = gguf.dequantize(data, kind)
    values = rng.normal(0, 1, 768)
    values[5] = 300
    matrix = round_matrix(data, kind, group)
    assert matrix.codes.shape == (9, 768 // group, group)
    assert np.abs(matrix.codes).max() == 127
    turned = (values.reshape(-1, GROUP) @ HADAMARD).reshape(-1)
    assert np.abs(turned).max() < 300 / 5
    steps = np.repeat(matrix.scales, group, axis=1)
    most_wrong = steps / 2 @ np.abs(turned) + 1e-4
    assert (np.abs(floats_of(matrix) @ turned - exact @ values) <= most_wrong).all()

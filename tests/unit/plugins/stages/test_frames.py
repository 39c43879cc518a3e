"""Frames between stages."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.plugins.stages.frames import Frame, arrays_of, body_of, frame_of, values_of


def returned(**values: np.ndarray) -> dict[str, np.ndarray]:
    """The values as the next stage has them."""
    frame = Frame(1, 0, 7, "compute", arrays_of(values))
    return values_of(frame_of(bytearray(body_of(frame))).arrays)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, -(2**40)]),
        np.array(5, np.int32),
        np.empty(0, np.int64),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.empty((0, 4), np.float32),
    ],
)
def test_integers_and_shapes_come_as_they_are(value: np.ndarray) -> None:
    (found,) = returned(value=value).values()
    np.testing.assert_array_equal(found, value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)


def test_floats_are_rounded_to_16_bits_even_where_some_are_huge() -> None:
    """Some models have hidden states of a million beside others below one."""
    value = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    value[1, 5] = 1e6
    found = returned(value=value)["value"]
    np.testing.assert_allclose(found, value, rtol=2**-10, atol=1e-4)
    assert found.dtype == np.float32


def test_floats_take_two_bytes_each() -> None:
    value = np.ones((16, 1024), np.float32)
    assert len(body_of(Frame(1, 0, 7, "compute", arrays_of({"value": value})))) < 33_000

"""The frames between stages: an operation and its arrays, floats of 32 bits rounded to 16 bits."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve_app.kernels.openvino.paged.model import Operation, Values

_LARGEST = np.float32(2**15)
"""The magnitude that rows of larger numbers are scaled down to: f16 has room for it."""


class Array(msgspec.Struct, array_like=True, frozen=True):
    """An array. Floats are f16, each row divided by a scale if f16 has no room for the largest number."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    scales: memoryview | None = None


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """An operation on its way through the stages, and then its result on the way to the engine."""

    stage: int
    """The stage that is to carry it out next; the number of all stages for a result."""
    engine: int
    """The stage whose process has the engine that asked."""
    number: int
    """The number of the operation, which the engine counts."""
    operation: Literal[Operation, "leave"]
    arrays: dict[str, Array]
    error: str = ""
    """The reason why the operation could not be carried out."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def body_of(frame: Frame) -> bytes:
    """The frame as bytes."""
    return _encoder.encode(frame)


def frame_of(body: bytearray) -> Frame:
    """The frame of these bytes, which its arrays are views of. Raises msgspec.MsgspecError."""
    return _decoder.decode(body)


def arrays_of(values: Values) -> dict[str, Array]:
    """The values as a frame has them."""
    return {name: _array(value) for name, value in values.items()}


def values_of(arrays: dict[str, Array]) -> Values:
    """The values that a frame has, to be read only."""
    return {name: _value_of(array) for name, array in arrays.items()}


def _array(value: NDArray[Any]) -> Array:
    if value.dtype != np.float32:
        return Array(value.dtype.str, value.shape, _bytes(value))
    if max(value.max(initial=0), -value.min(initial=0)) <= _LARGEST:
        return Array(value.dtype.str, value.shape, _bytes(value.astype(np.float16)))
    scales = np.abs(value).max(axis=-1, keepdims=True) / _LARGEST
    scales[scales < 1] = 1
    halves = (value / scales).astype(np.float16)
    return Array(value.dtype.str, value.shape, _bytes(halves), _bytes(scales))


def _value_of(array: Array) -> NDArray[Any]:
    dtype = np.dtype(array.dtype)
    if dtype != np.float32:
        return np.frombuffer(array.data, dtype).reshape(array.shape)
    value = np.frombuffer(array.data, np.float16).reshape(array.shape).astype(np.float32)
    if array.scales is not None:
        value *= np.frombuffer(array.scales, np.float32).reshape(*array.shape[:-1], 1)
    return value


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

"""Numbers of 16 bits in a KV cache: f16 as numpy has it, and bf16, which it lacks, by its bits. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BF16 = np.dtype(np.uint16)
"""The type of arrays that hold a bf16's bits."""
_BITS = 16
"""The bits of an f32 that a bf16 lacks."""


def widened(cells: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers of either kind as f32."""
    if cells.dtype != BF16:
        return cells.astype(np.float32)
    return (cells.astype(np.uint32) << _BITS).view(np.float32)


def narrowed(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The nearest numbers of that kind, and of two the even one. For finite values."""
    if dtype != BF16:
        return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = (1 << (_BITS - 1)) - 1
    return ((bits + half + (bits >> _BITS & 1)) >> _BITS).astype(BF16)

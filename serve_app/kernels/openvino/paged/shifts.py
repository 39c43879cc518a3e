"""Moves cached keys to other positions: they are stored as the rotary embedding turned them. Pure.

The cache has numbers of 16 bits: f16 as numpy has it, and bf16, which it lacks, by its bits. Or it has
bytes: each token's numbers of a head have a scale and a zero of their own, two f32 before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.kernels.openvino.paged.blocks import BLOCK

BF16 = np.dtype(np.uint16)
"""The type of arrays that hold a bf16's bits."""
_BITS = 16
GRID = 8
"""The bytes before the numbers of a token: their scale and their zero."""
_LEAST_SCALE = np.float32(1e-20)


def widen(cells: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers of any kind as f32."""
    if cells.dtype == np.uint8:
        scales, zeros = np.split(np.ascontiguousarray(cells[..., :GRID]).view(np.float32), 2, -1)
        return (cells[..., GRID:] - zeros) * scales
    if cells.dtype != BF16:
        return cells.astype(np.float32)
    return (cells.astype(np.uint32) << _BITS).view(np.float32)


def narrow(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The nearest numbers of that kind, and of two the even one. For finite values."""
    if dtype == np.uint8:
        least, most = (f(values, axis=-1, keepdims=True) for f in (np.min, np.max))
        scales = np.maximum((most - least) / np.float32(255), _LEAST_SCALE)
        zeros = -least / scales
        codes = np.rint(values / scales + zeros).clip(0, 255).astype(np.uint8)
        grid = np.concatenate([scales, zeros], -1).astype(np.float32).view(np.uint8)
        return np.concatenate([grid, codes], -1)
    if dtype != BF16:
        return values.astype(dtype)
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = (1 << (_BITS - 1)) - 1
    return ((bits + half + (bits >> _BITS & 1)) >> _BITS).astype(BF16)


Places = NDArray[np.int64]


def kept_places(length: int, cuts: Sequence[tuple[int, int]]) -> Places:
    """The old places of the tokens that stay, after each (n_keep, n_discard) in turn."""
    places = np.arange(length)
    for n_keep, n_discard in cuts:
        places = np.delete(places, slice(n_keep, n_keep + n_discard))
    return places


def cells_of(blocks: NDArray[Any]) -> NDArray[Any]:
    """The tokens of the cache's blocks, one after the other, of shape [tokens, heads, head size]."""
    n_blocks, n_heads, _, head_size = blocks.shape
    return blocks.transpose(0, 2, 1, 3).reshape(n_blocks * BLOCK, n_heads, head_size)


def blocks_of(cells: NDArray[Any]) -> NDArray[Any]:
    """The reverse; the last block is filled with zeros."""
    n_tokens, n_heads, head_size = cells.shape
    n_blocks = -(-n_tokens // BLOCK)
    filled = np.zeros((n_blocks * BLOCK, n_heads, head_size), cells.dtype)
    filled[:n_tokens] = cells
    return filled.reshape(n_blocks, BLOCK, n_heads, head_size).transpose(0, 2, 1, 3)


def turn_back(
    keys: NDArray[Any], n_places: Places, frequencies: NDArray[np.float32]
) -> NDArray[Any]:
    """Keys of shape [tokens, heads, head size], each as if it were so many places earlier. The first half
    of a head turns with the second."""
    angles = n_places[:, None, None] * frequencies.astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(widen(keys), 2, axis=-1)
    found = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
    return narrow(found, keys.dtype)

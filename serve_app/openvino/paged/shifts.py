"""Moves cached keys to other positions: they are stored as the rotary embedding turned them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.openvino.paged import numbers
from serve_app.openvino.paged.blocks import BLOCK

Places = NDArray[np.int64]


def kept(length: int, cuts: Sequence[tuple[int, int]]) -> Places:
    """The old places of the tokens that stay, after each (n_keep, n_discard) in turn."""
    places = np.arange(length)
    for n_keep, n_discard in cuts:
        places = np.delete(places, slice(n_keep, n_keep + n_discard))
    return places


def cells_of(blocks: NDArray[Any]) -> NDArray[Any]:
    """One token after the other, of shape [tokens, heads, head size], from the cache's blocks."""
    n_blocks, n_heads, _, head_size = blocks.shape
    return blocks.transpose(0, 2, 1, 3).reshape(n_blocks * BLOCK, n_heads, head_size)


def blocks_of(cells: NDArray[Any]) -> NDArray[Any]:
    """The reverse; the last block is filled with zeros."""
    n_tokens, n_heads, head_size = cells.shape
    n_blocks = -(-n_tokens // BLOCK)
    filled = np.zeros((n_blocks * BLOCK, n_heads, head_size), cells.dtype)
    filled[:n_tokens] = cells
    return filled.reshape(n_blocks, BLOCK, n_heads, head_size).transpose(0, 2, 1, 3)


def turned_back(
    keys: NDArray[Any], n_places: Places, frequencies: NDArray[np.float32]
) -> NDArray[Any]:
    """Keys of shape [tokens, heads, head size], each as if it were so many places earlier. The first half
    of a head turns with the second."""
    angles = n_places[:, None, None] * frequencies.astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(numbers.widened(keys), 2, axis=-1)
    found = np.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
    return numbers.narrowed(found, keys.dtype)

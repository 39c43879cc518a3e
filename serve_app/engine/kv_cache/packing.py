"""Tokens as bytes, four each: what indexes, files and other engines have of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 4
"""Of a packed token."""

TokenArray = NDArray[np.int32]
Tokens = Sequence[int] | bytes
"""Token ids, or packed ones: those need not be looked at one by one."""


def packed(tokens: Tokens) -> bytes:
    """Tokens as bytes; those that are bytes already stay what they are."""
    return tokens if isinstance(tokens, bytes) else struct.pack(f"<{len(tokens)}i", *tokens)


def n_tokens(tokens: bytes) -> int:
    """How many `packed` made bytes of."""
    return len(tokens) // TOKEN_BYTES


def unpacked(tokens: bytes) -> list[int]:
    """What `packed` made bytes of."""
    return list(struct.unpack(f"<{n_tokens(tokens)}i", tokens))


def as_array(tokens: Tokens | TokenArray) -> TokenArray:
    """The same tokens for numpy; packed ones are not copied. Nobody may write to it."""
    if isinstance(tokens, np.ndarray):
        return tokens
    return np.frombuffer(packed(tokens), np.dtype("<i4"))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first items two sequences of a type share: found by halving, as comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

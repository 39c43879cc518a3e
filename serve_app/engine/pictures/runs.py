"""Pictures as runs of tokens that no vocabulary has: negative ones. Pure.

A tile of a picture takes as many tokens of a prompt as it has embeddings. The first one says how many cells
and positions that are, the others are a hash of what is seen. So all that compares tokens tells pictures
apart by their content (the prefix index, tiers, files, other replicas), and knows nothing of pictures; and
what a slot holds can be read from its tokens.
"""

from __future__ import annotations

from hashlib import shake_128

import numpy as np

LEAST_TOKENS = 4
"""A tile has so many at least, or its hash would be too short to tell it from others."""
MOST_TOKENS = 2**15 - 1
_POSITION_BITS = 15
_NEGATIVE = np.int32(-(2**31))


def run(key: bytes, n_tokens: int, n_positions: int) -> tuple[int, ...]:
    """The tokens of a tile. `key` is all that its embeddings depend on."""
    if not LEAST_TOKENS <= n_tokens <= MOST_TOKENS or not 0 < n_positions <= n_tokens:
        raise ValueError(f"a tile of {n_tokens} tokens and {n_positions} positions")
    head = -1 - (n_tokens << _POSITION_BITS | n_positions)
    digest = shake_128(key).digest(4 * (n_tokens - 1))
    return head, *(np.frombuffer(digest, np.int32) | _NEGATIVE).tolist()


def size(head: int) -> tuple[int, int]:
    """The number of tokens of the tile that begins with this one, and that of its positions."""
    packed = -1 - head
    return packed >> _POSITION_BITS, packed & (1 << _POSITION_BITS) - 1

"""Pictures as runs of tokens that no vocabulary has: negative ones. Pure.

A tile of a picture takes as many tokens of a prompt as it has embeddings. They are a hash of what is seen.
So all that compares tokens tells pictures apart by their content (the prefix index, tiers, files, other
replicas), and knows nothing of pictures.
"""

from __future__ import annotations

from hashlib import shake_128

import numpy as np

LEAST_TOKENS = 4
"""A tile has so many at least, or its hash would be too short to tell it from others."""
_NEGATIVE = np.int32(-(2**31))


def run(key: bytes, n_tokens: int) -> tuple[int, ...]:
    """The tokens of a tile. `key` is all that its embeddings depend on."""
    if n_tokens < LEAST_TOKENS:
        raise ValueError(f"a tile of {n_tokens} tokens")
    digest = shake_128(key).digest(4 * n_tokens)
    return tuple((np.frombuffer(digest, np.int32) | _NEGATIVE).tolist())

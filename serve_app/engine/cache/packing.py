"""Tokens as bytes, four each, and as arrays.

Indexes, files and other engines have bytes; slots, sequences and stores have arrays. The garbage collector
looks at every item of a list, at none of these. A few million tokens in lists cost it milliseconds, again
and again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TypeAlias

TOKEN_BYTES = 4
_CHUNK_BYTES = 4096 * TOKEN_BYTES

Tokens = Sequence[int] | bytes
"""Token ids, or packed ones: those need not be looked at one by one."""


TokenArray: TypeAlias = "array[int]"
"""Token ids that may be changed, four bytes each."""


def pack(tokens: Tokens) -> bytes:
    """Tokens as bytes; those that are bytes already stay what they are."""
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, array):
        return tokens.tobytes()
    return struct.pack(f"{len(tokens)}i", *tokens)


def n_tokens(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def token_array(tokens: Tokens = b"") -> TokenArray:
    """A new array of tokens, packed or not."""
    made = array("i")
    made.frombytes(pack(tokens))  # `array` itself takes twice as long
    return made


def n_matching(run: bytes, tokens: bytes, start: int, end: int) -> int:
    """The number of first tokens of `run` that stand in `tokens[start:end]`, which are bytes. Nothing
    longer than a chunk is copied, and no other thread gets the interpreter, as with numpy."""
    if tokens.startswith(run, start, end):
        return n_tokens(run)
    n = 0
    while n < len(run) and tokens.startswith(run[n : n + _CHUNK_BYTES], start + n, end):
        n += _CHUNK_BYTES
    rest = tokens[start + n : min(end, start + n + _CHUNK_BYTES)]
    return (n + common_prefix(run[n : n + _CHUNK_BYTES], rest)) // TOKEN_BYTES


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first items two sequences share, by halving: to compare slices is fast."""
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

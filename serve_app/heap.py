"""The C library's heap: what was freed goes back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

# Source: mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MOST_KEPT, _ARENAS = 8 * 2**20, 2


def give_back(large_bytes: int) -> None:
    """From now on, blocks of so many bytes and more are given back as soon as they are freed, and of what
    smaller ones leave, little is kept, in few places. By itself, glibc learns from the largest block that
    was freed to keep such ones, for each thread: a process that once had large bodies or grammars stays
    that large. Elsewhere than with glibc, nothing happens. Any thread, once, early."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, large_bytes)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        mallopt(_ARENA_MAX, _ARENAS)

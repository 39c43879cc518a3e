"""The C library's heap: what was freed goes back to the system, and large blocks are in huge pages."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress

# Source: mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# More than a row of logits, or what a socket brings, which are used again and again; less than a grammar.
_LARGE = 4 * 2**20
_MOST_KEPT, _ARENAS = 8 * 2**20, 2
_SOON_S = 0.2
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The environment of a process whose large blocks, such as weights and KV caches, are in pages of 2 MiB.
The system must give such pages to who asks. Each pass reads all weights, by a 512th of the addresses.
Source: "Memory Allocation Tunables" in glibc's manual."""


def give_back() -> None:
    """Have large blocks given back as soon as they are freed from now on. Of the room that smaller blocks
    leave, little is kept, in few places. By itself, each thread's glibc keeps blocks as large as the
    largest that was freed. So a process that once had large bodies or grammars stays that large. Elsewhere
    than with glibc, nothing happens. Any thread, once, early."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        mallopt(_ARENA_MAX, _ARENAS)


def trim_soon() -> None:
    """Give back what is free, in a moment and in a thread of its own: it takes milliseconds. Any thread."""
    timer = threading.Timer(_SOON_S, trim)
    timer.daemon = True
    timer.start()


def trim() -> None:
    """Give back what is free now. Any thread."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

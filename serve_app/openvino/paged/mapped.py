"""Memory of files that this process has mapped."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Source: madvise(2), asm-generic/mman-common.h.
_DONTNEED = 4
_EVERY_S = 0.05


def forget(path: Path) -> None:
    """Have the pages of a mapped file leave this process's memory. Those that are read again come back from
    the file. Nothing happens where the system does not tell what is mapped. Any thread.

    Only for files that are mapped to be read: what was written in a private mapping is lost.
    """
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for begin, end in _spans(path.resolve()):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


@contextmanager
def forgetting(path: Path) -> Iterator[None]:
    """Inside the block, what is read of a mapped file stays in this process's memory for a moment only. For
    a large file of which every page is read about once. It must stay mapped for as long: where nothing is
    mapped any more, others' memory would be forgotten."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_EVERY_S):
            forget(path)

    thread = threading.Thread(target=run, name="forgetting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        forget(path)


def _spans(path: Path) -> list[tuple[int, int]]:
    """Where the file is mapped to be read only. Source: proc_pid_maps(5)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = line.split(maxsplit=5)
        if name == str(path) and rights.startswith("r--"):
            begin, end = (int(one, 16) for one in span.split("-"))
            found.append((begin, end))
    return found

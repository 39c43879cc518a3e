"""Locks for what lies in a folder that processes share: who uses which part of it, who changes it.

Each part has a lock file that is never deleted: whoever has the part open holds the lock shared until its
process ends, however it ends; whoever changes the part holds it alone. So does a process that it was handed
to, until both have ended.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_open: dict[Path, int] = {}
"""Locks that this process holds shared, until it ends or leaves all."""
_opening = threading.Lock()


def leave_all() -> None:
    """Give up all locks that this process holds shared. Any thread may call it."""
    with _opening:
        for descriptor in _open.values():
            os.close(descriptor)
        _open.clear()


class FolderLocks:
    """The locks of one folder. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def share(self, name: str, is_whole: Callable[[], bool]) -> bool:
        """Whether the part is there, as `is_whole` says, and nobody changes it. It stays as it is until
        this process ends or leaves all then, and counts as used now."""
        lock = self._folder / name
        with _opening:
            descriptor = _open.get(lock)
            if descriptor is None:
                descriptor = _descriptor(lock)
                if not _try(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB):
                    os.close(descriptor)
                    return False
            if not is_whole():
                os.close(descriptor)
                _open.pop(lock, None)
                return False
            _open[lock] = descriptor
            os.utime(lock)
        return True

    @contextmanager
    def alone(self, name: str, *, wait: bool = False) -> Iterator[int | None]:
        """Nobody else uses or changes the part until the end: the lock's descriptor. None if somebody does,
        unless the caller waits for them."""
        descriptor = _descriptor(self._folder / name)
        try:
            held = _try(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield descriptor if held else None
        finally:
            os.close(descriptor)

    def last_used(self, name: str) -> float:
        """When the part was opened last, as `time.time` counts; 0 if never."""
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0


def _descriptor(lock: Path) -> int:
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True

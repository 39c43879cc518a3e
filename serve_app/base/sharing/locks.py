"""File locks, flock(2), by which the processes of a node share cores, places and folders.

The kernel drops a lock with its process, however that ends, and with all processes that it was handed to.
Lock files are never removed, or two processes could lock different files of one name.
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


def lock(path: Path, how: int) -> int:
    """A file descriptor that holds the file's lock, in one of flock's ways; exec does not inherit it.
    Raises OSError: BlockingIOError if somebody else has the lock, and `how` says not to wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether somebody has the file's lock alone."""
    try:
        os.close(lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def make_private(folder: Path) -> None:
    """Have a folder that is this user's alone, where everybody may write. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user.")


def leave_all() -> None:
    """Give up all locks that this process holds shared. Any thread may call it."""
    with _opening:
        for descriptor in _open.values():
            os.close(descriptor)
        _open.clear()


class FolderLocks:
    """The locks of the parts of a folder. Whoever has a part open holds its lock shared until the process
    ends. Whoever changes the part holds the lock alone. Any thread may call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def share(self, name: str, is_whole: Callable[[], bool]) -> bool:
        """Whether the part is there, as `is_whole` says, and nobody changes it. It stays as it is until
        this process ends or leaves all then, and counts as used now."""
        path = self._path(name)
        with _opening:
            descriptor = _open.get(path)
            if descriptor is None:
                try:
                    descriptor = lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            if not is_whole():
                os.close(descriptor)
                _open.pop(path, None)
                return False
            _open[path] = descriptor
            os.utime(path)
        return True

    def leave(self, name: str) -> None:
        """Give up the shared lock of that part. Idempotent."""
        with _opening:
            if (descriptor := _open.pop(self._path(name), None)) is not None:
                os.close(descriptor)

    @contextmanager
    def alone(self, name: str, *, wait: bool = False) -> Iterator[int | None]:
        """The lock's descriptor: nobody else uses the part until the end. None if somebody does."""
        try:
            descriptor = lock(self._path(name), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def last_used(self, name: str) -> float:
        """The time when the part was opened last, as `time.time` counts; 0 if never."""
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0

    def _path(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name

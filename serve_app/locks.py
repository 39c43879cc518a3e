"""File locks, flock(2), by which the processes of a node share cores, places and folders.

The kernel drops a lock with its process, however that ends, and with all processes that it was handed to.
Lock files are never removed, or two processes could lock different files of one name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PART = ".part"
"""How the name of what is not whole ends."""
SPARE_BYTES = 2**29
GIB = 2**30
logger = logging.getLogger("corral.store")

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
    """The locks of the parts of a folder: whoever has a part open holds its lock shared until the process
    ends, and whoever changes the part holds the lock alone. Any thread may call."""

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
        """When the part was opened last, as `time.time` counts; 0 if never."""
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0

    def _path(self, name: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name


@dataclass(frozen=True, slots=True)
class BoundedFolder:
    """A folder with a bound: it holds a folder with files for each model, and the least recently used go
    for new ones. Processes share it; any thread may call."""

    path: Path
    max_bytes: int | None = None
    """Most bytes of all models together; None for what the disk has room for."""

    @property
    def locks(self) -> FolderLocks:
        """The locks of the models' folders."""
        return FolderLocks(self.path / ".locks")

    def names(self) -> set[str]:
        """The names of the models' folders."""
        folders = (path for path in self.path.iterdir() if path.is_dir())
        return {path.name for path in folders if not path.name.startswith(".")}

    def lacking(self, n_new: int, n_all: int, others: Iterable[str]) -> int:
        """The bytes that are too many, beyond the bound or beyond the disk, if `n_new` more are written for
        a model of `n_all` beside the others."""
        lacking = n_new + SPARE_BYTES - shutil.disk_usage(self.path).free
        if self.max_bytes is not None:
            present = sum(files_bytes(self.path / name) for name in others)
            lacking = max(lacking, present + n_all - self.max_bytes)
        return lacking

    def free(self, names: Iterable[str], lacking: Callable[[], int]) -> int:
        """Delete the files of models that no process has open, the least recently used first, as long as
        bytes are lacking. Returns how many are lacking then. Raises OSError."""
        removable = sorted(names, key=self.locks.last_used, reverse=True)
        while (n_bytes := lacking()) > 0 and removable:
            self._remove(removable.pop())
        return n_bytes

    def _remove(self, name: str) -> None:
        folder = self.path / name
        with self.locks.alone(name.removesuffix(PART)) as held:
            n_bytes = files_bytes(folder)
            if held is None:
                return
            # Without its first file it is no model, even if this process is killed meanwhile.
            for path in sorted(_files(folder), reverse=True):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # something is to stay in it
                folder.rmdir()
        if n_bytes:
            logger.info("%s was removed to make room: %.1f GiB.", name, n_bytes / GIB)


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if not path.is_dir()]
    return []


def files_bytes(folder: Path) -> int:
    """Bytes of the files in a folder. Others may remove some meanwhile."""
    total = 0
    for path in _files(folder):
        with suppress(OSError):
            total += path.stat().st_size
    return total

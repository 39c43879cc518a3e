"""The models on demand that are loaded on this node: so many at most, each with a place of its own.

A place is an flock(2) on a file: the kernel drops it with the process, however that ends. The file says how
the model is used. A process that waits for a place has a lock on a file of its own, which says since when.
Files are never removed, or two processes could lock different files of one name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from serve_app.placement import leases


class Residency:
    """One process's part. Used in one thread; nothing here takes long."""

    def __init__(self, folder: Path, name: str, most: int) -> None:
        """The process waits under that name, which no other one has. Raises OSError if the folder is not
        ours alone, or cannot be used."""
        leases.make_private(folder)
        self._places = [folder / f"place-{number}" for number in range(most)]
        self._ticket = folder / f"waiting-{quote(name, safe='')}"
        self._since: bytes | None = None
        """When it began to wait, if it waits."""
        self._own: Path | None = None
        self._lock = -1
        """Descriptor that holds the lock of the place, if the process has one."""

    def take(self, now: float) -> bool:
        """Take a free place, if there is one, and nobody has waited for longer; it counts as used now."""
        if any(self._since is None or since < self._since for since in self._others_wait()):
            return False
        for place in self._places:
            lock = _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                self._own, self._lock = place, lock
                self.note(now)
                return True
        return False

    def note(self, since: float, *, is_busy: bool = False) -> None:
        """The model has worked without a pause since then, or was used last then, as `time.monotonic`
        counts."""
        if self._own is not None:
            _write(self._lock, since, is_busy)

    def leave(self) -> None:
        """The model is not loaded any more. Idempotent."""
        if self._own is not None:
            os.close(self._lock)
            self._own = None

    @contextmanager
    def waiting(self, now: float) -> Iterator[None]:
        """Meanwhile, others know that this one waits for a place."""
        lock = _locked(self._ticket, fcntl.LOCK_EX)  # who looks holds it for microseconds
        assert lock is not None
        try:
            self._since = _write(lock, now)
            yield
        finally:
            self._since = None
            os.close(lock)

    def gives_way(self) -> bool:
        """Whether somebody waits, no place is free, and this model is the one to go: the idle one that was
        used longest ago, or else the one that has worked for longest."""
        if self._own is None or not self._others_wait():
            return False
        others = [one for one in self._places if one != self._own]
        own = self._own.read_bytes()
        return all(_is_held(one) and one.read_bytes() >= own for one in others)

    def _others_wait(self) -> list[bytes]:
        """Since when."""
        found = self._ticket.parent.glob("waiting-*")
        return [one.read_bytes() for one in found if one != self._ticket and _is_held(one)]


def _write(descriptor: int, since: float, is_busy: bool = False) -> bytes:
    """The text sorts by who is to go first."""
    text = f"{is_busy:d} {since:020.6f}".encode()
    os.pwrite(descriptor, text, 0)
    return text


def _is_held(path: Path) -> bool:
    lock = _locked(path, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if lock is not None:
        os.close(lock)
    return lock is None


def _locked(path: Path, how: int) -> int | None:
    """An open file descriptor with the file's lock; None if somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

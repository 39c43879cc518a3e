"""Folders of this user's on this node, one kind with a bound, and files that survive a power cut."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.base.sharing.locks import FolderLocks

PART = ".part"
"""How the name of what is not whole ends."""
SPARE_BYTES = 2**29
GIB = 2**30
logger = logging.getLogger("corral.store")


def cache_folder() -> Path:
    """The folder where this user's programs keep what they could make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "corral"


def search_path() -> str:
    """The folders of this process's modules, as PYTHONPATH has them: for a program that needs the same."""
    return os.pathsep.join(filter(None, sys.path))


def sync(path: Path) -> None:
    """Have a file's content, or the names of a folder's files, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        """The bytes beyond the bound or the disk, if `n_new` more are written for a model of `n_all` beside
        the others."""
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
            self.remove(removable.pop())
        return n_bytes

    def remove(self, name: str) -> None:
        """Delete the files of a model, unless a process has it open. Raises OSError."""
        folder = self.path / name
        with self.locks.alone(name.removesuffix(PART)) as held:
            n_bytes = files_bytes(folder)
            if held is None:
                return
            # Without its first file it is no model, even if this process is killed meanwhile.
            for path in sorted(_files(folder), reverse=True):
                path.unlink(missing_ok=True)
            if name.endswith(PART):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # something is to stay in it
                folder.rmdir()
        if n_bytes:
            logger.info("%s was removed: %.1f GiB.", name, n_bytes / GIB)


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

"""Folders of this user's on this node, and files that survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's programs keep what they could make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "corral"


def sync(path: Path) -> None:
    """Have a file's content, or the names of a folder's files, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Transactions of SQLite's databases, and their files."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def make_private(path: Path) -> None:
    """Make the file if it is not there, and let this user alone read it. SQLite gives the files beside it
    the same mode. Raises OSError.

    One that is there is not opened: to close it would end the locks of this process's other connections.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            with suppress(PermissionError):  # another user's
                path.chmod(0o600)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that begins at once, and is rolled back if the block fails."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise

"""The ledger of usage: SQLite, in a folder that all ingresses see, written beside the event loop.

On a file system of one machine, its journal is a write-ahead log, whose transactions wait for no disk. That
needs shared memory, which does not reach other machines: on all other file systems, it is a plain file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from serve_app.errors import CorralError
from serve_app.ingress.batch.store import transaction
from serve_app.ingress.http.request_context import UsageCounts
from serve_app.store.encryption import mount_of

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")
DIMENSIONS = ("key", "model", "endpoint", "batch")
COUNTS = tuple(UsageCounts.__annotations__)
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
FLUSH_S = 0.25
"""The longest that a count waits to be written."""
_PAUSE_S = 1.0
"""The time between two tries to write on a disk that fails."""
_BUSY_S = 10.0
"""The longest wait for other ingresses' transactions, which take a millisecond."""
MOST_WAITING_ROWS = 10_000
"""Rows that wait to be written. Further ones are dropped while the disk fails."""
MOST_ROWS = 500_000
"""Rows of usage in the file. With more, the finest and oldest ones are added up early."""
MOST_SHOWN_ROWS = 20_000
_OF_ONE_MACHINE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs")
"""Kinds of file systems that other machines do not see."""
_KEPT = ((MINUTE_S, HOUR_S, 2 * DAY_S), (HOUR_S, DAY_S, 60 * DAY_S))
"""Rows of each width become rows of the next one after so many seconds."""
_KEPT_WHEN_FULL = ((MINUTE_S, HOUR_S, 2 * HOUR_S), (HOUR_S, DAY_S, 2 * DAY_S))
_DAYS_KEPT_S = 1000 * DAY_S

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
    start INTEGER NOT NULL, width INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    endpoint TEXT NOT NULL, batch INTEGER NOT NULL,
    {", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in COUNTS)},
    PRIMARY KEY (start, width, key, model, endpoint, batch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""
_ADD = f"""ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)}"""
_SUMS = ", ".join(f"SUM({name}) AS {name}" for name in COUNTS)


class UsageRow(NamedTuple):
    """What a row of usage is about."""

    start: int
    """The beginning of its minute, in seconds since 1970."""
    key: str
    """The name of the API key; empty without keys."""
    model: str
    endpoint: str
    batch: bool


class Ledger:
    """The ledger of one ingress, which shares its file with the others.

    Used in one event loop. A thread of its own makes transactions, each of which holds all that came since
    the last one. What is counted is written within FLUSH_S. Without a folder, the ledger is in memory.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Makes the folder, private to this user, if it is not there. Raises OSError."""
        self.folder = folder
        self.clock = clock
        self._usage: dict[UsageRow, list[float]] = {}
        self._calls: list[tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_writing = False
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._db: sqlite3.Connection | None = None
        self._has_failed = False
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(folder / "ledger.sqlite", os.O_CREAT | os.O_RDWR, 0o600))

    def counter(
        self, key: str, endpoint: str, *, batch: bool = False
    ) -> Callable[[str, UsageCounts], None]:
        """A function that counts what requests of this key (empty without keys), or lines of its batches,
        use of a model."""

        def count(model: str, counts: UsageCounts) -> None:
            minute = int(self.clock()) // MINUTE_S * MINUTE_S
            row = UsageRow(minute, key, model, endpoint, batch)
            self._add(row, map(counts.get, COUNTS))

        return count

    def _add(self, row: UsageRow, counts: Iterable[object]) -> None:
        sums = self._usage.get(row)
        if sums is None:
            if len(self._usage) >= MOST_WAITING_ROWS:
                return
            sums = self._usage[row] = [0.0] * len(COUNTS)
        for i, n in enumerate(counts):
            sums[i] += n or 0  # type: ignore[operator]
        self._schedule(FLUSH_S)

    async def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The function's result, in a transaction behind all that was counted before. The function raises
        CorralError before it writes anything. Raises sqlite3.Error and OSError, too."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((function, future))
        self._schedule(0.0)
        return await future

    async def usage(
        self,
        start: int,
        end: int,
        width: int,
        group_by: Sequence[str] = (),
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> list[dict[str, Any]]:
        """The sums of buckets of `width` seconds between two times, by the dimensions of `group_by`, of the
        rows with one of the values that `only` names for a dimension. Older rows are wider: each is in the
        bucket of its beginning."""
        names = [name for name in DIMENSIONS if name in group_by]
        columns = ", ".join([f"start / {width} * {width} AS bucket", *names])
        conditions, values = ["start >= ?", "start < ?"], [start, end]
        for name, allowed in (only or {}).items():
            assert name in DIMENSIONS
            conditions.append(f"{name} IN ({', '.join('?' * len(allowed))})")
            values += allowed  # type: ignore[arg-type]
        query = (
            f"SELECT {columns}, {_SUMS} FROM usage WHERE {' AND '.join(conditions)} "
            f"GROUP BY {', '.join(['bucket', *names])} ORDER BY bucket LIMIT {MOST_SHOWN_ROWS}"
        )
        return await self.call(lambda db: [dict(row) for row in db.execute(query, values)])

    async def close(self) -> None:
        """Write what is left."""
        with suppress(sqlite3.Error, OSError):
            await self.call(lambda _: None)
        self._thread.shutdown(wait=False)

    def _schedule(self, pause_s: float) -> None:
        """Write after this time, unless that is about to happen: what comes meanwhile goes with it."""
        if self._is_writing or (self._timer is not None and pause_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_s, self._begin)

    def _begin(self) -> None:
        self._is_writing, self._timer = True, None
        usage, self._usage = self._usage, {}
        calls, self._calls = self._calls, []
        functions = [function for function, _ in calls]
        writing = asyncio.get_running_loop().run_in_executor(
            self._thread, self._write, usage, functions
        )
        writing.add_done_callback(partial(self._written, usage, [future for _, future in calls]))

    def _written(
        self,
        usage: Mapping[UsageRow, list[float]],
        futures: Sequence[asyncio.Future[Any]],
        writing: asyncio.Future[list[Any]],
    ) -> None:
        """Tell the callers, and go on. What was not written is kept for the next time."""
        self._is_writing = False
        if writing.cancelled():
            return
        error = writing.exception()
        results = [error] * len(futures) if error is not None else writing.result()
        for future, result in zip(futures, results, strict=True):
            if future.done():  # its caller has left
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        if error is not None:
            if not self._has_failed:
                logger.error("The ledger of usage in %s cannot be written: %s.", self.folder, error)
            for row, sums in usage.items():
                self._add(row, sums)
        self._has_failed = error is not None
        if self._calls:
            self._schedule(0.0)
        elif self._usage:
            self._schedule(_PAUSE_S if error is not None else FLUSH_S)

    # -- the ledger's thread ----------------------------------------------------------------------

    def _write(
        self,
        usage: Mapping[UsageRow, list[float]],
        functions: Sequence[Callable[[sqlite3.Connection], Any]],
    ) -> list[Any]:
        """Make one transaction. Returns the functions' results, or the CorralErrors that they raise."""
        try:
            db = self._db = self._db or self._opened()
            with transaction(db):
                if usage:
                    db.executemany(_INSERT, [_values(row, sums) for row, sums in usage.items()])
                    self._tidy(db)
                return [_result(function, db) for function in functions]
        except (sqlite3.Error, OSError):
            if self._db is not None and self.folder is not None:
                self._db.close()
                self._db = None
            raise

    def _opened(self) -> sqlite3.Connection:
        path = ":memory:" if self.folder is None else self.folder / "ledger.sqlite"
        db = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        weakref.finalize(self, db.close)
        mount = None if self.folder is None else mount_of(self.folder)
        if mount is not None and mount.kind in _OF_ONE_MACHINE:
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with transaction(db):
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
        return db

    def _tidy(self, db: sqlite3.Connection) -> None:
        """Once an hour, add up rows that are old, and forget the oldest."""
        now = self.clock()
        row = db.execute("SELECT value FROM state WHERE name = 'tidied'").fetchone()
        if row is not None and 0 <= now - row["value"] < HOUR_S:
            return
        db.execute("INSERT OR REPLACE INTO state VALUES ('tidied', ?)", (now,))
        roll_up(db, now, _KEPT)
        if db.execute("SELECT COUNT(*) FROM usage").fetchone()[0] > MOST_ROWS:
            roll_up(db, now, _KEPT_WHEN_FULL)
            db.execute(
                "DELETE FROM usage WHERE start < (SELECT start FROM usage ORDER BY start DESC "
                f"LIMIT 1 OFFSET {MOST_ROWS})"
            )
        db.execute("DELETE FROM usage WHERE start < ?", (now - _DAYS_KEPT_S,))


_INSERT = f"INSERT INTO usage VALUES (?, {MINUTE_S}, ?, ?, ?, ?{', ?' * len(COUNTS)}) {_ADD}"


def _values(row: UsageRow, sums: list[float]) -> tuple[Any, ...]:
    return (*row, *sums)


def _result(function: Callable[[sqlite3.Connection], T], db: sqlite3.Connection) -> T | CorralError:
    try:
        return function(db)
    except CorralError as error:
        return error


def roll_up(
    db: sqlite3.Connection, now: float, kept: Sequence[tuple[int, int, int]] = _KEPT
) -> None:
    """Add up rows of one width to rows of the next one: `kept` has both widths, and the age."""
    for width, wider, keep_s in kept:
        before = int(now - keep_s) // wider * wider
        columns = ", ".join(("key", "model", "endpoint", "batch"))
        db.execute(
            f"INSERT INTO usage SELECT start / {wider} * {wider} AS bucket, {wider}, {columns}, {_SUMS} "
            f"FROM usage WHERE width = ? AND start < ? GROUP BY bucket, {columns} {_ADD}",
            (width, before),
        )
        db.execute("DELETE FROM usage WHERE width = ? AND start < ?", (width, before))

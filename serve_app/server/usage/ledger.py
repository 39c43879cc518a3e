"""The ledger of usage: SQLite, in a folder that all ingresses see, written beside the event loop.

On a file system of one machine, its journal is a write-ahead log, whose transactions wait for no disk. That
needs shared memory, which does not reach other machines: on all other file systems, it is a plain file.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import secrets
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from serve_app.base.databases import make_private, transaction
from serve_app.base.errors import CorralError, LedgerError
from serve_app.config.schema import PriceConfig
from serve_app.server.http.request_context import UsageCounts
from serve_app.server.usage import budgets
from serve_app.server.usage.budgets import DAY_S, LEASE_S, Period
from serve_app.server.usage.key_metrics import KeyMetrics
from serve_app.store.encryption import mount_of

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")
DIMENSIONS = ("key", "model", "endpoint", "batch")
COUNTS = tuple(UsageCounts.__annotations__)
MINUTE_S, HOUR_S = 60, 3600
_FILE = "ledger.sqlite"
FLUSH_S = 0.25
"""The longest that a count waits to be written."""
_PAUSE_S = 1.0
"""The time between two tries to write on a disk that fails."""
_BUSY_S, _RETRY_S = 10.0, 0.01
"""The longest wait for other ingresses' transactions, which take a millisecond."""
_RENEW_S = 2.0
"""The time between renewals of the leases of running requests."""
_TIDY_S = 60.0
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


def _column(name: str) -> str:
    return f"{name} REAL NOT NULL DEFAULT 0"


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage (
    start INTEGER NOT NULL, width INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    endpoint TEXT NOT NULL, batch INTEGER NOT NULL,
    {", ".join(map(_column, COUNTS))},
    PRIMARY KEY (start, width, key, model, endpoint, batch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    key TEXT NOT NULL, period TEXT NOT NULL, slot INTEGER NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (key, period, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running (
    key TEXT NOT NULL, holder INTEGER NOT NULL, n INTEGER NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (key, holder)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
"""
_ADD = f"""ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)}"""
_SUMS = ", ".join(f"SUM({name}) AS {name}" for name in COUNTS)


class UsageRow(NamedTuple):
    """The subject of a row of usage."""

    start: int
    """The beginning of its minute, in seconds since 1970."""
    key: str
    """The name of the API key; empty without keys."""
    model: str
    endpoint: str
    batch: bool


class _Batch(NamedTuple):
    """The contents of a transaction: what it writes and asks."""

    usage: dict[UsageRow, list[float]]
    spent: dict[tuple[str, str, int], float]
    running: dict[str, int]
    calls: list[tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]]


class Ledger:
    """The ledger of one ingress, which shares its file with the others.

    Used in one event loop. A thread of its own makes transactions, each of which holds all that came since
    the last one. What is counted is written within FLUSH_S. Without a folder, the ledger is in memory.
    """

    def __init__(
        self,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
        prices: Mapping[str, PriceConfig] = MappingProxyType({}),
    ) -> None:
        """Makes the folder, private to this user, if it is not there. `prices` are by model, and `*` is for
        all others. Raises OSError."""
        self.folder = folder
        self._prices = prices
        self.clock = clock
        self.holder = secrets.randbits(62)
        """The number of this ingress."""
        self._usage: dict[UsageRow, list[float]] = {}
        self._spent: dict[tuple[str, str, int], float] = {}
        self._running: dict[str, int] = {}
        self._later: list[Callable[[], None]] = []
        self._calls: list[tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]] = []
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._is_writing = self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._reader = ThreadPoolExecutor(1, "usage")
        self._path = None if folder is None else folder / _FILE
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        """The number of the file that the connection is to."""
        self._has_failed = False
        self._key_metrics = KeyMetrics()
        self._tidied = -math.inf
        if folder is not None and self._path is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(self._path)

    def counter(
        self, key: str, endpoint: str, *, batch: bool = False
    ) -> Callable[[str, UsageCounts], float]:
        """A function that counts what requests of this key (empty without keys), or lines of its batches,
        use of a model, and returns the cost."""

        def count(model: str, counts: UsageCounts) -> float:
            cost = self._cost(model, counts)
            if cost:
                counts = {**counts, "cost": cost}
            minute = int(self.clock()) // MINUTE_S * MINUTE_S
            row = UsageRow(minute, key, model, endpoint, batch)
            self._add(row, map(counts.get, COUNTS))
            return cost

        return count

    def later(self, count: Callable[[], None]) -> None:
        """Have a function count before the next transaction, within FLUSH_S."""
        self._later.append(count)
        self._schedule(FLUSH_S)

    def _cost(self, model: str, counts: UsageCounts) -> float:
        """The cost by the price of a model, with an adapter maybe."""
        names = (model, model.partition(":")[0], "*") if self._prices else ()
        price = next((self._prices[name] for name in names if name in self._prices), None)
        if price is None:
            return 0.0
        n_cached = counts.get("cached_tokens", 0)
        cached = price.prompt if price.cached is None else price.cached
        tokens = (
            price.prompt * (counts.get("prompt_tokens", 0) - n_cached)
            + cached * n_cached
            + price.generated * counts.get("completion_tokens", 0)
        )
        return tokens / 1e6 + price.compute_second * counts.get("compute_s", 0.0)

    def _add(self, row: UsageRow, counts: Iterable[object]) -> None:
        sums = self._usage.get(row)
        if sums is None:
            if len(self._usage) >= MOST_WAITING_ROWS:
                return
            sums = self._usage[row] = [0.0] * len(COUNTS)
        for i, n in enumerate(counts):
            sums[i] += n or 0  # type: ignore[operator]
        self._schedule(FLUSH_S)

    def spend(self, key: str, period: Period, slot: int, amount: float) -> None:
        """Add to what a key has spent in a slot of a period; a negative amount gives back."""
        row = key, period.name, slot
        if row not in self._spent and len(self._spent) >= MOST_WAITING_ROWS:
            return
        self._spent[row] = self._spent.get(row, 0.0) + amount
        self._schedule(FLUSH_S)

    def runs(self, key: str, n: int) -> None:
        """Tell other ingresses how many requests of a key run here."""
        self._running[key] = n
        self._schedule(0.0)

    async def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The function's result, in a transaction behind all that was counted before. The function raises
        CorralError before it writes anything. Raises LedgerError, too."""
        if self._is_closed:
            raise LedgerError("The ledger is closed.")
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
        """The sums of buckets of `width` seconds between two times, by the dimensions of `group_by`. `only`
        names the values that a dimension of a row may have. Older rows are wider: each is in the bucket of
        its beginning."""
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
        path = self._path
        if path is None:
            return await self.call(lambda db: _rows(db, query, values))
        await self.call(lambda _: None)

        def read() -> list[dict[str, Any]]:
            try:
                with closing(sqlite3.connect(path, _BUSY_S)) as db:
                    return _rows(db, query, values)
            except sqlite3.Error as error:
                raise _unusable(error) from None

        # Beside the ledger's own thread: who asks for much holds up no request with a budget.
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def close(self) -> None:
        """Write what is left. What comes later is not counted."""
        with suppress(LedgerError):
            await self.call(lambda _: None)
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._thread.shutdown(wait=False)
        self._reader.shutdown(wait=False)

    def _schedule(self, pause_s: float) -> None:
        """Write after this time, or earlier: what comes meanwhile goes with it."""
        loop = asyncio.get_running_loop()
        due = loop.time() + pause_s
        if self._timer is not None and due < self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and not self._is_writing and not self._is_closed:
            self._timer, self._due = loop.call_later(pause_s, self._begin), due

    def _begin(self) -> None:
        self._is_writing, self._timer = True, None
        later, self._later = self._later, []
        for count in later:
            count()
        calls, self._calls = self._calls, []
        batch = _Batch(self._usage, self._spent, self._running.copy(), calls)
        self._usage, self._spent = {}, {}
        self._running = {key: n for key, n in self._running.items() if n}
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, batch)
        writing.add_done_callback(partial(self._on_write, batch))

    def _on_write(self, batch: _Batch, writing: asyncio.Future[list[Any]]) -> None:
        """Tell the callers, and go on. What was not written is kept for the next time."""
        self._is_writing = False
        if writing.cancelled():
            return
        error = writing.exception()
        results = [_unusable(error) for _ in batch.calls] if error else writing.result()
        for (_, future), result in zip(batch.calls, results, strict=True):
            if future.done():  # its caller has left
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        if error is not None:
            if not self._has_failed:
                logger.error(
                    "%s: %s A damaged file can be moved away: a new one begins.",
                    self._path,
                    _unusable(error),
                )
            self._keep(batch)
        else:
            for row, sums in batch.usage.items():
                if row.key:
                    counts = dict(zip(COUNTS, sums, strict=True))
                    self._key_metrics.add(row.key, row.model, counts)
        self._has_failed = error is not None
        if self._calls:
            self._schedule(0.0)
        elif self._usage or self._spent or self._later or error is not None:
            self._schedule(FLUSH_S if error is None else _PAUSE_S)
        elif self._running:
            self._schedule(_RENEW_S)

    def _keep(self, batch: _Batch) -> None:
        for row, sums in batch.usage.items():
            self._add(row, sums)
        for spent_row, amount in batch.spent.items():
            self._spent[spent_row] = self._spent.get(spent_row, 0.0) + amount
        self._running = batch.running | self._running

    # -- the ledger's thread ----------------------------------------------------------------------

    def _write(self, batch: _Batch) -> list[Any]:
        """Make one transaction. Returns the functions' results, or the CorralErrors that they raise."""
        try:
            if self._path is not None and _file_number(self._path) != self._opened:
                self._leave_moved_file()
            db = self._db = self._db or self._open_database()
            with transaction(db):
                if batch.usage:
                    db.executemany(_INSERT, [(*row, *sums) for row, sums in batch.usage.items()])
                budgets.add(db, batch.spent)
                results = [_result(function, db) for function, _ in batch.calls]
                until = self.clock() + LEASE_S
                db.executemany(
                    "INSERT OR REPLACE INTO running VALUES (?, ?, ?, ?)",
                    [(key, self.holder, n, until) for key, n in batch.running.items()],
                )
                self._tidy(db)
                return results
        except (sqlite3.Error, OSError):
            if self._db is not None and self._path is not None:
                if _file_number(self._path) == self._opened:
                    self._closing()
                    self._db = None
                else:
                    self._leave_moved_file()
            raise

    def _leave_moved_file(self) -> None:
        """Go on in the file that has the name now. The connection to the one that had it stays open for
        ever: SQLite would remove the log of the file that has the name, as it closes."""
        if self._db is not None:
            self._closing.detach()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))
            logger.warning("%s was moved away: a new one begins.", self._path)
        self._db = None

    def _open_database(self) -> sqlite3.Connection:
        if self._path is not None:
            make_private(self._path)
            self._opened = _file_number(self._path)
        path = self._path or ":memory:"
        db = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
        self._closing = weakref.finalize(self, db.close)
        mount = None if self.folder is None else mount_of(self.folder)
        if mount is not None and mount.kind in _OF_ONE_MACHINE:
            _use_wal(db)
        db.execute("PRAGMA synchronous = NORMAL")
        with transaction(db):
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            known = {row[1] for row in db.execute("PRAGMA table_info(usage)")}
            for name in COUNTS:
                if name not in known:  # a file of an earlier version
                    db.execute(f"ALTER TABLE usage ADD COLUMN {_column(name)}")
        return db

    def _tidy(self, db: sqlite3.Connection) -> None:
        """Forget what counts no more, and once an hour, add up rows that are old."""
        now = self.clock()
        if 0 <= now - self._tidied < _TIDY_S:
            return
        self._tidied = now
        budgets.forget(db, now)
        row = db.execute("SELECT value FROM state WHERE name = 'tidied'").fetchone()
        if row is not None and 0 <= now - row[0] < HOUR_S:
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


def _result(function: Callable[[sqlite3.Connection], T], db: sqlite3.Connection) -> T | CorralError:
    try:
        return function(db)
    except CorralError as error:
        return error


def _use_wal(db: sqlite3.Connection) -> None:
    """Have the file written ahead. SQLite does not wait where two processes change a new file's mode: it
    says at once that the file is locked. Raises sqlite3.Error."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
        time.sleep(_RETRY_S)


def _file_number(path: Path) -> tuple[int, int] | None:
    """The number that tells the file from another one of its name; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _unusable(error: BaseException) -> LedgerError:
    return LedgerError(f"The ledger of usage cannot be used now: {error}.")


def _rows(db: sqlite3.Connection, query: str, values: Sequence[object]) -> list[dict[str, Any]]:
    cursor = db.execute(query, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def roll_up(
    db: sqlite3.Connection, now: float, widths: Sequence[tuple[int, int, int]] = _KEPT
) -> None:
    """Add up rows of one width to rows of the next one: `widths` has both widths, and the age."""
    for width, wider, keep_s in widths:
        before = int(now - keep_s) // wider * wider
        columns = ", ".join(("key", "model", "endpoint", "batch"))
        db.execute(
            f"INSERT INTO usage SELECT start / {wider} * {wider} AS bucket, {wider}, {columns}, {_SUMS} "
            f"FROM usage WHERE width = ? AND start < ? GROUP BY bucket, {columns} {_ADD}",
            (width, before),
        )
        db.execute("DELETE FROM usage WHERE width = ? AND start < ?", (width, before))

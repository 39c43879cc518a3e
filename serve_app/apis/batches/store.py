"""The store of files and batches: which there are, whose they are, and which ingress works on a batch.

SQLite, in a folder that all ingresses see. Its transactions and its journal are what "nothing is lost, and
nothing is written twice" needs. A process that is killed leaves nothing to be cleaned up. Nobody has to run
anything for it. The journal is a file beside it, as shared memory (WAL) would not reach other machines.
Those share it if their file system has locks (NFS 4, EFS, a cluster's).
"""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from serve_app.apis.batches.objects import (
    ENDED,
    BatchObject,
    BatchRequest,
    FileObject,
    LineError,
    LineErrors,
    RequestCounts,
)
from serve_app.base.databases import make_private, transaction
from serve_app.base.errors import (
    ConfigError,
    InvalidRequestError,
    ObjectNotFoundError,
    RateLimitError,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    n_bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL, deadline REAL NOT NULL,
    metadata TEXT, errors TEXT, output_file_id TEXT, error_file_id TEXT, keep_s REAL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, times TEXT NOT NULL DEFAULT '{}',
    holder TEXT, leased_until REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    ended REAL
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, created);
"""
_BUSY_S = 30.0
"""The longest that a process waits for others' transactions, which take milliseconds."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What a key may have, or all clients together without keys: files, their bytes, and batches that run.
MOST_FILES, MOST_BYTES, MOST_BATCHES = 1000, 2**32, 100
MOST_ATTEMPTS = 10
"""The most times that a batch is claimed without getting any further. Then it has failed."""
_BACK_OFF_S, _MOST_BACK_OFF_S = 5.0, 300.0
"""The pauses after a batch's first failed attempt, which double, and the longest."""
MOST_ENDED = 1000
"""Batches of one key that have ended and are kept. The oldest are forgotten."""
STRAY_S = 7200.0
"""The age at which files that no row names are removed. None takes so long to arrive."""


_LEAST_FREE_BYTES = 2**20
"""The free bytes on the disk that SQLite needs to open its journal."""


class ClaimedBatch(NamedTuple):
    """A batch, as its executor knows it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: str
    deadline: float


def is_full(error: Exception, folder: Path) -> bool:
    """Whether this error of a file in the folder says that the disk has no room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    return code == sqlite3.SQLITE_FULL


class BatchStore:
    """The store in a folder. Any thread of any process; each call is a transaction.

    Files' contents lie in `files`, files that are being received in `arriving`, and the journals of batches
    that run in `runs`. The methods raise OSError and sqlite3.Error, and then have changed nothing.
    """

    def __init__(
        self, folder: Path, keep_days: int = 30, clock: Callable[[], float] = time.time
    ) -> None:
        """Makes the folder, private to this user, if it is not there. Raises OSError, and ConfigError for a
        damaged database."""
        self._keep_s = keep_days * 86400.0
        self.folder = folder
        self._clock = clock
        for subfolder in (folder, folder / "files", folder / "runs", folder / "arriving"):
            subfolder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / "batches.sqlite"
        try:
            with self._transaction() as db:
                (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            problem = str(error)
        if problem != "ok":
            raise ConfigError(
                f"ingress.batch.folder: {self._path} cannot be used: {problem}. If it is damaged, move "
                "batches.sqlite* away: a new one begins, without the files and batches of before."
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        make_private(self._path)
        with closing(sqlite3.connect(self._path, _BUSY_S, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            with transaction(db):
                if db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None:
                    for statement in _SCHEMA.split(";"):
                        db.execute(statement)
                yield db

    # -- files ------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """The place of a file's contents, whose id is in the store."""
        return self.folder / "files" / file_id

    def check_room(self, owner: str) -> None:
        with self._transaction() as db:
            self._check_room(db, owner, 0)

    def _check_room(self, db: sqlite3.Connection, owner: str, n_new: int) -> None:
        n_files, n_bytes = db.execute(
            "SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if n_files >= MOST_FILES or n_bytes + n_new > MOST_BYTES:
            raise RateLimitError(
                f"You have {n_files} files of {n_bytes} bytes. The limit is {MOST_FILES} files of "
                f"{MOST_BYTES} bytes together. Delete some.",
                60,
            )

    def add_file(
        self, owner: str, arrived: Path, filename: str, purpose: str, expires_s: float | None = None
    ) -> FileObject:
        """Take a file in, which is moved. Raises RateLimitError if the key may not have it."""
        file_id, n_bytes, now = f"file-{uuid.uuid4().hex}", arrived.stat().st_size, self._clock()
        expires = now + min(expires_s or self._keep_s, self._keep_s)
        with self._transaction() as db:
            self._check_room(db, owner, n_bytes)
            db.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                (file_id, owner, filename, purpose, n_bytes, now, expires),
            )
            arrived.replace(self.path(file_id))
            return _file_object(_one(db, "files", file_id, owner))

    def file(self, owner: str, file_id: str) -> FileObject:
        with self._transaction() as db:
            return _file_object(_one(db, "files", file_id, owner))

    def files(
        self, owner: str, purpose: str | None, limit: int, after: str | None, *, newest_first: bool
    ) -> list[FileObject]:
        """The next `limit` files, and one more if there are more."""
        with self._transaction() as db:
            rows = _page(db, "files", owner, limit, after, purpose, newest_first=newest_first)
        return [_file_object(row) for row in rows]

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises InvalidRequestError while a batch needs it."""
        with self._transaction() as db:
            _one(db, "files", file_id, owner)
            running = db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status NOT IN {ENDED}",
                (file_id,),
            ).fetchone()
            if running is not None:
                raise InvalidRequestError(f"{running['id']} needs this file.", "file_id")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
            self.path(file_id).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove files that have expired, batches that ended long ago, and what killed processes have left.
        Returns how many files there were."""
        now = self._clock()
        with self._transaction() as db:
            expired = db.execute(
                "SELECT id FROM files WHERE expires < ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE status NOT IN {ENDED})",
                (now,),
            ).fetchall()
            db.executemany("DELETE FROM files WHERE id = ?", [tuple(row) for row in expired])
            db.execute(
                "DELETE FROM batches WHERE ended < ? OR id IN (SELECT id FROM (SELECT id, ROW_NUMBER() "
                "OVER (PARTITION BY owner ORDER BY ended DESC) AS n FROM batches WHERE ended NOT NULL) "
                "WHERE n > ?)",
                (now - self._keep_s, MOST_ENDED),
            )
            named = {row["id"] for row in db.execute("SELECT id FROM files")}
            live = f"SELECT id FROM batches WHERE status NOT IN {ENDED}"
            named |= {f"{row['id']}.sqlite" for row in db.execute(live)}
        for (file_id,) in expired:
            self.path(file_id).unlink(missing_ok=True)
        return len(expired) + sum(self._remove_strays(named))

    def _remove_strays(self, named: Set[str]) -> Iterator[bool]:
        oldest = time.time() - STRAY_S
        for subfolder in ("files", "runs", "arriving"):
            for path in (self.folder / subfolder).iterdir():
                if path.name.removesuffix("-journal") in named:
                    continue
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()
                        yield True

    # -- batches ----------------------------------------------------------------------------------

    def add_batch(self, owner: str, request: BatchRequest) -> BatchObject:
        """Raises InvalidRequestError for a file that is none for batches, and RateLimitError if the key has
        as many batches as it may."""
        batch_id, now = f"batch_{uuid.uuid4().hex}", self._clock()
        window_s = int(request.completion_window[:-1]) * _UNITS[request.completion_window[-1]]
        keep = request.output_expires_after
        with self._transaction() as db:
            if _one(db, "files", request.input_file_id, owner)["purpose"] != "batch":
                raise InvalidRequestError("The file's purpose is not `batch`.", "input_file_id")
            (n_live,) = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status NOT IN {ENDED}", (owner,)
            ).fetchone()
            if n_live >= MOST_BATCHES:
                raise RateLimitError(
                    f"You have {n_live} unfinished batches, which is the limit.", 60
                )
            db.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, status, "
                "created, deadline, metadata, keep_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch_id, owner, request.endpoint, request.input_file_id),
                    *(request.completion_window, "validating", now, now + window_s),
                    None if request.metadata is None else json.dumps(request.metadata),
                    None if keep is None else keep.seconds,
                ),
            )
            return _batch(_one(db, "batches", batch_id, owner))

    def batch(self, owner: str, batch_id: str) -> BatchObject:
        with self._transaction() as db:
            return _batch(_one(db, "batches", batch_id, owner))

    def batches(self, owner: str, limit: int, after: str | None) -> list[BatchObject]:
        """The next `limit` batches, the newest first, and one more if there are more."""
        with self._transaction() as db:
            return [_batch(row) for row in _page(db, "batches", owner, limit, after)]

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Have the batch end soon, or at once if none of its lines has been asked for. Raises
        InvalidRequestError if it has ended."""
        now = self._clock()
        with self._transaction() as db:
            row = _one(db, "batches", batch_id, owner)
            if row["status"] in ENDED:
                raise InvalidRequestError(f"The batch is {row['status']}.", "batch_id")
            if row["status"] not in ("finalizing", "cancelling"):
                _move(db, batch_id, "cancelling", now)
            if row["leased_until"] < now and row["status"] == "validating":
                _move(db, batch_id, "cancelled", now)
            elif row["holder"] is None:  # nobody works on it: no need to wait for another attempt
                db.execute("UPDATE batches SET leased_until = 0 WHERE id = ?", (batch_id,))
            return _batch(_one(db, "batches", batch_id, owner))

    # -- for those who work on them ---------------------------------------------------------------

    def claim(self, holder: str, lease_s: float, most: int, most_each: int) -> list[ClaimedBatch]:
        """Claim up to `most` batches that nobody works on, of each owner `most_each` together with those
        that the holder has. They are the holder's for so many seconds, and as long as it renews them.

        Owners take turns, and an owner's most urgent batch is first. A batch that was claimed too often in
        vain has failed."""
        now = self._clock()
        with self._transaction() as db:
            held = f"SELECT owner FROM batches WHERE holder = ? AND status NOT IN {ENDED}"
            n_held = Counter(row["owner"] for row in db.execute(held, (holder,)))
            waiting = db.execute(
                f"SELECT * FROM batches WHERE status NOT IN {ENDED} AND leased_until < ? "
                "ORDER BY deadline, created",
                (now,),
            ).fetchall()
            turns = []
            for row in waiting:
                if row["attempts"] >= MOST_ATTEMPTS:
                    _fail(db, row["id"], [_GIVEN_UP], now)
                elif (turn := n_held[row["owner"]]) < most_each:
                    n_held[row["owner"]] += 1
                    turns.append((turn, row))
            claimed = [row for _, row in sorted(turns, key=lambda entry: entry[0])[:most]]
            for row in claimed:
                db.execute(
                    "UPDATE batches SET holder = ?, leased_until = ?, attempts = attempts + 1 "
                    "WHERE id = ?",
                    (holder, now + lease_s, row["id"]),
                )
        return [ClaimedBatch(*(row[name] for name in ClaimedBatch._fields)) for row in claimed]

    def renew(self, holder: str, batch_id: str, lease_s: float) -> str | None:
        """Keep the batch. Returns its status, or None if it is another holder's, or gone."""
        with self._transaction() as db:
            row = db.execute(
                "UPDATE batches SET leased_until = ? WHERE id = ? AND holder = ? RETURNING status",
                (self._clock() + lease_s, batch_id, holder),
            ).fetchone()
            return None if row is None else str(row["status"])

    def release(self, holder: str, batch_id: str, *, failed: bool = False) -> None:
        """Let others work on the batch. After an attempt that failed, they wait for longer each time; any
        other attempt does not count."""
        with self._transaction() as db:
            row = db.execute(
                "SELECT attempts FROM batches WHERE id = ? AND holder = ?", (batch_id, holder)
            ).fetchone()
            if row is None:
                return
            pause_s = min(_MOST_BACK_OFF_S, _BACK_OFF_S * 2 ** (row["attempts"] - 1))
            db.execute(
                "UPDATE batches SET holder = NULL, leased_until = ?, attempts = ? WHERE id = ?",
                (self._clock() + pause_s, row["attempts"], batch_id)
                if failed
                else (0, max(0, row["attempts"] - 1), batch_id),
            )

    def move(self, batch_id: str, before: str, after: str) -> bool:
        """Give it another status, if it has the one of before."""
        with self._transaction() as db:
            row = db.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row["status"] != before:
                return False
            _move(db, batch_id, after, self._clock())
            return True

    def count(self, batch_id: str, total: int, completed: int, failed: int) -> None:
        """Note how many of the batch's lines have been answered. With more than before, it gets on."""
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET attempts = CASE WHEN completed + failed < ? THEN 0 ELSE attempts "
                "END, total = ?, completed = ?, failed = ? WHERE id = ?",
                (completed + failed, total, completed, failed, batch_id),
            )

    def fail(self, batch_id: str, errors: list[LineError]) -> None:
        with self._transaction() as db:
            _fail(db, batch_id, errors, self._clock())

    def finish(
        self, batch_id: str, status: str, paths: dict[str, Path], counts: tuple[int, int, int]
    ) -> None:
        """End the batch. The files, `output` and `error` as far as there are any, are moved and become its
        own. A second call changes nothing."""
        now = self._clock()
        with self._transaction() as db:
            row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row["status"] in ENDED:
                for path in paths.values():
                    path.unlink(missing_ok=True)
                return
            expires = now + min(row["keep_s"] or self._keep_s, self._keep_s)
            for kind, path in paths.items():
                file_id = f"file-{batch_id.removeprefix('batch_')}-{kind}"
                db.execute(
                    "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(file_id, row["owner"], f"{batch_id}_{kind}.jsonl", "batch_output"),
                        *(path.stat().st_size, now, expires),
                    ),
                )
                path.replace(self.path(file_id))
                db.execute(
                    f"UPDATE batches SET {kind}_file_id = ? WHERE id = ?", (file_id, batch_id)
                )
            db.execute(
                "UPDATE batches SET total = ?, completed = ?, failed = ? WHERE id = ?",
                (*counts, batch_id),
            )
            _move(db, batch_id, status, now)


def _one(db: sqlite3.Connection, table: str, object_id: str, owner: str) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(
        f"SELECT * FROM {table} WHERE id = ? AND owner = ?", (object_id, owner)
    ).fetchone()
    if row is None:
        kind = "file" if table == "files" else "batch"
        raise ObjectNotFoundError(f"You have no {kind} {object_id!r} here.")
    return row


def _page(
    db: sqlite3.Connection,
    table: str,
    owner: str,
    limit: int,
    after: str | None,
    purpose: str | None = None,
    *,
    newest_first: bool = True,
) -> list[sqlite3.Row]:
    order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    where, values = "owner = ?", [owner]
    if purpose is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    if after is not None:
        last = _one(db, table, after, owner)
        where += f" AND (created, id) {beyond} (?, ?)"
        values = [*values, last["created"], last["id"]]
    return db.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY created {order}, id {order} LIMIT ?",
        (*values, limit + 1),
    ).fetchall()


_GIVEN_UP = LineError(
    code="server_error",
    message=f"The server failed {MOST_ATTEMPTS} times to work on this batch. Its log says why.",
)


def _fail(db: sqlite3.Connection, batch_id: str, errors: list[LineError], now: float) -> None:
    text = LineErrors(data=errors).model_dump_json()
    db.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
    _move(db, batch_id, "failed", now)


def _move(db: sqlite3.Connection, batch_id: str, status: str, now: float) -> None:
    (times,) = db.execute("SELECT times FROM batches WHERE id = ?", (batch_id,)).fetchone()
    moved = json.loads(times) | {f"{status}_at": int(now)}
    db.execute(
        "UPDATE batches SET status = ?, times = ?, ended = ? WHERE id = ?",
        (status, json.dumps(moved), now if status in ENDED else None, batch_id),
    )


def _file_object(row: sqlite3.Row) -> FileObject:
    created, expires = row["created"], row["expires"]
    times = {"created_at": int(created), "expires_at": None if expires is None else int(expires)}
    return FileObject.model_validate(dict(row) | times | {"bytes": row["n_bytes"]})


def _batch(row: sqlite3.Row) -> BatchObject:
    errors, metadata, times = row["errors"], row["metadata"], json.loads(row["times"])
    times |= {"created_at": int(row["created"]), "expires_at": int(row["deadline"])}
    fields = {
        "errors": None if errors is None else LineErrors.model_validate_json(errors),
        "metadata": None if metadata is None else json.loads(metadata),
        "request_counts": {name: row[name] for name in RequestCounts.model_fields},
    }
    return BatchObject.model_validate(dict(row) | times | fields)

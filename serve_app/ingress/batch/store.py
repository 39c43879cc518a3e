"""The store of files and batches: which there are, whose they are, and which ingress works on a batch.

SQLite, in a folder that all ingresses see. Its transactions and its journal are what "nothing is lost, and
nothing is written twice" needs, a process that is killed leaves nothing to be cleaned up, and nobody has to
run anything for it. The journal is a file beside it, as shared memory (WAL) would not reach other machines;
those share it if their file system has locks (NFS 4, EFS, a cluster's).
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.errors import InvalidRequestError, ObjectNotFoundError, RateLimitError
from serve_app.ingress.batch.objects import (
    ENDED,
    BatchObject,
    BatchRequest,
    FileObject,
    LineError,
    LineErrors,
    RequestCounts,
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
    holder TEXT, leased_until REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created);
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, created);
"""
_BUSY_S = 30.0
"""So long a process waits for others' transactions, which take milliseconds."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Of one key, and of one file."""

    max_file_bytes: int = 200 << 20
    max_files: int = 1000
    max_bytes: int = 4 << 30
    """Of all of a key's files together."""
    max_lines: int = 200_000
    """Of one file."""
    max_batches: int = 100
    """Of a key, that have not ended."""


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A batch, as its executor knows it."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    status: str
    deadline: float
    keep_s: float | None


class BatchStore:
    """The store in a folder. Any thread of any process; each call is a transaction.

    Files' contents lie in `files`; what a batch that runs has been answered, in `runs`.
    """

    def __init__(
        self,
        folder: Path,
        limits: BatchLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes the folder, private to this user, if it is not there. Raises OSError."""
        self.limits = limits or BatchLimits()
        self.folder = folder
        self._clock = clock
        for made in (folder, folder / "files", folder / "runs"):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._transaction() as db:
            for statement in _SCHEMA.split(";"):
                db.execute(statement)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = sqlite3.connect(self.folder / "batches.sqlite", _BUSY_S, isolation_level=None)
        db.row_factory = sqlite3.Row
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        finally:
            db.close()

    # -- files ------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Where a file's contents are, whose id is in the store."""
        return self.folder / "files" / file_id

    def check_room(self, owner: str) -> None:
        """Raises RateLimitError if the key has as many files, or bytes, as it may."""
        with self._transaction() as db:
            self._check_room(db, owner, 0)

    def _check_room(self, db: sqlite3.Connection, owner: str, n_new: int) -> None:
        n_files, n_bytes = db.execute(
            "SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if n_files >= self.limits.max_files or n_bytes + n_new > self.limits.max_bytes:
            raise RateLimitError(
                f"You have {n_files} files of {n_bytes} bytes. The limit is {self.limits.max_files} files "
                f"of {self.limits.max_bytes} bytes together. Delete some.",
                60,
            )

    def add_file(
        self,
        owner: str,
        arrived: Path,
        filename: str,
        purpose: str,
        expires_s: float | None = None,
    ) -> FileObject:
        """Take a file in, which is moved. Raises RateLimitError if the key may not have it."""
        file_id, n_bytes, now = f"file-{uuid.uuid4().hex}", arrived.stat().st_size, self._clock()
        expires = None if expires_s is None else now + expires_s
        with self._transaction() as db:
            self._check_room(db, owner, n_bytes)
            db.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                (file_id, owner, filename, purpose, n_bytes, now, expires),
            )
            arrived.replace(self.path(file_id))
            return _file(_one(db, "files", file_id, owner))

    def file(self, owner: str, file_id: str) -> FileObject:
        """Raises ObjectNotFoundError, like all of these, for what is not the owner's."""
        with self._transaction() as db:
            return _file(_one(db, "files", file_id, owner))

    def files(
        self, owner: str, purpose: str | None, limit: int, after: str | None, *, newest_first: bool
    ) -> list[FileObject]:
        """So many, and one more if there are more."""
        with self._transaction() as db:
            rows = _page(db, "files", owner, limit, after, purpose, newest_first=newest_first)
        return [_file(row) for row in rows]

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

    def delete_expired(self) -> int:
        """Of files that were to be deleted by themselves; returns how many."""
        with self._transaction() as db:
            expired = db.execute(
                "SELECT id FROM files WHERE expires < ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE status NOT IN {ENDED})",
                (self._clock(),),
            ).fetchall()
            for (file_id,) in expired:
                db.execute("DELETE FROM files WHERE id = ?", (file_id,))
                self.path(file_id).unlink(missing_ok=True)
        return len(expired)

    # -- batches ----------------------------------------------------------------------------------

    def add_batch(self, owner: str, asked: BatchRequest) -> BatchObject:
        """Raises InvalidRequestError for a file that is none for batches, and RateLimitError if the key has
        as many batches as it may."""
        batch_id, now = f"batch_{uuid.uuid4().hex}", self._clock()
        window_s = int(asked.completion_window[:-1]) * _UNITS[asked.completion_window[-1]]
        keep = asked.output_expires_after
        with self._transaction() as db:
            if _one(db, "files", asked.input_file_id, owner)["purpose"] != "batch":
                raise InvalidRequestError("The file's purpose is not `batch`.", "input_file_id")
            (n_live,) = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status NOT IN {ENDED}", (owner,)
            ).fetchone()
            if n_live >= self.limits.max_batches:
                raise RateLimitError(
                    f"You have {n_live} unfinished batches, which is the limit.", 60
                )
            db.execute(
                "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, status, "
                "created, deadline, metadata, keep_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch_id, owner, asked.endpoint, asked.input_file_id),
                    *(asked.completion_window, "validating", now, now + window_s),
                    None if asked.metadata is None else json.dumps(asked.metadata),
                    None if keep is None else keep.seconds,
                ),
            )
            return _batch(_one(db, "batches", batch_id, owner))

    def batch(self, owner: str, batch_id: str) -> BatchObject:
        """One batch."""
        with self._transaction() as db:
            return _batch(_one(db, "batches", batch_id, owner))

    def batches(self, owner: str, limit: int, after: str | None) -> list[BatchObject]:
        """So many, the newest first, and one more if there are more."""
        with self._transaction() as db:
            return [_batch(row) for row in _page(db, "batches", owner, limit, after)]

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Have it end soon. Raises InvalidRequestError if it has ended."""
        with self._transaction() as db:
            row = _one(db, "batches", batch_id, owner)
            if row["status"] in ENDED:
                raise InvalidRequestError(f"The batch is {row['status']}.", "batch_id")
            if row["status"] not in ("finalizing", "cancelling"):
                _move(db, batch_id, "cancelling", self._clock())
            return _batch(_one(db, "batches", batch_id, owner))

    # -- for those who work on them ---------------------------------------------------------------

    def claim(self, holder: str, lease_s: float, most: int) -> list[ClaimedBatch]:
        """Up to `most` batches, the oldest first, that nobody works on: they are the holder's for so many
        seconds, and as long as it renews them."""
        now = self._clock()
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT * FROM batches WHERE status NOT IN {ENDED} AND leased_until < ? "
                "ORDER BY created LIMIT ?",
                (now, most),
            ).fetchall()
            for row in rows:
                db.execute(
                    "UPDATE batches SET holder = ?, leased_until = ? WHERE id = ?",
                    (holder, now + lease_s, row["id"]),
                )
        return [_claimed(row) for row in rows]

    def renew(self, holder: str, batch_id: str, lease_s: float) -> str | None:
        """Its status; None if it is another holder's, or gone."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE batches SET leased_until = ? WHERE id = ? AND holder = ?",
                (self._clock() + lease_s, batch_id, holder),
            )
            if not changed.rowcount:
                return None
            found = db.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
            return str(found["status"])

    def release(self, holder: str, batch_id: str) -> None:
        """Let others work on it."""
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET leased_until = 0 WHERE id = ? AND holder = ?",
                (batch_id, holder),
            )

    def move(self, batch_id: str, before: str, after: str) -> bool:
        """Give it another status, if it has the one of before."""
        with self._transaction() as db:
            found = db.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if found is None or found["status"] != before:
                return False
            _move(db, batch_id, after, self._clock())
            return True

    def count(self, batch_id: str, total: int, completed: int, failed: int) -> None:
        """How many of its lines have been answered."""
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET total = ?, completed = ?, failed = ? WHERE id = ?",
                (total, completed, failed, batch_id),
            )

    def fail(self, batch_id: str, errors: list[LineError]) -> None:
        """Its file cannot be used."""
        told = LineErrors(data=errors).model_dump_json()
        with self._transaction() as db:
            db.execute("UPDATE batches SET errors = ? WHERE id = ?", (told, batch_id))
            _move(db, batch_id, "failed", self._clock())

    def finish(
        self, batch_id: str, status: str, made: dict[str, Path], counts: tuple[int, int, int]
    ) -> None:
        """It has ended, and these files are its own, which are moved: `output` and `error`, as far as there
        are any. Twice changes nothing."""
        now = self._clock()
        with self._transaction() as db:
            row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row["status"] in ENDED:
                for path in made.values():
                    path.unlink(missing_ok=True)
                return
            expires = None if row["keep_s"] is None else now + row["keep_s"]
            for kind, path in made.items():
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
    found: sqlite3.Row | None = db.execute(
        f"SELECT * FROM {table} WHERE id = ? AND owner = ?", (object_id, owner)
    ).fetchone()
    if found is None:
        kind = "file" if table == "files" else "batch"
        raise ObjectNotFoundError(f"You have no {kind} {object_id!r} here.")
    return found


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


def _move(db: sqlite3.Connection, batch_id: str, status: str, now: float) -> None:
    (times,) = db.execute("SELECT times FROM batches WHERE id = ?", (batch_id,)).fetchone()
    moved = json.loads(times) | {f"{status}_at": int(now)}
    db.execute(
        "UPDATE batches SET status = ?, times = ? WHERE id = ?",
        (status, json.dumps(moved), batch_id),
    )


def _claimed(row: sqlite3.Row) -> ClaimedBatch:
    names = ("id", "owner", "endpoint", "input_file_id", "status", "deadline", "keep_s")
    return ClaimedBatch(*(row[name] for name in names))


def _file(row: sqlite3.Row) -> FileObject:
    expires = row["expires"]
    return FileObject(
        id=row["id"],
        bytes=row["n_bytes"],
        created_at=int(row["created"]),
        expires_at=None if expires is None else int(expires),
        filename=row["filename"],
        purpose=row["purpose"],
    )


def _batch(row: sqlite3.Row) -> BatchObject:
    times: dict[str, Any] = json.loads(row["times"])
    times.pop("validating_at", None)
    errors, metadata = row["errors"], row["metadata"]
    return BatchObject(
        id=row["id"],
        endpoint=row["endpoint"],
        errors=None if errors is None else LineErrors.model_validate_json(errors),
        input_file_id=row["input_file_id"],
        completion_window=row["completion_window"],
        status=row["status"],
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        created_at=int(row["created"]),
        expires_at=int(row["deadline"]),
        request_counts=RequestCounts(
            total=row["total"], completed=row["completed"], failed=row["failed"]
        ),
        metadata=None if metadata is None else json.loads(metadata),
        **times,
    )

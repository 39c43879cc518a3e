"""A batch's lines and results: a file of its own, which goes when the batch has ended."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from serve_app.apis.batches.objects import LineError
from serve_app.apis.batches.preparation import BatchLine
from serve_app.base.databases import make_private, transaction
from serve_app.server.workers.worker import MAX_BODY_BYTES

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
"""The error of lines that could not be answered in time."""
MOST_ERRORS = 50
MOST_LINES = 200_000
"""The most wrong lines that a batch names."""
CHUNK_BYTES = 256 * 2**10
"""The most bytes that are checked together, but for a longer line."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS lines (n INTEGER PRIMARY KEY, custom_id TEXT NOT NULL UNIQUE,
    start INTEGER NOT NULL, size INTEGER NOT NULL, prefix BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS lines_by_prefix ON lines (prefix, n);
CREATE TABLE IF NOT EXISTS answers (n INTEGER PRIMARY KEY, good INTEGER NOT NULL, answer BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS checked (start INTEGER NOT NULL, n INTEGER NOT NULL, is_all INTEGER NOT NULL);
"""
_SHOWN_CHARS = 64
"""The most characters of a line's `custom_id` that an error repeats."""


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Whole lines of the input file, which have not been checked."""

    start: int
    """The first byte's place in the file."""
    n_before: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LineResult:
    """The answer to one line, as a line of the output file, or of the file with errors."""

    n: int
    good: bool
    line: bytes


class BatchJournal:
    """The lines of one batch, and their results. One thread at a time.

    A result is written once, whoever brings it: the first one stays. A call that fails has changed nothing,
    and can be made again."""

    def __init__(self, folder: Path, batch_id: str, source: Path) -> None:
        """`source` is the batch's input file. Raises OSError and sqlite3.Error, like all methods."""
        self._path = folder / f"{batch_id}.sqlite"
        self._folder, self._batch_id = folder, batch_id
        self._input = source.open("rb", buffering=0)
        try:
            make_private(self._path)
            self._db = sqlite3.connect(
                self._path, timeout=30.0, isolation_level=None, check_same_thread=False
            )
            self._db.executescript(_SCHEMA)
        except BaseException:
            self._input.close()
            raise

    def close(self) -> None:
        """Close both files. A second call does nothing."""
        self._db.close()
        self._input.close()

    def delete(self) -> None:
        self.close()
        for suffix in ("", "-journal"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    # -- the lines --------------------------------------------------------------------------------

    def _read_progress(self) -> tuple[int, int, bool]:
        row = self._db.execute("SELECT start, n, is_all FROM checked").fetchone() or (0, 0, False)
        return row[0], row[1], bool(row[2])

    @property
    def is_checked(self) -> bool:
        return self._read_progress()[2]

    def next_chunk(self) -> LineChunk | None:
        """The lines to be checked next; None after the last."""
        start, n, is_all = self._read_progress()
        if is_all:
            return None
        data = os.pread(self._input.fileno(), CHUNK_BYTES, start)
        while data and b"\n" not in data and len(data) <= MAX_BODY_BYTES:
            more = os.pread(self._input.fileno(), CHUNK_BYTES, start + len(data))
            data += more
            if not more:
                return LineChunk(start, n, data)
        end = data.rfind(b"\n") + 1
        return LineChunk(start, n, data[:end] if end else data)

    def note(self, chunk: LineChunk, checked: Sequence[BatchLine]) -> list[LineError]:
        """Keep the lines of a chunk, which have been checked. Returns what is wrong with them."""
        with transaction(self._db):
            errors = [error for line in checked for error in self._note(chunk, line)]
            numbers = "SELECT n FROM lines ORDER BY n LIMIT 1 OFFSET ?"
            beyond = self._db.execute(numbers, (MOST_LINES,)).fetchone()
            if beyond is not None:
                message = f"{MOST_LINES} lines are the most."
                errors.append(LineError(code="too_many_lines", message=message, line=beyond[0]))
            n = chunk.n_before + chunk.data.count(b"\n")
            self._db.execute("DELETE FROM checked")
            self._db.execute(
                "INSERT INTO checked VALUES (?, ?, ?)",
                (chunk.start + len(chunk.data), n, bool(beyond) or not chunk.data),
            )
        return errors

    def _note(self, chunk: LineChunk, line: BatchLine) -> list[LineError]:
        n = chunk.n_before + line.n
        if line.error is not None:
            return [line.error.model_copy(update={"line": n})]
        place = chunk.start + line.start, line.size
        try:
            self._db.execute(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?)", (n, line.custom_id, *place, line.prefix)
            )
        except sqlite3.IntegrityError:
            message = f"Another line has the custom_id {line.custom_id[:_SHOWN_CHARS]!r}."
            code, param = "duplicate_custom_id", "custom_id"
            return [LineError(code=code, message=message, param=param, line=n)]
        return []

    def unanswered_lines(self, most: int, after: BatchLine | None = None) -> list[BatchLine]:
        """The next lines without a result, at most so many. Lines that begin alike are neighbours."""
        where, values = "", []
        if after is not None:
            (prefix,) = self._db.execute(
                "SELECT prefix FROM lines WHERE n = ?", (after.n,)
            ).fetchone()
            where, values = "AND (prefix, n) > (?, ?)", [prefix, after.n]
        rows = self._db.execute(
            "SELECT n, custom_id, start, size FROM lines WHERE n NOT IN (SELECT n FROM answers) "
            f"{where} ORDER BY prefix, n LIMIT ?",
            (*values, most),
        ).fetchall()
        return [BatchLine(*row) for row in rows]

    def body(self, line: BatchLine) -> bytes:
        return os.pread(self._input.fileno(), line.size, line.start)

    # -- the results ------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """The numbers of all lines, of those with a good answer, and of those with another one."""
        (total,) = self._db.execute("SELECT COUNT(*) FROM lines").fetchone()
        answered, good = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(good), 0) FROM answers"
        ).fetchone()
        return total, good, answered - good

    def write(self, results: Sequence[LineResult]) -> None:
        """Put all results on the disk before this returns."""
        with transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?)",
                [(result.n, int(result.good), result.line) for result in results],
            )

    def has_given_up(self) -> bool:
        """Whether `give_up` was called, as the window ran out."""
        expired = self._db.execute(
            "SELECT 1 FROM answers WHERE NOT good AND instr(answer, ?) LIMIT 1",
            (f'"code":"{EXPIRED[0]}"'.encode(),),
        )
        return expired.fetchone() is not None

    def give_up(self, code: str, message: str) -> None:
        """Give all lines without a result this error as theirs."""
        while lines := self._db.execute(
            "SELECT n, custom_id FROM lines WHERE n NOT IN (SELECT n FROM answers) LIMIT 1000"
        ).fetchall():
            error = {"code": code, "message": message}
            self.write([LineResult(n, False, line_of(name, None, error)) for n, name in lines])

    def export(self) -> dict[str, Path]:
        """Write the results as files, `output` and `error`, in the lines' order, but for empty ones."""
        paths: dict[str, Path] = {}
        for kind, good in (("output", 1), ("error", 0)):
            path = self._folder / f"{self._batch_id}.{kind}.{uuid.uuid4().hex}"
            results = self._db.execute(
                "SELECT answer FROM answers WHERE good = ? ORDER BY n", (good,)
            )
            try:
                make_private(path)
                with path.open("wb") as file:
                    for (line,) in results:
                        file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                    n_bytes = file.tell()
            except BaseException:
                for unfinished in (path, *paths.values()):
                    unfinished.unlink(missing_ok=True)
                raise
            if n_bytes:
                paths[kind] = path
            else:
                path.unlink()
        return paths


def line_of(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    """A line of an output file. `custom_id` is None for a line that has none."""
    result = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)

"""One batch's lines and answers: a book of its own, which goes when the batch has ended."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from serve_app.ingress.batch.objects import LineError
from serve_app.ingress.http.limits.bodies import MAX_BODY_BYTES

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
"""The error of lines that could not be answered in time."""
MOST_ERRORS = 50
"""So many wrong lines are told of."""
_PREFIX_BYTES = 512
"""Lines are computed in the order of so much of their prompts: those that begin alike, together."""
_TOGETHER = 500
"""Lines that are checked between two pauses, in which others get the interpreter."""
_PAUSE_S = 0.002
_SCHEMA = (
    "CREATE TABLE lines (n INTEGER PRIMARY KEY, custom_id TEXT NOT NULL UNIQUE, start INTEGER NOT NULL, "
    "size INTEGER NOT NULL, prefix BLOB NOT NULL)",
    "CREATE INDEX lines_by_prefix ON lines (prefix, n)",
    "CREATE TABLE answers (n INTEGER PRIMARY KEY, good INTEGER NOT NULL, answer BLOB NOT NULL)",
)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the input file."""

    n: int
    custom_id: str
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """The answer to one line, as a line of the output file, or of the one with errors."""

    n: int
    good: bool
    line: bytes


class BatchJournal:
    """The lines of one batch, and what was answered. One thread at a time.

    An answer is written once, whoever brings it: the first one stays."""

    def __init__(self, folder: Path, batch_id: str, source: Path, endpoint: str) -> None:
        """All lines are for this endpoint; `source` is the batch's input file. Raises OSError and
        sqlite3.Error, like all of this."""
        self._path = folder / f"{batch_id}.sqlite"
        self._folder, self._batch_id, self._endpoint = folder, batch_id, endpoint
        # Kept responses are few, and those of who chats: a batch's would take their places.
        self._always = {"store": False} if endpoint == "/v1/responses" else {}
        self._input = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        self._db = sqlite3.connect(self._path, 30.0, isolation_level=None, check_same_thread=False)

    def close(self) -> None:
        """Keeps what is on the disk."""
        self._db.close()
        os.close(self._input)

    def delete(self) -> None:
        """All of it."""
        self.close()
        for suffix in ("", "-journal"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    # -- the lines --------------------------------------------------------------------------------

    def read(self, max_lines: int) -> list[LineError]:
        """Check all lines and note where they are, unless somebody has. Returns what is wrong."""
        errors: list[LineError] = []
        self._db.execute("BEGIN IMMEDIATE")
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'lines'").fetchone():
            self._db.execute("ROLLBACK")
            return []
        for statement in _SCHEMA:
            self._db.execute(statement)
        n_lines = 0
        for n, start, line in self._raw_lines():
            n_lines += 1
            if n_lines > max_lines:
                errors.append(_wrong("too_many_lines", f"{max_lines} lines are the most.", n))
                break
            found = _check(line, self._endpoint)
            if isinstance(found, LineError):
                errors.append(found.model_copy(update={"line": n}))
            else:
                errors += self._note(n, start, len(line), *found)
            if len(errors) >= MOST_ERRORS:
                break
            if n_lines % _TOGETHER == 0:
                time.sleep(_PAUSE_S)
        if not n_lines:
            errors.append(LineError(code="empty_file", message="The file has no lines."))
        self._db.execute("ROLLBACK" if errors else "COMMIT")
        return errors

    def _note(
        self, n: int, start: int, size: int, custom_id: str, prefix: bytes
    ) -> list[LineError]:
        try:
            self._db.execute(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?)", (n, custom_id, start, size, prefix)
            )
        except sqlite3.IntegrityError:
            told = f"Another line has the custom_id {custom_id!r}."
            return [_wrong("duplicate_custom_id", told, n, "custom_id")]
        return []

    def _raw_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """The number, the place and the bytes of each line that is not blank."""
        start = 0
        with os.fdopen(os.dup(self._input), "rb") as source:
            source.seek(0)
            n = 0
            while line := source.readline(MAX_BODY_BYTES + 1):
                n += 1
                if line.strip():
                    yield n, start, line
                start += len(line)

    def unanswered(self, most: int, after: BatchLine | None = None) -> list[BatchLine]:
        """The next so many lines without an answer, those that begin alike together."""
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
        return [
            BatchLine(n, custom_id, self._body(os.pread(self._input, size, start)))
            for n, custom_id, start, size in rows
        ]

    def _body(self, line: bytes) -> bytes:
        return orjson.dumps(orjson.loads(line)["body"] | self._always)

    # -- the answers ------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Of all lines, of those with a good answer, and of those with another one."""
        (total,) = self._db.execute("SELECT COUNT(*) FROM lines").fetchone()
        answered, good = self._db.execute(
            "SELECT COUNT(*), COALESCE(SUM(good), 0) FROM answers"
        ).fetchone()
        return total, good, answered - good

    def write(self, answers: list[LineResult]) -> None:
        """All of them are on the disk when this returns."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?)",
            [(one.n, int(one.good), one.line) for one in answers],
        )
        self._db.execute("COMMIT")

    def has_given_up(self) -> bool:
        """Whether `give_up` was called, as the window ran out."""
        found = self._db.execute(
            "SELECT 1 FROM answers WHERE NOT good AND instr(answer, ?) LIMIT 1",
            (f'"code":"{EXPIRED[0]}"'.encode(),),
        )
        return found.fetchone() is not None

    def give_up(self, code: str, message: str) -> None:
        """All lines without an answer get this error as theirs."""
        while lines := self._db.execute(
            "SELECT n, custom_id FROM lines WHERE n NOT IN (SELECT n FROM answers) LIMIT 1000"
        ).fetchall():
            error = {"code": code, "message": message}
            self.write([LineResult(n, False, line_of(name, None, error)) for n, name in lines])

    def export(self) -> dict[str, Path]:
        """The answers as files, `output` and `error`, in the order of the lines; those that are empty are
        left out."""
        made = {}
        for kind, good in (("output", 1), ("error", 0)):
            path = self._folder / f"{self._batch_id}.{kind}.{uuid.uuid4().hex}"
            found = self._db.execute(
                "SELECT answer FROM answers WHERE good = ? ORDER BY n", (good,)
            )
            with path.open("wb") as file:
                for (line,) in found:
                    file.write(line)
                file.flush()
                os.fsync(file.fileno())
                n_bytes = file.tell()
            if n_bytes:
                made[kind] = path
            else:
                path.unlink()
        return made


def line_of(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    """A line of an output file. `custom_id` is None for a line that has none."""
    told = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)


def _wrong(code: str, message: str, n: int | None = None, param: str | None = None) -> LineError:
    return LineError(code=code, message=message, param=param, line=n)


def _check(line: bytes, endpoint: str) -> tuple[str, bytes] | LineError:
    """Its `custom_id`, and what its prompt begins with."""
    if len(line) > MAX_BODY_BYTES:
        return _wrong("line_too_long", f"The line has more than {MAX_BODY_BYTES} bytes.")
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _wrong("invalid_json_line", "This line is not parseable as valid JSON.")
    if not isinstance(request, dict):
        return _wrong("invalid_json_line", "The line is not a JSON object.")
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > 512:
        told = "`custom_id` must be a text of 1 to 512 characters."
        return _wrong("invalid_custom_id", told, param="custom_id")
    if request.get("method") != "POST":
        return _wrong("invalid_method", "`method` must be POST.", param="method")
    if request.get("url") != endpoint:
        return _wrong("mismatched_url", f"`url` must be the batch's: {endpoint}.", param="url")
    if not isinstance(body, dict):
        return _wrong("invalid_body", "`body` must be an object.", param="body")
    if body.get("stream"):
        return _wrong("invalid_body", "A batch's line cannot stream.", param="body.stream")
    if body.get("background"):
        told = "A batch's line is waited for: leave out `background`."
        return _wrong("invalid_body", told, param="body.background")
    return custom_id, prefix_of(body)


def prefix_of(body: Mapping[str, Any]) -> bytes:
    """The beginning of a request's prompt: sorted by it, requests that begin alike are neighbours."""
    names = ("model", "tools", "instructions", "messages", "prompt", "input")
    return orjson.dumps([body.get(name) for name in names])[:_PREFIX_BYTES]

"""Parts of the work: read as rows of Ray Data from the input, and written as files of the output.

A part is some lines that are answered together. Its file is written whole or not at all, and a part that is
there is done. So a run that was killed goes on where it was, and a line is there once.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from ray.data.block import Block
from ray.data.datasource import FileBasedDatasource

from serve_app.base.errors import ConfigError
from serve_app.base.folders import sync

FORMATS = (".jsonl", ".ndjson", ".parquet", ".csv")
_ROWS = 1024
_SCHEMA = pyarrow.schema(
    [
        ("name", pyarrow.string()),
        ("lines", pyarrow.list_(pyarrow.binary())),
        ("read", pyarrow.int64()),
    ]
)


class Parts(FileBasedDatasource):
    """Parts of the files, but for those that are done. A row has the part's name, its lines, and the bytes
    that were read for it. A file is read once, and little of it is in memory."""

    def __init__(self, files: Mapping[str, int], n_lines: int, done: Set[str]) -> None:
        """`files` are paths and their numbers; a part has `n_lines` lines, the last one of a file fewer."""
        super().__init__(list(files))
        self._files = dict(files)
        self._n_lines = n_lines
        self._done = frozenset(done)

    def _open_input_source(self, filesystem: Any, path: str, **_: Any) -> pyarrow.NativeFile:
        return filesystem.open_input_file(path)  # Parquet begins at its end

    def _read_stream(self, f: pyarrow.NativeFile, path: str) -> Iterator[Block]:
        number = self._number(path)
        size, before = f.size(), 0
        for n_part, lines in enumerate(split_lines(_lines(f, path), self._n_lines)):
            part = name(number, n_part)
            now = size if f.closed else f.tell()
            read, before = now - before, now
            left = [] if part in self._done else lines
            yield pyarrow.table({"name": [part], "lines": [left], "read": [read]}, schema=_SCHEMA)

    def _number(self, path: str) -> int:
        """The number of the file that pyarrow calls so."""
        found = [n for name, n in self._files.items() if name == path or name.endswith(f"/{path}")]
        return found[0] if found else self._files[f"/{path}"]


def split_lines(lines: Iterable[bytes], n: int) -> Iterator[list[bytes]]:
    rest = iter(lines)
    while part := list(itertools.islice(rest, n)):
        yield part


def _lines(f: pyarrow.NativeFile, path: str) -> Iterator[bytes]:
    if path.endswith(".parquet"):
        batches = pyarrow.parquet.ParquetFile(f).iter_batches(_ROWS)
        yield from itertools.chain.from_iterable(map(_dump, batches))
    elif path.endswith(".csv"):
        yield from itertools.chain.from_iterable(map(_dump, pyarrow.csv.open_csv(f)))
    else:
        yield from filter(None, (line.strip() for line in _split(f)))


def _split(f: pyarrow.NativeFile) -> Iterator[bytes]:
    rest = b""
    while chunk := f.read(1 << 20):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def _dump(batch: pyarrow.RecordBatch) -> Iterator[bytes]:
    rows: Sequence[dict[str, Any]] = batch.to_pylist()
    return (orjson.dumps(row, default=str) for row in rows)


_ABOUT = "job.json"


def name(n_file: int, n_part: int) -> str:
    """File name of a part of an input file. Names sort as the input."""
    return f"part-{n_file:05d}-{n_part:07d}.jsonl"


def begin(folder: Path, about: Mapping[str, Any]) -> set[str]:
    """The parts that are there from an earlier run of the same work, which `about` describes. Raises
    ConfigError if the folder holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    book, text = folder / _ABOUT, json.dumps(about, indent=1, sort_keys=True) + "\n"
    if book.exists():
        if book.read_text() != text:
            raise ConfigError(
                f"{folder} holds the output of other work: {book} says which. Name another folder, or "
                "delete this one."
            )
    elif any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and this command did not make it.")
    else:
        write(book, text.encode())
    for half in folder.glob(".part-*"):
        half.unlink(missing_ok=True)
    return {path.name for path in folder.glob("part-*.jsonl")}


def join(folder: Path, file: Path) -> None:
    with _replacing(file) as joined:
        for path in sorted(folder.glob("part-*.jsonl")):
            with path.open("rb") as part:
                shutil.copyfileobj(part, joined)


def write(path: Path, content: bytes) -> None:
    """Write a file, which is on the disk when this returns."""
    with _replacing(path) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which has the path's name at the end, whole, also after the power fails."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    with half.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    sync(path.parent)

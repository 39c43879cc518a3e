"""Ray Data's reading of the input: each row is a part, some lines of JSON that are answered together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import orjson
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from ray.data.block import Block
from ray.data.datasource import FileBasedDatasource

from serve_app.batch import parts

FORMATS = (".jsonl", ".ndjson", ".parquet", ".csv")
_ROWS = 1024
"""Rows of Parquet that are read at once."""
_SCHEMA = pyarrow.schema(
    [
        ("name", pyarrow.string()),
        ("lines", pyarrow.list_(pyarrow.binary())),
        ("read", pyarrow.int64()),
    ]
)


class Parts(FileBasedDatasource):
    """Parts of the files, but for those that are done. A row has the part's name, its lines, and how many
    bytes of the input were read for it. A file is read once, from its beginning to its end, and little of
    it is in memory."""

    def __init__(self, files: Mapping[str, int], n_lines: int, done: Set[str]) -> None:
        """`files` are paths and their numbers; a part has `n_lines` lines, the last one of a file fewer."""
        super().__init__(list(files))
        self._files = dict(files)
        self._n_lines = n_lines
        self._done = frozenset(done)

    def _open_input_source(self, filesystem: Any, path: str, **_: Any) -> pyarrow.NativeFile:
        """Parquet begins at its end."""
        return filesystem.open_input_file(path)

    def _read_stream(self, f: pyarrow.NativeFile, path: str) -> Iterator[Block]:
        number = self._number(path)
        size, before = f.size(), 0
        for n_part, lines in enumerate(batched(_lines(f, path), self._n_lines)):
            name = parts.name(number, n_part)
            now = size if f.closed else f.tell()
            read, before = now - before, now
            wanted = [] if name in self._done else lines
            yield pyarrow.table({"name": [name], "lines": [wanted], "read": [read]}, schema=_SCHEMA)

    def _number(self, path: str) -> int:
        """The number of the file that pyarrow calls so."""
        found = [n for name, n in self._files.items() if name == path or name.endswith(f"/{path}")]
        return found[0] if found else self._files[f"/{path}"]


def batched(lines: Iterable[bytes], n: int) -> Iterator[list[bytes]]:
    """So many at a time, and the rest."""
    rest = iter(lines)
    while part := list(itertools.islice(rest, n)):
        yield part


def _lines(f: pyarrow.NativeFile, path: str) -> Iterator[bytes]:
    """The rows of a file as JSON."""
    if path.endswith(".parquet"):
        batches = pyarrow.parquet.ParquetFile(f).iter_batches(_ROWS)
        yield from itertools.chain.from_iterable(map(_dumped, batches))
    elif path.endswith(".csv"):
        yield from itertools.chain.from_iterable(map(_dumped, pyarrow.csv.open_csv(f)))
    else:
        yield from filter(None, (line.strip() for line in _split(f)))


def _split(f: pyarrow.NativeFile) -> Iterator[bytes]:
    """Lines of text, without what ends them."""
    rest = b""
    while chunk := f.read(1 << 20):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def _dumped(batch: pyarrow.RecordBatch) -> Iterator[bytes]:
    rows: Sequence[dict[str, Any]] = batch.to_pylist()
    return (orjson.dumps(row, default=str) for row in rows)

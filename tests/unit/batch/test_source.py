"""The input of a batch without a server: the same rows from every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet
import pytest

from serve_app.batch import source

ROWS: list[dict[str, Any]] = [{"n": n, "text": f"Grüße {n}"} for n in range(2000)]


@pytest.fixture(params=source.FORMATS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"in{request.param}"
    table = pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_bytes(b"\r\n\n".join(map(orjson.dumps, ROWS)))
    return path


def test_rows_of_every_format(file: Path) -> None:
    with pyarrow.fs.LocalFileSystem().open_input_file(str(file)) as opened:
        found = [orjson.loads(line) for line in source._lines(opened, str(file))]
    assert found == ROWS


def test_parts_have_so_many_lines() -> None:
    lines = [b"%d" % n for n in range(5)]
    assert list(source.batched(lines, 2)) == [lines[:2], lines[2:4], lines[4:]]
    assert list(source.batched([], 2)) == []

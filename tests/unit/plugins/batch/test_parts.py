"""Parts of the input and of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet
import pytest

from serve_app.base.errors import ConfigError
from serve_app.plugins.batch import parts


def test_parts_that_are_there_are_done(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert parts.begin(folder, {"a": 1}) == set()
    parts.write(folder / parts.name(0, 0), b"x\n")
    (folder / ".part-00000-0000001.jsonl.77").write_bytes(b"half")
    assert parts.begin(folder, {"a": 1}) == {"part-00000-0000000.jsonl"}
    assert sorted(path.name for path in folder.iterdir()) == [
        "job.json",
        "part-00000-0000000.jsonl",
    ]


def test_other_work_is_not_mixed_in(tmp_path: Path) -> None:
    parts.begin(tmp_path / "out", {"a": 1})
    with pytest.raises(ConfigError, match="the output of other work"):
        parts.begin(tmp_path / "out", {"a": 2})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        parts.begin(tmp_path / "mine", {"a": 1})


def test_joined_in_the_order_of_the_input(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    parts.begin(folder, {})
    for n_file, n_part in ((1, 0), (0, 10), (0, 2)):
        parts.write(folder / parts.name(n_file, n_part), f"{n_file} {n_part}\n".encode())
    parts.join(folder, tmp_path / "all.jsonl")
    assert (tmp_path / "all.jsonl").read_text() == "0 2\n0 10\n1 0\n"


ROWS: list[dict[str, Any]] = [{"n": n, "text": f"Grüße {n}"} for n in range(2000)]


@pytest.fixture(params=parts.FORMATS)
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
        found = [orjson.loads(line) for line in parts._lines(opened, str(file))]
    assert found == ROWS


def test_parts_have_so_many_lines() -> None:
    lines = [b"%d" % n for n in range(5)]
    assert list(parts.split_lines(lines, 2)) == [lines[:2], lines[2:4], lines[4:]]
    assert list(parts.split_lines([], 2)) == []

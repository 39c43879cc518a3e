"""The output of a batch without a server: parts, each whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.batch import parts
from serve_app.errors import ConfigError


def test_parts_that_are_there_are_done(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert parts.begin(folder, {"a": 1}) == set()
    parts.write(folder, parts.name(0, 0), b"x\n")
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
        parts.write(folder, parts.name(n_file, n_part), f"{n_file} {n_part}\n".encode())
    parts.join(folder, tmp_path / "all.jsonl")
    assert (tmp_path / "all.jsonl").read_text() == "0 2\n0 10\n1 0\n"

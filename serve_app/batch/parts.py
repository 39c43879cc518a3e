"""The output: a folder with a file for each part of the input, each written whole or not at all.

A part that is there is done. So a run that was killed goes on where it was, and a line is there once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.errors import ConfigError

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
        _put(book, text.encode())
    for half in folder.glob(".part-*"):
        half.unlink(missing_ok=True)
    return {path.name for path in folder.glob("part-*.jsonl")}


def write(folder: Path, part: str, lines: bytes) -> None:
    """One part. On the disk when this returns."""
    _put(folder / part, lines)


def join(folder: Path, file: Path) -> None:
    """All parts, in order, as one file."""
    half = file.with_name(f".{file.name}.{os.getpid()}")
    with half.open("wb") as joined:
        for path in sorted(folder.glob("part-*.jsonl")):
            with path.open("rb") as part:
                shutil.copyfileobj(part, joined)
        joined.flush()
        os.fsync(joined.fileno())
    _take_place(half, file)


def _put(path: Path, content: bytes) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}")
    with half.open("wb") as written:
        written.write(content)
        written.flush()
        os.fsync(written.fileno())
    _take_place(half, path)


def _take_place(half: Path, path: Path) -> None:
    """Have the file's name, also after the power fails."""
    half.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Files of other formats, made by llama.cpp's own function and kept for the next time."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.llama.quantising import quantise
from serve_app.measure.benchmark import BenchmarkError

LIMIT_S = 3600


def target(source: Path, format_name: str, folder: Path) -> Path:
    """Where the source's file of this format is or will be. The name tells path, size and time."""
    about = source.stat()
    told = f"{source.resolve()}\0{about.st_size}\0{about.st_mtime_ns}"
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    return folder / f"{source.stem}-{digest}-{format_name}.gguf"


def quantised(source: Path, format_name: str, folder: Path, threads: int) -> Path:
    """The source's file of this format; made if it is not there yet. Raises BenchmarkError where llama.cpp
    cannot make it. Runs in a process of its own, as llama.cpp may end the one that asks."""
    made = target(source, format_name, folder)
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(f".{os.getpid()}.part")
    process = multiprocessing.get_context("spawn").Process(
        target=_quantise, args=(source, part, format_name, threads)
    )
    try:
        process.start()
        process.join(LIMIT_S)
        if process.exitcode != 0:
            raise BenchmarkError(f"llama.cpp cannot make {format_name} of {source.name}.")
        part.rename(made)
    finally:
        if process.is_alive():
            process.kill()
        part.unlink(missing_ok=True)
    return made


def _quantise(source: Path, to: Path, format_name: str, threads: int) -> None:
    """Over there. A source that is quantised already loses a second time: the table shows how much."""
    try:
        quantise(source, to, format_name, threads=threads)
    except ConfigError:
        os._exit(1)
    os._exit(0)

"""An engine in a process of its own, which is asked by calls that are sent there."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from serve_app.engine import Engine, EngineOptions

_engine: Engine | None = None


def started(model: Path, options: EngineOptions) -> ProcessPoolExecutor:
    """A new process; what is submitted runs there and finds `engine()`."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _open, (model, options))


def engine() -> Engine:
    """The engine of this process. Raises RuntimeError if it has none."""
    if _engine is None:
        raise RuntimeError("The process has no engine.")
    return _engine


def _open(model: Path, options: EngineOptions) -> None:
    global _engine
    _engine = Engine.load(model, options)

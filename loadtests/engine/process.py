"""Opens an engine, or what else is measured, in a process of its own, and sends it calls.

Processes have a peak of memory of their own, and threads: libgomp counts every thread that a process ever
started a team from; once there are more than cores, all of its teams sleep at every barrier instead of
spinning.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.engine import Engine, EngineOptions

_opened: Any = None


def started(model: Path, options: EngineOptions) -> ProcessPoolExecutor:
    """A new process with an engine; what is submitted runs there and finds `engine()`."""
    return started_with(Engine.load, model, options)


def started_with(open_one: Callable[..., object], *arguments: object) -> ProcessPoolExecutor:
    """A new process that has called this first; what is submitted runs there, on its one thread, and finds
    what was returned as `opened()`."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _open, (partial(open_one, *arguments),))


def engine() -> Engine:
    """The engine of this process. Raises RuntimeError if it has none."""
    if not isinstance(_opened, Engine):
        raise RuntimeError("The process has no engine.")
    return _opened


def opened() -> Any:
    """The files that this process has opened; None if nothing."""
    return _opened


def _open(open_one: Callable[[], object]) -> None:
    global _opened
    _opened = open_one()

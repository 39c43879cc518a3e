"""Processes of a server from outside: whether one that does not answer works, or hangs."""

from __future__ import annotations

import asyncio
import ctypes
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

BUSY_TIMES = 10
"""A process that works without a word gets so many times the time of one that does nothing."""
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_busy(pid: int) -> bool:
    """Whether a thread of the process computes, or waits for a processor or a disk. A stopped process is
    not busy. Source: proc(5), `stat`. Any thread."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if thread.read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                return True
    return False


async def answers(answer: asyncio.Future[Any], pid: int, timeout_s: float) -> bool:
    """Wait for a process's answer. Returns False once the process has been silent for so many seconds. A
    busy one has ten times as many: it may load a model, or get no processor.

    Time counts as far as this has looked: who waits may have been stopped, too. Cancelling this does not
    cancel the answer.
    """
    look_s, silent_s = min(_LOOK_S, timeout_s / 4), 0.0
    while not answer.done():
        if silent_s >= timeout_s:
            return False
        await asyncio.wait([answer], timeout=look_s)
        if not answer.done():
            silent_s += look_s / BUSY_TIMES if is_busy(pid) else look_s
    return True

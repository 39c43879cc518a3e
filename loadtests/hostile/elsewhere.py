"""Processes that compute as if they were on other machines.

An attacker gets what others leave of the processors, and honest users get the processors first: what they
wait for is then the server.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FIRST, LAST = -20, 19
"""The niceness of honest users, and of attackers."""
_PART = 2**16


def call(function: Callable[[], T], seconds: float) -> T | None:
    """The function's result in such a process; None if it takes longer, and is ended, or dies.

    Attackers compute, too: on their own machines, and not on the server's."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _do(function, writing)
    os.close(writing)
    try:
        told = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may have no group of its own yet
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return None if told is None else pickle.loads(told)


def _do(function: Callable[[], Any], writing: int) -> None:
    try:
        os.setsid()
        set_niceness(LAST)
        told = memoryview(pickle.dumps(function()))
        while told:
            told = told[os.write(writing, told) :]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def set_niceness(niceness: int) -> None:
    """Set the niceness of this process, which has a session of its own, as far as the kernel allows. Linux
    may share processors among sessions first, and by niceness only within one: sched(7)."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with suppress(OSError):  # it may not have that
        Path("/proc/self/autogroup").write_text(str(niceness))


def _read(fd: int, until: float) -> bytes | None:
    """All that comes until the other end is closed."""
    read = bytearray()
    while select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(fd, _PART)
        if not part:
            return bytes(read) or None
        read += part
    return None

"""A server's processes from outside: which of them serve others, which have died, what memory they take."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loadtests.common.processes import command_line, rollup_kib, tagged

SERVING = ("ServeReplica", "ProxyActor", "ServeController", "raylet", "gcs_server")
"""Parts of the names of processes that serve all requests."""
SAMPLE_EVERY_S = 0.4
_LARGE_KIB = 2**19
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Memory:
    """MiB of all processes together: see `memory_mib`."""

    before: float
    most: float


def serving(directory: Path) -> dict[int, str]:
    """The processes that serve others, with their names. One that such a process has started, and that
    bears its name, is a worker of its own and does not count."""
    named = {pid: command_line(pid) for pid in tagged(directory)}
    titles = {pid: _title(line) for pid, line in named.items()}
    return {
        pid: title
        for pid, title in titles.items()
        if title and titles.get(_parent(pid), "") != title
    }


def died(before: Mapping[int, str], after: Mapping[int, str]) -> list[str]:
    """The names of the processes that are not there any more."""
    return sorted(name for pid, name in before.items() if pid not in after)


def memory_mib(directory: Path) -> float:
    """The memory of all of its processes. Each one's own pages count, as a forked one shares most with its
    parent. Of a large one, all that is resident counts: asking for its own would hold it up."""
    total = 0.0
    for pid in tagged(directory):
        with suppress(OSError):
            resident = _resident_kib(pid)
            total += resident if resident > _LARGE_KIB else rollup_kib(pid, "Private_")
    return total / 2**10


def _resident_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**10


@contextmanager
def measured(directory: Path) -> Iterator[Memory]:
    """The memory from here on, looked at until the end of the block."""
    now = memory_mib(directory)
    memory, over = Memory(now, now), threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_EVERY_S):
            memory.most = max(memory.most, memory_mib(directory))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield memory
    finally:
        over.set()
        looking.join()
        memory.most = max(memory.most, memory_mib(directory))


def _title(line: str) -> str:
    """A short name of a process that serves others; empty for all others."""
    program = line.split(" ", 1)[0]
    if not any(name in program for name in SERVING):
        return ""
    return program.rpartition("/")[2].removeprefix("ray::").removeprefix("ServeReplica:")


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])

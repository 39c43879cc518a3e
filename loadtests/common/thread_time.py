"""CPU time of a server's threads: of those that compute the model, and of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ThreadTimes = Mapping[tuple[int, int], float]
"""CPU seconds of threads, by the ids of process and thread."""


def thread_times(pids: Sequence[int]) -> ThreadTimes:
    """CPU seconds of all threads of these processes so far. Source: the kernel's "sched-stats.rst"."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    ran_ns = int((task / "schedstat").read_text().split()[0])
                    found[pid, int(task.name)] = ran_ns / 1e9
    return found


def beside_compute_s(before: ThreadTimes, after: ThreadTimes, n_compute: int) -> float:
    """CPU seconds between two looks of all threads but those that compute the model: the `n_compute`
    busiest of the busiest process. A thread that is not in `before` began after it."""
    spent = {one: seconds - before.get(one, 0.0) for one, seconds in after.items()}
    by_process: dict[int, list[float]] = {}
    for (pid, _), seconds in spent.items():
        by_process.setdefault(pid, []).append(seconds)
    busiest = max(by_process.values(), key=sum, default=[])
    return sum(spent.values()) - sum(sorted(busiest, reverse=True)[:n_compute])

"""Pins a replica to cores of its own, if it can have them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.placement import leases, topology
from serve_app.placement.leases import CoreLease
from serve_app.placement.machine import cpu_quota


@dataclass(frozen=True, slots=True)
class Place:
    """The outcome of `settle`."""

    lease: CoreLease | None
    """What the process is pinned to; None if it runs wherever the kernel puts it."""
    report: str
    """One line about that, with the reason if there is no lease."""

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The leased CPUs, if there is a lease."""
        return None if self.lease is None else self.lease.cpus

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that has all leased CPUs."""
        return None if self.lease is None else self.lease.numa_node


def unpinned(reason: str) -> Place:
    """Anywhere."""
    return Place(None, f"not pinned to cores: {reason}")


def settle(reserved: float, folder: Path, root: Path = Path("/")) -> Place:
    """Lease as many CPUs as are reserved for this process and pin all its threads to them; those that
    start later inherit that. Memory follows: the kernel takes a page from the node of the thread that
    first touches it. No lease is not an error: CPUs that are not its own are left to the kernel then."""
    if reserved < 1 or reserved != int(reserved):
        return unpinned(f"{reserved:g} CPUs are reserved for it, which are no whole cores")
    machine, quota = topology.read(root), cpu_quota(root)
    if quota is not None and quota < len(machine.cpus):
        return unpinned(
            f"it has a CPU quota of {quota:g} cores on {len(machine.cpus)} that others use, too"
        )
    try:
        lease = leases.take(machine, int(reserved), folder)
    except OSError as error:
        return unpinned(f"there can be no leases in {folder} ({error})")
    if lease is None:
        return unpinned(f"fewer than {reserved:g} of {len(machine.cpus)} cores are free")
    try:
        _pin(lease.cpus)
    except OSError as error:
        lease.release()
        return unpinned(f"the kernel refuses ({error})")
    node = "" if lease.numa_node is None else f" of NUMA node {lease.numa_node}"
    return Place(lease, f"pinned to cores {', '.join(map(str, lease.cpus))}{node}, its own")


def _pin(cpus: Iterable[int]) -> None:
    """Every thread of this process; sched_setaffinity(2) is for one thread."""
    mask = set(cpus)
    os.sched_setaffinity(0, mask)  # first, so that threads that start meanwhile have it
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), mask)

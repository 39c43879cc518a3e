"""Pins a replica to cores of its own, if it can have them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.placement import leases
from serve_app.placement.leases import CoreLease
from serve_app.placement.machine import Machine, read
from serve_app.placement.topology import list_cpus


@dataclass(frozen=True, slots=True)
class CorePinning:
    """The cores that this process is pinned to, if any."""

    lease: CoreLease | None
    """The cores that the process is pinned to; None if it runs wherever the kernel puts it."""
    report: str
    """One line about that, with the reason if there is no lease."""
    cpus_before: tuple[int, ...] = ()
    """The CPUs that the process had before it was pinned."""

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The leased CPUs, if there is a lease."""
        return None if self.lease is None else self.lease.cpus

    @property
    def one_of_each(self) -> tuple[int, ...] | None:
        """One leased CPU for each physical core."""
        return None if self.lease is None else self.lease.one_of_each

    @property
    def numa_node(self) -> int | None:
        """The NUMA node that has all leased CPUs."""
        return None if self.lease is None else self.lease.numa_node

    def undo(self) -> None:
        """Give the lease back, and run anywhere again. Not twice."""
        if self.lease is not None:
            self.lease.release()
            _set_affinity(self.cpus_before)


def unpinned(reason: str) -> CorePinning:
    """A process that runs wherever the kernel puts it."""
    return CorePinning(None, f"not pinned to cores: {reason}")


def pin(
    reserved: float, folder: Path, machine: Machine | None = None, *, spread: bool = False
) -> CorePinning:
    """Lease as many CPUs as are reserved for this process and pin all its threads to them; those that
    start later inherit that. Default: of this machine. For `spread`, see `leases.choose`. Memory follows:
    the kernel takes a page from the node of the thread that first touches it. No lease is not an error:
    CPUs that are not its own are left to the kernel then."""
    if reserved < 1 or reserved != int(reserved):
        return unpinned(f"num_cpus is {reserved:g}, which is not a whole number of cores")
    here = machine or read()
    cpus, quota = here.topology.cpus, here.quota
    if quota is not None:
        return unpinned(
            f"it has a CPU quota of {quota:g} cores, on {len(cpus)} cores that others use too"
        )
    try:
        lease = leases.take(here.topology, int(reserved), folder, spread=spread)
    except OSError as error:
        return unpinned(f"leases cannot be kept in {folder} ({error})")
    if lease is None:
        return unpinned(f"fewer than {reserved:g} of {len(cpus)} cores are free")
    before = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    try:
        _set_affinity(lease.cpus)
    except OSError as error:
        lease.release()
        return unpinned(f"the kernel does not allow it ({error})")
    where = f"{list_cpus(lease.cpus)}{_node(here, lease)}"
    return CorePinning(lease, f"pinned to cores {where}, which no other replica uses", before)


def _node(here: Machine, lease: CoreLease) -> str:
    if len(here.topology.nodes) < 2:
        return ""
    if lease.numa_node is not None:
        return f" of NUMA node {lease.numa_node}"
    return f" of several NUMA nodes (no node has {len(lease.cpus)} free)"


def _set_affinity(cpus: Iterable[int]) -> None:
    """Every thread of this process; sched_setaffinity(2) is for one thread."""
    if not hasattr(os, "sched_setaffinity"):
        raise OSError("it has no affinity masks")
    mask = set(cpus)
    os.sched_setaffinity(0, mask)  # first, so that threads that start meanwhile have it
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), mask)

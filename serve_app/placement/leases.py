"""Core leases: sets of CPUs on this node that belong to one process each.

A lease is an flock(2) on one file for each CPU: the kernel drops it with the process, however that ends.
Files are never removed, or two processes could lock different files of one name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from serve_app.placement.topology import PhysicalCore, Topology


@dataclass(frozen=True, slots=True)
class CoreLease:
    """CPUs that nobody else leases while this process lives, or until it is released."""

    cpus: tuple[int, ...]
    """Ascending."""
    one_of_each: tuple[int, ...]
    """One of these CPUs for each physical core; ascending."""
    numa_node: int | None
    """The node that has all of them, if one has and the kernel tells."""
    _locks: tuple[int, ...]
    """File descriptors that hold the locks; not inherited over exec."""

    def release(self) -> None:
        """Give the CPUs back. Not twice."""
        for descriptor in self._locks:
            os.close(descriptor)


def default_folder() -> Path:
    """Where this user's processes on this node keep the lock files: memory that no other node sees."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "corral" if runtime else Path(f"/dev/shm/corral-{os.getuid()}")
    return base / "cores"


def take(topology: Topology, n: int, folder: Path, *, spread: bool = False) -> CoreLease | None:
    """Lease `n` CPUs; None if fewer are free. See `choose`. Processes that take at the same time do it one
    after the other. Raises OSError if the folder is not ours alone, or cannot be used."""
    make_private(folder)
    choosing = _locked(folder / "choosing", wait=True)
    try:
        free = {cpu for cpu in topology.cpus if _is_free(folder / str(cpu))}
        cpus = choose(topology, free, n, spread=spread)
        if cpus is None:
            return None
        # Free a moment ago, and whoever wants one now waits for this one.
        locks = tuple(_locked(folder / str(cpu), wait=True) for cpu in cpus)
        of_all = set(cpus)
        return CoreLease(cpus, topology.one_of_each(of_all), topology.node_of(of_all), locks)
    finally:
        os.close(choosing)


def choose(
    topology: Topology, free: Set[int], n: int, *, spread: bool = False
) -> tuple[int, ...] | None:
    """`n` of the free CPUs, ascending, or None. Pure.

    Of one NUMA node if one has as many: the one with most idle physical cores, as each node has memory
    bandwidth of its own. Whole idle physical cores first, so that nobody else computes on their other
    hyper-threads, then those beside somebody else's. With `spread`, which is for as many threads as CPUs,
    one hyper-thread of each idle physical core first.
    """
    nodes = [[core for core in topology.cores if core.node == node] for node in topology.nodes]
    nodes.sort(key=lambda cores: (-len(_idle(cores, free)), -_n_free(cores, free)))
    fitting = [cores for cores in nodes if _n_free(cores, free) >= n]
    pool = fitting[0] if fitting else [core for cores in nodes for core in cores]
    chosen = _by_preference(pool, free, spread)[:n]
    return tuple(sorted(chosen)) if len(chosen) == n else None


def _by_preference(cores: Sequence[PhysicalCore], free: Set[int], spread: bool) -> list[int]:
    idle = _idle(cores, free)
    of_idle = [cpu for core in idle for cpu in core.cpus]
    if spread:
        first = {core.cpus[0] for core in idle}
        of_idle.sort(key=lambda cpu: cpu not in first)
    beside_others = [cpu for core in cores if core not in idle for cpu in core.cpus if cpu in free]
    return of_idle + beside_others


def _idle(cores: Sequence[PhysicalCore], free: Set[int]) -> list[PhysicalCore]:
    return [core for core in cores if free >= {*core.cpus}]


def _n_free(cores: Sequence[PhysicalCore], free: Set[int]) -> int:
    return sum(cpu in free for core in cores for cpu in core.cpus)


def make_private(folder: Path) -> None:
    """Have a folder that is this user's alone: where everybody may write, somebody else may have been
    first. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user.")


def _is_free(path: Path) -> bool:
    try:
        os.close(_locked(path, wait=False))
    except BlockingIOError:
        return False
    return True


def _locked(path: Path, *, wait: bool) -> int:
    """An open file descriptor with the file's lock. Raises BlockingIOError if it must not wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

"""A replica's place on its node: the cores that it leases, alone or in turns, and its threads.

A lease is an flock(2) on one file for each CPU: the kernel drops it with the process, however that ends.
Files are never removed, or two processes could lock different files of one name.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX
from pathlib import Path

from serve_app.base.errors import ConfigError
from serve_app.base.sharing.locks import is_locked, lock, make_private
from serve_app.config.resolved import ResolvedModel
from serve_app.run.placement import machine, plan

logger = logging.getLogger("corral.replica")

# Processes that share the CPUs of a place, at most, and characters of a list of CPUs in a file's name.
_MOST_SEATS, _LONGEST_NAME = 64, 51


@dataclass(frozen=True, slots=True)
class CoreLease:
    """CPUs that nobody else leases while this process lives, or until it is released."""

    cpus: tuple[int, ...]
    one_of_each: tuple[int, ...]
    """The lowest of these CPUs on each physical core; ascending."""
    numa_node: int | None
    """The node that has all of them, if one has and the kernel tells."""
    _locks: tuple[int, ...]
    """File descriptors that hold the locks; not inherited over exec."""

    def release(self) -> None:
        """Give the CPUs back. Not twice."""
        for descriptor in self._locks:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class CorePinning:
    """The cores that this process is pinned to, if any."""

    lease: CoreLease | None
    """The cores that the process is pinned to; None if it runs wherever the kernel puts it."""
    report: str
    cpus_before: tuple[int, ...] = ()

    @property
    def cores(self) -> tuple[int, ...] | None:
        return None if self.lease is None else self.lease.cpus

    @property
    def numa_node(self) -> int | None:
        return None if self.lease is None else self.lease.numa_node

    def undo(self) -> None:
        """Give the lease back, and run anywhere again. Not twice."""
        if self.lease is not None:
            self.lease.release()
            _set_affinity(self.cpus_before)


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """The CPUs and threads of a replica."""

    pinning: CorePinning
    threads: int
    reason: str
    """The reason for that number, in one line."""
    computing_cpus: tuple[int, ...] | None
    """The CPUs that the computing threads keep to; None: all that the process may use."""
    turns: Path | None = None
    """The file of those that compute on the same CPUs: see `serve_app.base.sharing.turns`. None: threads
    are configured."""


def place_on_cpus(
    model: ResolvedModel, reserved: float, here: machine.Machine | None = None
) -> CpuPlacement:
    """A replica's place on its node, by default this one, and its threads, with so many reserved CPUs.
    Before anything starts threads: they inherit the place. Raises ConfigError for more threads than
    CPUs."""
    here = here or machine.read_machine()
    reserved = model.place_cpus or reserved
    n_cores = plan.n_cores(here, reserved)
    most = max(model.threads or n_cores, model.options.threads_batch or 0)
    complaint = machine.oversubscription(
        most,
        machine.own_cpus(here, reserved),
        "all that this replica may use (affinity mask, CPU quota, num_cpus)",
    )
    if complaint:
        raise ConfigError(f"models ({model.id}): {complaint}")
    if model.place_cpus:
        pinning = share(model.place_cpus, default_folder(), here)
    else:
        pinning = _pinning(model, reserved, here, spread=most > n_cores)
    if pinning.lease is not None:
        n_cores = len(pinning.lease.one_of_each)
    if model.threads is not None:
        return CpuPlacement(pinning, model.threads, "as configured", _computing(pinning, most))
    reason = _reason(here, pinning, reserved)
    computing = _computing(pinning, max(most, n_cores))
    return CpuPlacement(pinning, n_cores, reason, computing, _file_of_turns(pinning, here))


def _pinning(
    model: ResolvedModel, reserved: float, here: machine.Machine, *, spread: bool
) -> CorePinning:
    numa = model.options.numa
    if numa is not None and len(here.topology.nodes) == 1:
        logger.info("Model %s: engine.numa has no effect: there is one NUMA node.", model.id)
    elif numa in ("distribute", "isolate"):
        return _no_pinning(f"engine.numa: {numa} places its threads")
    return pin(reserved, default_folder(), here, spread=spread)


def _computing(pinning: CorePinning, threads: int) -> tuple[int, ...] | None:
    """The CPUs to compute on: one hyper-thread of each leased core, if that is enough. The kernel cannot
    put two threads on a core then, and the other hyper-threads are left to the rest of the process."""
    alone = () if pinning.lease is None else pinning.lease.one_of_each
    return alone if alone != pinning.cores and 0 < threads <= len(alone) else None


def shared_cores() -> tuple[int, Path]:
    """The physical cores of this machine, and the file of those that compute on all of them in turns."""
    here = machine.read_machine()
    return here.n_cores, _file_of_turns(_no_pinning(""), here)


def _file_of_turns(pinning: CorePinning, here: machine.Machine) -> Path:
    """The file of those that compute on the same CPUs, also in other servers of this user."""
    cpus = here.topology.cpus if pinning.cores is None else pinning.cores
    name = machine.list_cpus(cpus).replace(", ", "_")
    if len(name) > _LONGEST_NAME:  # lists that begin alike are not the same
        name = f"{name[:_LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return default_folder().parent / "turns" / name


def _reason(here: machine.Machine, pinning: CorePinning, reserved: float) -> str:
    if here.quota is not None:
        n_all = len(here.topology.cpus)
        return f"its part of a CPU quota of {here.quota:g} cores, on {n_all} that others use too"
    n_cpus = machine.own_cpus(here, reserved) if pinning.cores is None else len(pinning.cores)
    return f"one for each physical core of its {n_cpus} CPU{'s' * (n_cpus > 1)}"


def pin(
    reserved: float, folder: Path, here: machine.Machine | None = None, *, spread: bool = False
) -> CorePinning:
    """Lease as many CPUs as are reserved for this process and pin all its threads to them; those that
    start later inherit that. Default: of this machine. For `spread`, see `choose`. Memory follows:
    the kernel takes a page from the node of the thread that first touches it. No lease is not an error:
    CPUs that are not its own are left to the kernel then."""
    if reserved < 1 or reserved != int(reserved):
        return _no_pinning(f"num_cpus is {reserved:g}, which is not a whole number of cores")
    here = here or machine.read_machine()
    cpus, quota = here.topology.cpus, here.quota
    if quota is not None:
        return _no_pinning(
            f"it has a CPU quota of {quota:g} cores, on {len(cpus)} cores that others use too"
        )
    try:
        lease = take(here.topology, int(reserved), folder, spread=spread)
    except OSError as error:
        return _no_pinning(f"leases cannot be kept in {folder} ({error})")
    if lease is None:
        return _no_pinning(f"fewer than {reserved:g} of {len(cpus)} cores are free")
    node = ""
    if len(here.topology.nodes) > 1 and lease.numa_node is not None:
        node = f" of NUMA node {lease.numa_node}"
    elif len(here.topology.nodes) > 1:
        node = f" of several NUMA nodes (no node has {len(lease.cpus)} free)"
    where = f"{machine.list_cpus(lease.cpus)}{node}"
    return _pin_to(lease, f"pinned to cores {where}, which no other replica uses")


def _pin_to(lease: CoreLease, report: str) -> CorePinning:
    """Pin all threads to the CPUs of that lease, which is released if the kernel does not allow it."""
    before = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    try:
        _set_affinity(lease.cpus)
    except OSError as error:
        lease.release()
        return _no_pinning(f"the kernel does not allow it ({error})")
    return CorePinning(lease, report, before)


def share(n: int, folder: Path, here: machine.Machine) -> CorePinning:
    """Pin this process to a place of `n` CPUs, of those that the machine has: where fewest others are. They
    compute in turns."""
    topology = here.topology
    if here.quota is not None:
        return _no_pinning(f"its models share a CPU quota of {here.quota:g} cores in turns")
    try:
        place, seat = _take_seat(_places(topology, n), folder)
    except OSError as error:
        return _no_pinning(f"places cannot be kept in {folder} ({error})")
    of_all = set(place)
    lease = CoreLease(place, topology.one_of_each(of_all), topology.node_of(of_all), (seat,))
    return _pin_to(lease, f"on cores {machine.list_cpus(place)} in turns with others")


def _places(topology: machine.Topology, n: int) -> list[tuple[int, ...]]:
    """Places of `n` CPUs, whole physical cores of one NUMA node each as far as there are any. Pure."""
    left, places = set(topology.cpus), list[tuple[int, ...]]()
    while len(left) >= n and (cpus := choose(topology, left, n)) is not None:
        places.append(cpus)
        left -= set(cpus)
    return places or [topology.cpus]


def _take_seat(places: Sequence[tuple[int, ...]], folder: Path) -> tuple[tuple[int, ...], int]:
    """The place with the fewest processes, and the descriptor that holds a seat there. Raises OSError."""
    make_private(folder)
    choosing = lock(folder / "choosing", LOCK_EX)
    try:
        for seat in range(_MOST_SEATS):
            for place in places:
                path = folder / f"seat-{place[0]}-{seat}"
                if not is_locked(path):
                    return place, lock(path, LOCK_EX)
    finally:
        os.close(choosing)
    raise OSError(f"each has {_MOST_SEATS} processes")


def _no_pinning(reason: str) -> CorePinning:
    return CorePinning(None, f"not pinned to cores: {reason}")


def _set_affinity(cpus: Iterable[int]) -> None:
    """Place every thread of this process; sched_setaffinity(2) is for one thread."""
    if not hasattr(os, "sched_setaffinity"):
        raise OSError("it has no affinity masks")
    mask = set(cpus)
    os.sched_setaffinity(0, mask)  # first, so that threads that start meanwhile have it
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), mask)


def default_folder() -> Path:
    """The folder of lock files of this user's processes on this node: memory that no other node sees."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "corral" if runtime else Path(f"/dev/shm/corral-{os.getuid()}")
    return base / "cores"


def take(
    topology: machine.Topology, n: int, folder: Path, *, spread: bool = False
) -> CoreLease | None:
    """Lease `n` CPUs as `choose` says; None if fewer are free. Processes that take at the same time do it
    one after the other. Raises OSError if the folder is not ours alone, or cannot be used."""
    make_private(folder)
    choosing = lock(folder / "choosing", LOCK_EX)
    try:
        free = {cpu for cpu in topology.cpus if not is_locked(folder / str(cpu))}
        cpus = choose(topology, free, n, spread=spread)
        if cpus is None:
            return None
        # Free a moment ago, and whoever wants one now waits for this one.
        locks = tuple(lock(folder / str(cpu), LOCK_EX) for cpu in cpus)
        of_all = set(cpus)
        return CoreLease(cpus, topology.one_of_each(of_all), topology.node_of(of_all), locks)
    finally:
        os.close(choosing)


def choose(
    topology: machine.Topology, free: Set[int], n: int, *, spread: bool = False
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
    idle = _idle(pool, free)
    preferred = [cpu for core in idle for cpu in core.cpus]
    if spread:
        first = {core.cpus[0] for core in idle}
        preferred.sort(key=lambda cpu: cpu not in first)
    preferred += [cpu for core in pool if core not in idle for cpu in core.cpus if cpu in free]
    return tuple(sorted(preferred[:n])) if len(preferred) >= n else None


def _idle(cores: Sequence[machine.PhysicalCore], free: Set[int]) -> list[machine.PhysicalCore]:
    return [core for core in cores if free >= {*core.cpus}]


def _n_free(cores: Sequence[machine.PhysicalCore], free: Set[int]) -> int:
    return sum(cpu in free for core in cores for cpu in core.cpus)

"""The physical cores, hyper-threads and NUMA nodes that this process may run on.

Source: the kernel's sysfs: cpu/online, cpu/cpu*/topology/thread_siblings_list and
node/node*/cpulist, as in its admin-guide/cputopology.rst and ABI/stable/sysfs-devices-node; the
affinity mask is that of /proc/thread-self/status. Missing files, as in some containers and on
macOS, mean one hyper-thread for each core and no known node. Nodes without CPUs, which only have
memory, do not appear.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PhysicalCore:
    """Hyper-threads that share execution units."""

    cpus: tuple[int, ...]
    """Hyper-threads that this process may run on, ascending, by the kernel's and taskset(1)'s numbers."""
    node: int | None
    """The NUMA node, if the kernel tells."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Cores by their lowest CPU number. Every CPU is in exactly one."""

    cores: tuple[PhysicalCore, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def nodes(self) -> tuple[int | None, ...]:
        """All NUMA nodes that have some of the cores; None for the unknown one."""
        return tuple(dict.fromkeys(core.node for core in self.cores))

    def node_of(self, cpus: Set[int]) -> int | None:
        """The NUMA node that has all of these CPUs, if one has."""
        nodes = {core.node for core in self.cores if not cpus.isdisjoint(core.cpus)}
        return nodes.pop() if len(nodes) == 1 else None

    def one_of_each(self, cpus: Set[int]) -> tuple[int, ...]:
        """The lowest of these CPUs on each physical core that has some of them, ascending."""
        of_cores = ([cpu for cpu in core.cpus if cpu in cpus] for core in self.cores)
        return tuple(sorted(min(of_core) for of_core in of_cores if of_core))


def read(root: Path = Path("/"), allowed: Set[int] | None = None) -> Topology:
    """The allowed CPUs that are online; default: `allowed_cpus`. `root` is where /proc and /sys are."""
    system = root / "sys/devices/system"
    cpus = set(allowed_cpus(root) if allowed is None else allowed)
    online = _cpu_list(system / "cpu/online")
    cpus = cpus & online or cpus
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _cpu_list(folder / "cpulist")
    }
    return Topology(tuple(_cores(system / "cpu", cpus, nodes)))


def allowed_cpus(root: Path = Path("/")) -> set[int]:
    """The affinity mask of this thread, which a container's cpuset bounds; all CPUs where there is none."""
    with suppress(OSError):
        for line in (root / "proc/thread-self/status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return parse_cpus(line.partition(":")[2])
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cores(folder: Path, cpus: set[int], nodes: dict[int, int]) -> Iterator[PhysicalCore]:
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left:
            siblings = _cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list")
            of_core = {cpu} | siblings & left
            left -= of_core
            yield PhysicalCore(tuple(sorted(of_core)), nodes.get(cpu))


def _cpu_list(path: Path) -> set[int]:
    """The CPUs of such a file; none if there is no such file."""
    try:
        return parse_cpus(path.read_text())
    except OSError:
        return set()


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a list like "0-3,8", as the kernel writes it."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)}


def list_cpus(cpus: Iterable[int]) -> str:
    """The other way round, for people: "0-3, 8"; two neighbours are two numbers."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )

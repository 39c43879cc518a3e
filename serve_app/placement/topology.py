"""The physical cores, hyper-threads and NUMA nodes that this process may run on.

Source: the kernel's sysfs: cpu/online, cpu/cpu*/topology/thread_siblings_list and node/node*/cpulist, as
in its admin-guide/cputopology.rst and ABI/stable/sysfs-devices-node. What is not there, as in some
containers, counts as one hyper-thread for each core and no known node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PhysicalCore:
    """Hyper-threads that share execution units."""

    cpus: tuple[int, ...]
    """Those that this process may run on, by the numbers that the kernel and taskset(1) use; ascending."""
    node: int | None
    """Its NUMA node, if the kernel tells."""


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


def read(root: Path = Path("/"), allowed: Set[int] | None = None) -> Topology:
    """What is online of the allowed CPUs; default: this thread's affinity mask. `root` is where /sys is."""
    system = root / "sys/devices/system"
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
    online = _cpu_list(system / "cpu/online")
    cpus = cpus & online if online else cpus
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _cpu_list(folder / "cpulist")
    }
    return Topology(tuple(_cores(system / "cpu", cpus, nodes)))


def _cores(folder: Path, cpus: set[int], nodes: dict[int, int]) -> Iterator[PhysicalCore]:
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left:
            siblings = _cpu_list(folder / f"cpu{cpu}/topology/thread_siblings_list")
            of_core = {cpu} | siblings & left
            left -= of_core
            yield PhysicalCore(tuple(sorted(of_core)), nodes.get(cpu))


def _cpu_list(path: Path) -> set[int]:
    """The CPUs of a file like "0-3,8"; none if there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return set()
    ends = (part.partition("-") for part in text.split(",") if part)
    return {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)}

"""The cores and the memory that this process may really use, containers' limits included.

Sources: cgroups(7); the kernel's cgroup-v2.rst (cpu.max, memory.max) and cgroup-v1
(cpu.cfs_quota_us over cpu.cfs_period_us, memory.limit_in_bytes). A limit of any ancestor counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serve_app.placement import topology
from serve_app.placement.topology import Topology

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Machine:
    """The part of a machine that one process, and those that it starts, may use."""

    topology: Topology
    quota: float | None
    """The CPU quota in cores; None if it allows all CPUs."""
    memory_bytes: int
    """Bytes that are free for this process."""
    total_bytes: int
    """The memory that would be available if nothing used any."""

    @property
    def n_cpus(self) -> int:
        """CPUs that can be busy at once, hyper-threads counted, as Ray counts; at least 1."""
        n = len(self.topology.cpus)
        return n if self.quota is None else max(1, math.floor(self.quota))

    @property
    def n_cores(self) -> int:
        """Physical cores that can be busy at once."""
        return min(self.n_cpus, len(self.topology.cores))


def read(root: Path = _ROOT) -> Machine:
    """The machine whose /proc and /sys are in `root`."""
    cores, quota = topology.read(root), cpu_quota(root)
    if quota is not None and quota >= len(cores.cpus):
        quota = None
    return Machine(cores, quota, available_memory(root), total_memory(root))


def own_cpus(machine: Machine, reserved: float) -> int:
    """CPUs that are a replica's own, when Ray has reserved so many; 0 reserves none, and means all."""
    cpus = machine.n_cpus
    return min(cpus, max(1, math.floor(reserved))) if reserved > 0 else cpus


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU seconds that this process's cgroups allow in a second; None without a quota."""
    return min(_cpu_quotas(root), default=None)


def oversubscription(threads: int, cores: int, whose: str) -> str | None:
    """The problem with so many threads on so many cores, if there is one."""
    if threads <= cores:
        return None
    return (
        f"engine.threads: {threads} threads on {cores} core{'s' * (cores > 1)}, {whose}, wait for each "
        "other in every step: lower engine.threads and engine.threads_batch, or set "
        "engine.allow_oversubscription: true"
    )


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine's memory, or of the least of this process's cgroups' limits."""
    return min([_machine_memory(root, "MemTotal:"), *(limit for limit, _ in _memory_limits(root))])


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still take: the smaller of what the machine has available and
    what its cgroups' limits leave."""
    headrooms = (limit - used for limit, used in _memory_limits(root))
    bounds = [_machine_memory(root, "MemAvailable:"), *_cpuset_memory(root), *headrooms]
    return max(0, min(bounds))


def _machine_memory(root: Path, name: str) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # no Linux: all there is


def _cpuset_memory(root: Path) -> Iterator[int]:
    """The bytes that are free, or hold pages of files, on the NUMA nodes that a cpuset allows, if
    it forbids some."""
    nodes = {
        int(folder.name.removeprefix("node")): _node_memory(folder)
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    for line in _read(root / "proc/thread-self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            allowed = topology.parse_cpus(line.partition(":")[2])
            if not nodes.keys() <= allowed:
                yield sum(n_bytes for node, n_bytes in nodes.items() if node in allowed)


def _node_memory(folder: Path) -> int:
    fields = (line.split()[2:4] for line in _read(folder / "meminfo").splitlines())
    counted = ("MemFree:", "Active(file):", "Inactive(file):")
    return sum(int(number) * 1024 for name, number in fields if name in counted)


def throttled_s(root: Path = _ROOT) -> float:
    """Seconds of CPU time that quotas of this process's cgroups have withheld so far; 0 without any."""
    for group in _groups(root, ""):
        for line in _read(group / "cpu.stat").splitlines():
            if line.startswith("throttled_usec "):
                return int(line.split()[1]) / 1e6
    for group in _groups(root, "cpu"):
        for line in _read(group / "cpu.stat").splitlines():
            if line.startswith("throttled_time "):
                return int(line.split()[1]) / 1e9
    return 0.0


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        quota = _read(group / "cpu.cfs_quota_us")
        if quota.isdigit():
            yield int(quota) / int(_read(group / "cpu.cfs_period_us"))


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Each limit, and what is in use of it."""
    for group in _groups(root, ""):
        limit = _read(group / "memory.max")
        if limit.isdigit():
            yield int(limit), int(_read(group / "memory.current") or 0)
    for group in _groups(root, "memory"):
        limit = _read(group / "memory.limit_in_bytes")
        if limit.isdigit():
            yield int(limit), int(_read(group / "memory.usage_in_bytes") or 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and its ancestors, nearest first, in the hierarchy of a v1
    controller, or in v2's for ""."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            yield group
            while group != mount:
                group = group.parent
                yield group


def _read(path: Path) -> str:
    """The file's text, or "" if there is no such file, as where a controller is not mounted."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

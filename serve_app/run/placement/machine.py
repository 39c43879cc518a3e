"""The CPUs, cores, NUMA nodes and memory that this process may really use, containers' limits included.

Sources: the kernel's admin-guide/cputopology.rst (cpu/online, cpu/cpu*/topology/thread_siblings_list and
node/node*/cpulist of sysfs); the masks of /proc/thread-self/status. Of cgroups(7): cgroup-v2.rst (cpu.max,
memory.max) and cgroup-v1 (cpu.cfs_quota_us over cpu.cfs_period_us, memory.limit_in_bytes). A limit
of any ancestor counts. Missing files, as in some containers and on macOS, mean one hyper-thread for each
core and no known node. Nodes without CPUs do not appear.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class PhysicalCore:
    """Hyper-threads that share execution units."""

    cpus: tuple[int, ...]
    """Hyper-threads that this process may run on, ascending, by the kernel's and taskset(1)'s numbers."""
    node: int | None


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


def read_machine(root: Path = _ROOT) -> Machine:
    """The machine whose /proc and /sys are in `root`."""
    topology, quota = read_topology(root), cpu_quota(root)
    if quota is not None and quota >= len(topology.cpus):
        quota = None
    return Machine(topology, quota, available_memory(root), total_memory(root))


def read_topology(root: Path = _ROOT, allowed: Set[int] | None = None) -> Topology:
    """The allowed CPUs that are online; default: `allowed_cpus`. `root` is where /proc and /sys are."""
    system = root / "sys/devices/system"
    cpus = set(allowed_cpus(root) if allowed is None else allowed)
    cpus = cpus & parse_cpus(_read_text(system / "cpu/online")) or cpus
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in parse_cpus(_read_text(folder / "cpulist"))
    }
    cores = []
    for cpu in sorted(cpus):
        if cpu in cpus:
            siblings = _read_text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
            of_core = {cpu} | parse_cpus(siblings) & cpus
            cpus -= of_core
            cores.append(PhysicalCore(tuple(sorted(of_core)), nodes.get(cpu)))
    return Topology(tuple(cores))


def allowed_cpus(root: Path = _ROOT) -> set[int]:
    """The affinity mask of this thread, which a container's cpuset bounds; all CPUs where there is none."""
    if (allowed := _mask(root, "Cpus")) is not None:
        return allowed
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a list like "0-3,8", as the kernel writes it."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for low, _, high in ends for cpu in range(int(low), int(high or low) + 1)}


def list_cpus(cpus: Iterable[int]) -> str:
    """The CPUs as a list for people: "0-3, 8"; two neighbours are two numbers."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def own_cpus(machine: Machine, reserved: float) -> int:
    """CPUs that are a replica's own, when Ray has reserved so many; 0 reserves none, and means all."""
    cpus = machine.n_cpus
    return min(cpus, max(1, math.floor(reserved))) if reserved > 0 else cpus


def oversubscription(threads: int, cores: int, whose: str) -> str | None:
    """The problem with so many threads on so many cores, if there is one."""
    if threads <= cores:
        return None
    return (
        f"engine.threads: {threads} threads on {cores} core{'s' * (cores > 1)}, {whose}, wait for each "
        "other in every step: lower engine.threads and engine.threads_batch"
    )


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU seconds that this process's cgroups allow in a second; None without a quota."""
    v2 = (text.partition(" ") for (text,) in _settings(root, "", "cpu.max"))
    v1 = _settings(root, "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    limits = [*((quota, period) for quota, _, period in v2), *v1]
    return min(
        (int(quota) / int(period) for quota, period in limits if quota.isdigit()), default=None
    )


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine's memory, or of the least of this process's cgroups' limits."""
    return min([_machine_memory(root, "MemTotal:"), *(limit for limit, _ in _memory_limits(root))])


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still take, of the machine's and of its cgroups' limits."""
    headrooms = (limit - used for limit, used in _memory_limits(root))
    bounds = [_machine_memory(root, "MemAvailable:"), *_cpuset_memory(root), *headrooms]
    return max(0, min(bounds))


def throttled_s(root: Path = _ROOT) -> float:
    """Seconds of CPU time that quotas of this process's cgroups have withheld so far; 0 without any."""
    for controller, name, unit_s in (
        ("", "throttled_usec ", 1e-6),
        ("cpu", "throttled_time ", 1e-9),
    ):
        for (text,) in _settings(root, controller, "cpu.stat"):
            for line in text.splitlines():
                if line.startswith(name):
                    return int(line.split()[1]) * unit_s
    return 0.0


class ThrottleWatch:
    """Turns readings of `throttled_s` into log lines, one a minute at most. One thread."""

    def __init__(self, throttled_s: float, now: float) -> None:
        """Time withheld before `now` (seconds of any clock) does not count."""
        self._told_s = throttled_s
        self._since = self._silent_until = now

    def look(self, throttled_s: float, quota: float | None, now: float) -> str | None:
        """The line to log, if CPU time was withheld since the last one; `quota` is in cores."""
        withheld = throttled_s - self._told_s
        if withheld <= 0 or now < self._silent_until:
            return None
        named = "The CPU quota" if quota is None else f"The CPU quota of {quota:g} cores"
        line = (
            f"{named} has withheld {withheld:.1f} s of CPU time in the last {now - self._since:.0f} s: "
            "raise it, or give this replica fewer threads."
        )
        self._told_s, self._since, self._silent_until = throttled_s, now, now + _SILENCE_S
        return line


def _machine_memory(root: Path, name: str) -> int:
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # no Linux: all there is


def _cpuset_memory(root: Path) -> Iterator[int]:
    """The bytes that are free or hold pages of files on the NUMA nodes of a cpuset, if it forbids some."""
    nodes = {
        int(folder.name.removeprefix("node")): _node_memory(folder)
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    allowed = _mask(root, "Mems")
    if allowed is not None and not nodes.keys() <= allowed:
        yield sum(n_bytes for node, n_bytes in nodes.items() if node in allowed)


def _node_memory(folder: Path) -> int:
    fields = (line.split()[2:4] for line in _read_text(folder / "meminfo").splitlines())
    counted = ("MemFree:", "Active(file):", "Inactive(file):")
    return sum(int(number) * 1024 for name, number in fields if name in counted)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limits, each with what is in use of it."""
    settings = (
        *_settings(root, "", "memory.max", "memory.current"),
        *_settings(root, "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for limit, used in settings:
        if limit.isdigit():
            yield int(limit), int(used or 0)


def _mask(root: Path, kind: str) -> set[int] | None:
    """The mask of this thread's "Cpus" or "Mems", if the kernel tells."""
    for line in _read_text(root / "proc/thread-self/status").splitlines():
        if line.startswith(f"{kind}_allowed_list:"):
            return parse_cpus(line.partition(":")[2])
    return None


def _settings(root: Path, controller: str, *names: str) -> Iterator[tuple[str, ...]]:
    """The contents of these files in the control group of this process and in its ancestors', nearest
    first. `controller` names a hierarchy of v1; "" is v2's."""
    mount = root / "sys/fs/cgroup" / controller
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            while True:
                yield tuple(_read_text(group / name) for name in names)
                if group == mount:
                    break
                group = group.parent


def _read_text(path: Path) -> str:
    """The file's text, or "" if there is no such file, as where a controller is not mounted."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

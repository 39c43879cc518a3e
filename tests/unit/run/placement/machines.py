"""Made-up machines: what the kernel would tell of them under /proc and /sys."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from serve_app.run.placement.machine import Machine, PhysicalCore, Topology, list_cpus, read_machine

# (hyper-threads, NUMA node) of each physical core, numbered as Linux numbers Intel's and AMD's servers:
# first one hyper-thread of every core, then the others.
TWO_SOCKETS = [((i, i + 32), i // 16) for i in range(32)]
FOUR_NODES = [((i,), i // 4) for i in range(16)]
LAPTOP = [((i, i + 1), 0) for i in range(0, 8, 2)]
EPYC = [((i, i + 128), i // 64) for i in range(128)]  # two sockets of 64 cores
HYBRID = [((2 * i, 2 * i + 1), 0) for i in range(6)] + [((i,), 0) for i in range(12, 20)]
SMALL = [((0,), 0), ((1,), 0)]


def topology(cores: Iterable[tuple[tuple[int, ...], int | None]]) -> Topology:
    return Topology(tuple(PhysicalCore(cpus, node) for cpus, node in cores))


def write(
    root: Path, cores: Iterable[tuple[tuple[int, ...], int | None]], online: str | None = None
) -> Path:
    """A /sys that tells of these cores; nodes that are None are not told."""
    system = root / "sys/devices/system"
    nodes: dict[int, list[int]] = {}
    for cpus, node in cores:
        for cpu in cpus:
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(",".join(map(str, cpus)) + "\n")
            if node is not None:
                nodes.setdefault(node, []).append(cpu)
    for node, of_node in nodes.items():
        folder = system / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, of_node)) + "\n")
    if online is not None:
        (system / "cpu/online").write_text(online + "\n")
    return root


def machine(
    root: Path,
    cores: Iterable[tuple[tuple[int, ...], int | None]],
    *,
    files: Mapping[str, str] | None = None,
    available_kib: int = 64 * 2**20,
) -> Machine:
    """Such a machine, as it is read, its /proc and any other files included."""
    cores = list(cores)
    cpus = {cpu for of_core, _ in cores for cpu in of_core}
    files = {
        "proc/thread-self/status": f"Name:\tserve\nCpus_allowed_list:\t{_listed(cpus)}\n",
        "proc/meminfo": f"MemTotal:  {2 * available_kib} kB\nMemAvailable:  {available_kib} kB\n",
        "proc/self/cgroup": "0::/pod\n",
        **(files or {}),
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if any(name.startswith("sys/devices") for name in files):
        return read_machine(write(root, cores, online=_listed(cpus)))
    (root / "sys").mkdir(exist_ok=True)
    (root / "sys/devices").symlink_to(
        _written(root.parent, tuple(cores), _listed(cpus)) / "sys/devices"
    )
    return read_machine(root)


@cache
def _written(
    base: Path, cores: tuple[tuple[tuple[int, ...], int | None], ...], online: str
) -> Path:
    """A /sys below `base` that tells of these cores, which all tests read: it may have a thousand files."""
    return write(Path(tempfile.mkdtemp(dir=base, prefix="machine-")), cores, online)


def _listed(cpus: Iterable[int]) -> str:
    return list_cpus(cpus).replace(" ", "")

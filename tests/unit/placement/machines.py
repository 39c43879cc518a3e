"""Made-up machines: what the kernel would tell of them under /sys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from serve_app.placement.topology import PhysicalCore, Topology

# (hyper-threads, NUMA node) of each physical core, numbered as Linux numbers Intel's and AMD's servers:
# first one hyper-thread of every core, then the others.
TWO_SOCKETS = [((i, i + 32), i // 16) for i in range(32)]
FOUR_NODES = [((i,), i // 4) for i in range(16)]
LAPTOP = [((i, i + 1), 0) for i in range(0, 8, 2)]


def topology(cores: Iterable[tuple[tuple[int, ...], int | None]]) -> Topology:
    return Topology(tuple(PhysicalCore(cpus, node) for cpus, node in cores))


def write(
    root: Path,
    cores: Iterable[tuple[tuple[int, ...], int | None]],
    online: str | None = None,
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

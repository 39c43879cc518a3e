"""What this process may use of a machine: CPUs, cores, NUMA nodes, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.run.placement.machine import (
    PhysicalCore,
    ThrottleWatch,
    allowed_cpus,
    available_memory,
    list_cpus,
    parse_cpus,
    read_machine,
    read_topology,
    throttled_s,
    total_memory,
)
from tests.unit.run.placement.machines import FOUR_NODES, LAPTOP, TWO_SOCKETS, topology, write


def test_two_sockets_with_hyper_threads(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, TWO_SOCKETS, online="0-63"), set(range(64)))
    assert found == topology(TWO_SOCKETS)
    assert found.cpus == tuple(range(64))
    assert found.nodes == (0, 1)


def test_four_nodes(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, FOUR_NODES), set(range(16)))
    assert found == topology(FOUR_NODES)
    assert found.node_of({4, 7}) == 1
    assert found.node_of({3, 4}) is None


def test_the_affinity_mask_counts(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, LAPTOP), {1, 2, 3, 6})
    assert [core.cpus for core in found.cores] == [(1,), (2, 3), (6,)]


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, LAPTOP, online="0-2,5"), set(range(8)))
    assert [core.cpus for core in found.cores] == [(0, 1), (2,), (5,)]


def test_cores_without_a_known_node(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, [((0, 1), None), ((2, 3), None)]), {0, 1, 2, 3})
    assert found.cores == (PhysicalCore((0, 1), None), PhysicalCore((2, 3), None))
    assert found.nodes == (None,)
    assert found.node_of({0}) is None


def test_without_sysfs_every_cpu_is_a_core(tmp_path: Path) -> None:
    found = read_topology(tmp_path, {3, 1})
    assert found.cores == (PhysicalCore((1,), None), PhysicalCore((3,), None))


def test_a_node_without_cpus(tmp_path: Path) -> None:
    root = write(tmp_path, LAPTOP)
    folder = root / "sys/devices/system/node/node1"
    folder.mkdir()
    (folder / "cpulist").write_text("\n")
    assert read_topology(root, set(range(8))).nodes == (0,)


@pytest.mark.parametrize(
    ("cpus", "text"), [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([4, 0, 1, 2, 8, 9], "0-2, 4, 8, 9")]
)
def test_lists_of_cpus(cpus: list[int], text: str) -> None:
    assert list_cpus(cpus) == text
    assert parse_cpus(text.replace(" ", "") + "\n") == set(cpus)


def test_the_mask_is_read_where_it_is_told(tmp_path: Path) -> None:
    status = tmp_path / "proc/thread-self/status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tserve\nCpus_allowed:\t0000000f\nCpus_allowed_list:\t2,5-6\n")
    assert allowed_cpus(tmp_path) == {2, 5, 6}


def test_where_there_are_no_masks_all_cpus_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_cpus(tmp_path) == {0, 1, 2}
    assert len(read_topology(tmp_path).cores) == 3


def test_one_cpu_of_each_core() -> None:
    assert topology(LAPTOP).one_of_each({1, 2, 3, 6}) == (1, 2, 6)


def test_this_machine() -> None:
    assert read_topology().cpus == tuple(sorted(os.sched_getaffinity(0)))


AFFINITY = len(os.sched_getaffinity(0))


def machine(root: Path, files: dict[str, str]) -> Path:
    """A made-up /proc and /sys."""
    for name, text in {"proc/meminfo": "MemTotal: 9\nMemAvailable:  1000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/x\n3:cpuset:/\n2:cpu,cpuacct:/docker/x\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "100000 100000"}, 1),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "5000 100000"}, 1),
        (V2 | {"sys/fs/cgroup/a/cpu.max": "100000 100000"}, 1),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "9900000 100000"}, None),
        (V1 | {"sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1"}, None),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "120000",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
    ids=[
        "no cgroups",
        "v2 no controller",
        "v2 max",
        "v2 one core",
        "v2 rounds down",
        "v2 at least one",
        "v2 ancestor",
        "v2 more than affinity",
        "v1 unlimited",
        "v1 quota",
        "v1 seen from inside a container",
    ],
)
def test_cpus_that_can_be_busy(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    expected = AFFINITY if quota is None else min(AFFINITY, quota)
    assert read_machine(machine(tmp_path, files)).n_cpus == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": "max"}, 1_024_000),
        (
            V2 | {"sys/fs/cgroup/a/memory.max": "5000", "sys/fs/cgroup/a/memory.current": "2000"},
            3000,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "7000",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "8000",
            },
            0,
        ),
    ],
    ids=["machine", "v2 max", "v2 ancestor", "v1 over its limit"],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_memory(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 3 kB\n"}, 9 * 1024),
        (V2 | {"sys/fs/cgroup/a/memory.max": "5000", "sys/fs/cgroup/a/memory.current": "2"}, 5000),
    ],
    ids=["machine", "a limit"],
)
def test_total_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    files = {"proc/meminfo": "MemTotal: 9 kB\n", **files}
    assert total_memory(machine(tmp_path, files)) == expected


NODE = "Node {0} MemTotal: 900 kB\nNode {0} MemFree: {1} kB\nNode {0} Inactive(file): 100 kB\n"


@pytest.mark.parametrize(
    ("allowed", "expected"), [("0-2", 1000), ("1", 300), ("0-1", 700), ("0,2", 500), ("0-63", 1000)]
)
def test_memory_of_the_nodes_that_a_cpuset_allows(
    tmp_path: Path, allowed: str, expected: int
) -> None:
    """The third node has memory only."""
    folder = "sys/devices/system/node"
    files = {
        f"{folder}/node{i}/meminfo": NODE.format(i, free) for i, free in enumerate((300, 200, 0))
    }
    files["proc/thread-self/status"] = f"Cpus_allowed_list:\t0\nMems_allowed_list:\t{allowed}\n"
    assert available_memory(machine(tmp_path, files)) == 1024 * expected


def test_without_meminfo_it_is_all_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_affinity_counts() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert read_machine().n_cpus == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0.0),
        (V2, 0.0),
        (V2 | {"sys/fs/cgroup/a/b/cpu.stat": "usage_usec 9\nthrottled_usec 1500000\n"}, 1.5),
        (V1 | {"sys/fs/cgroup/cpu/docker/x/cpu.stat": "throttled_time 2500000000\n"}, 2.5),
    ],
)
def test_throttled_time(tmp_path: Path, files: dict[str, str], expected: float) -> None:
    assert throttled_s(machine(tmp_path, files)) == expected


def test_growth_is_told_once_a_minute() -> None:
    watch = ThrottleWatch(5.0, now=100)
    assert watch.look(5.0, 1.5, now=105) is None
    assert watch.look(6.25, 1.5, now=110) == (
        "The CPU quota of 1.5 cores has withheld 1.2 s of CPU time in the last 10 s: "
        "raise it, or give this replica fewer threads."
    )
    assert watch.look(9.0, 1.5, now=169) is None
    told = watch.look(9.25, None, now=170)
    assert told is not None
    assert told.startswith("The CPU quota has withheld 3.0 s of CPU time in the last 60 s:")
    assert watch.look(9.25, None, now=400) is None

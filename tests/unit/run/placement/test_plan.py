"""How replicas share made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.run.placement import plan
from tests.unit.run.placement.machines import (
    EPYC,
    FOUR_NODES,
    HYBRID,
    LAPTOP,
    SMALL,
    TWO_SOCKETS,
    machine,
)

CPU_MAX = "sys/fs/cgroup/pod/cpu.max"
UNEVEN = [((i,), 0) for i in range(8)] + [((i,), 1) for i in range(8, 12)]
CUT = FOUR_NODES[:9]  # a container's cpuset leaves one CPU of the third node
UNKNOWN = [((i,), None) for i in range(6)]


@pytest.mark.parametrize(
    ("cores", "files", "expected"),
    [
        (SMALL, {}, (1, 2, 2)),
        (LAPTOP, {}, (1, 8, 4)),
        (HYBRID, {}, (1, 20, 14)),
        (EPYC, {}, (2, 128, 64)),
        (TWO_SOCKETS, {}, (2, 32, 16)),
        (FOUR_NODES, {}, (4, 4, 4)),
        (UNEVEN, {}, (3, 4, 4)),
        (CUT, {}, (2, 4, 4)),
        (UNKNOWN, {}, (1, 6, 6)),
        (EPYC, {CPU_MAX: "650000 100000\n"}, (1, 6, 6)),
        (EPYC, {CPU_MAX: "50000 100000\n"}, (1, 1, 1)),
        (EPYC, {CPU_MAX: "10000000 100000\n"}, (2, 50, 50)),
        (EPYC, {CPU_MAX: "20000000 100000\n"}, (2, 100, 64)),
        (EPYC, {CPU_MAX: "max 100000\n"}, (2, 128, 64)),
        (LAPTOP, {CPU_MAX: "600000 100000\n"}, (1, 6, 4)),
    ],
    ids=[
        "two cores",
        "a laptop",
        "large and small cores",
        "2 x 64 cores",
        "2 x 16 cores",
        "four nodes",
        "uneven nodes",
        "a cpuset that leaves little of a node",
        "no nodes known",
        "a quota of 6.5",
        "a quota below one",
        "a quota of more than a node",
        "and of more than all cores",
        "no quota",
        "a quota of hyper-threads",
    ],
)
def test_one_model(
    tmp_path: Path,
    cores: list[tuple[tuple[int, ...], int | None]],
    files: dict[str, str],
    expected: tuple[int, float, int],
) -> None:
    (share,) = plan.shares(machine(tmp_path, cores, files=files), 1)
    assert (share.n_replicas, share.num_cpus, share.n_cores) == expected


@pytest.mark.parametrize(
    ("cores", "n_models", "n_replicas", "num_cpus", "n_cores"),
    [
        (FOUR_NODES, 2, [2, 2], 4, 4),
        (FOUR_NODES, 3, [2, 1, 1], 4, 4),
        (FOUR_NODES, 5, [1] * 5, 2, 2),
        (EPYC, 3, [1] * 3, 64, 32),
        (LAPTOP, 3, [1] * 3, 2, 1),
        (LAPTOP, 5, [1] * 5, 1, 1),
        (SMALL, 3, [1] * 3, 0.66, 1),
    ],
)
def test_models_divide_the_machine_where_the_configuration_sizes_one(
    tmp_path: Path,
    cores: list[tuple[tuple[int, ...], int | None]],
    n_models: int,
    n_replicas: list[int],
    num_cpus: float,
    n_cores: int,
) -> None:
    here = machine(tmp_path, cores)
    shares = plan.shares(here, n_models, divided=True)
    assert [share.n_replicas for share in shares] == n_replicas
    assert {(share.num_cpus, share.n_cores) for share in shares} == {(num_cpus, n_cores)}
    assert sum(share.n_replicas for share in shares) * num_cpus <= here.n_cpus
    assert {share.place_cpus for share in shares} == {0}


@pytest.mark.parametrize(
    ("cores", "n_models", "num_cpus", "n_cores", "place_cpus"),
    [
        (FOUR_NODES, 3, 4, 4, 0),  # each has a node
        (FOUR_NODES, 5, 2, 4, 4),
        (EPYC, 3, 64, 64, 128),
        (LAPTOP, 3, 2, 4, 8),
        (SMALL, 3, 0.66, 2, 2),
    ],
)
def test_models_of_one_node_have_all_of_its_cores_in_turns(
    tmp_path: Path,
    cores: list[tuple[tuple[int, ...], int | None]],
    n_models: int,
    num_cpus: float,
    n_cores: int,
    place_cpus: int,
) -> None:
    """Ray reserves a part for each, so that all can be placed."""
    here = machine(tmp_path, cores)
    shares = plan.shares(here, n_models)
    assert {(one.num_cpus, one.n_cores, one.place_cpus) for one in shares} == {
        (num_cpus, n_cores, place_cpus)
    }
    assert sum(share.n_replicas for share in shares) * num_cpus <= here.n_cpus


@pytest.mark.parametrize(
    ("cores", "quota", "reason"),
    [
        (SMALL, "max", "1 replica, because there is one NUMA node"),
        (EPYC, "max", "2 replicas, because each of 2 NUMA nodes has 128 CPUs"),
        (UNEVEN, "max", "3 replicas, because NUMA nodes have 8, 4 CPUs, and each replica 4"),
        (EPYC, "650000", "1 replica, because a quota allows 6.5 of 256 CPUs"),
    ],
)
def test_reasons(
    tmp_path: Path, cores: list[tuple[tuple[int, ...], int | None]], quota: str, reason: str
) -> None:
    here = machine(tmp_path, cores, files={CPU_MAX: f"{quota} 100000\n"})
    assert plan.shares(here, 1)[0].reason == reason
    in_turns = " in turns" if plan.shares(here, 2)[0].place_cpus else ""
    assert plan.shares(here, 2)[0].reason.endswith(f", which 2 models share{in_turns}")
    assert plan.shares(here, 2, divided=True)[0].reason.endswith(", which 2 models share")


@pytest.mark.parametrize(("n", "expected"), [(1, (1, 16, 16)), (2, (2, 8, 8)), (3, (3, 4, 4))])
def test_fewer_replicas_take_the_places_of_all(
    tmp_path: Path, n: int, expected: tuple[int, float, int]
) -> None:
    (share,) = plan.shares(machine(tmp_path, FOUR_NODES), 1)
    fewer = plan.merge(share, n)
    assert (fewer.n_replicas, fewer.num_cpus, fewer.n_cores) == expected
    assert "instead of 4, because memory has no room for more" in fewer.reason


def test_nodes_with_memory_only_have_no_replica(tmp_path: Path) -> None:
    """As CXL memory is: a node of its own, without CPUs."""
    node = "sys/devices/system/node/node2"
    files = {f"{node}/cpulist": "\n", f"{node}/meminfo": "Node 2 MemTotal: 999 kB\n"}
    assert plan.shares(machine(tmp_path, TWO_SOCKETS, files=files), 1)[0].n_replicas == 2


@pytest.mark.parametrize(
    ("cores", "reserved", "expected"),
    [
        *((EPYC, *both) for both in [(0, 128), (128, 64), (8, 4), (1, 1), (0.5, 1), (999, 128)]),
        (FOUR_NODES, 4, 4),
        (HYBRID, 10, 7),
        (SMALL, 2.5, 2),
    ],
)
def test_physical_cores_of_reserved_cpus(
    tmp_path: Path, cores: list[tuple[tuple[int, ...], int | None]], reserved: float, expected: int
) -> None:
    assert plan.n_cores(machine(tmp_path, cores), reserved) == expected


@pytest.mark.parametrize(
    ("quota", "threads", "expected"),
    [("max", 8, 16), ("max", 128, 256), ("max", 200, 256), ("650000", 4, 4), ("650000", 9, 6)],
)
def test_cpus_for_threads(tmp_path: Path, quota: str, threads: int, expected: int) -> None:
    here = machine(tmp_path, EPYC, files={CPU_MAX: f"{quota} 100000\n"})
    assert plan.cpus_for(here, threads) == expected


@pytest.mark.parametrize(
    ("num_cpus", "most", "expected"), [(8, 10, 2), (8, 1, 1), (0, 10, 10), (32, 10, 1), (0.5, 3, 3)]
)
def test_replicas_that_fit(tmp_path: Path, num_cpus: float, most: int, expected: int) -> None:
    assert plan.n_together(machine(tmp_path, FOUR_NODES), num_cpus, most) == expected

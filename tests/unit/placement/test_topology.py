"""Physical cores, hyper-threads and NUMA nodes, as the kernel tells them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_app.placement.topology import PhysicalCore, allowed_cpus, list_cpus, parse_cpus, read
from tests.unit.placement.machines import FOUR_NODES, LAPTOP, TWO_SOCKETS, topology, write


def test_two_sockets_with_hyper_threads(tmp_path: Path) -> None:
    found = read(write(tmp_path, TWO_SOCKETS, online="0-63"), set(range(64)))
    assert found == topology(TWO_SOCKETS)
    assert found.cpus == tuple(range(64))
    assert found.nodes == (0, 1)


def test_four_nodes(tmp_path: Path) -> None:
    found = read(write(tmp_path, FOUR_NODES), set(range(16)))
    assert found == topology(FOUR_NODES)
    assert found.node_of({4, 7}) == 1
    assert found.node_of({3, 4}) is None


def test_the_affinity_mask_counts(tmp_path: Path) -> None:
    found = read(write(tmp_path, LAPTOP), {1, 2, 3, 6})
    assert [core.cpus for core in found.cores] == [(1,), (2, 3), (6,)]


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    found = read(write(tmp_path, LAPTOP, online="0-2,5"), set(range(8)))
    assert [core.cpus for core in found.cores] == [(0, 1), (2,), (5,)]


def test_cores_without_a_known_node(tmp_path: Path) -> None:
    found = read(write(tmp_path, [((0, 1), None), ((2, 3), None)]), {0, 1, 2, 3})
    assert found.cores == (PhysicalCore((0, 1), None), PhysicalCore((2, 3), None))
    assert found.nodes == (None,)
    assert found.node_of({0}) is None


def test_without_sysfs_every_cpu_is_a_core(tmp_path: Path) -> None:
    found = read(tmp_path, {3, 1})
    assert found.cores == (PhysicalCore((1,), None), PhysicalCore((3,), None))


def test_a_node_without_cpus(tmp_path: Path) -> None:
    root = write(tmp_path, LAPTOP)
    folder = root / "sys/devices/system/node/node1"
    folder.mkdir()
    (folder / "cpulist").write_text("\n")
    assert read(root, set(range(8))).nodes == (0,)


@pytest.mark.parametrize(
    ("cpus", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([4, 0, 1, 2, 8, 9], "0-2, 4, 8, 9")],
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
    assert len(read(tmp_path).cores) == 3


def test_one_cpu_of_each_core() -> None:
    assert topology(LAPTOP).one_of_each({1, 2, 3, 6}) == (1, 2, 6)


def test_this_machine() -> None:
    assert read().cpus == tuple(sorted(os.sched_getaffinity(0)))

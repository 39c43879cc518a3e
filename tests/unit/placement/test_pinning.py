"""A replica's place on its node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.placement.machine import read
from serve_app.placement.pinning import CorePinning, pin
from tests.unit.placement.machines import write

MINE = sorted(os.sched_getaffinity(0))


def release(place: CorePinning) -> None:
    assert place.lease is not None
    place.lease.release()


@pytest.mark.parametrize("reserved", [0.0, 0.5, 1.5])
def test_parts_of_cores_are_not_leased(tmp_path: Path, reserved: float) -> None:
    place = pin(reserved, tmp_path)
    assert place.cores is None
    assert place.numa_node is None
    assert place.report == (
        f"not pinned to cores: num_cpus is {reserved:g}, which is not a whole number of cores"
    )


def test_cores_that_a_quota_makes_others_use_are_not_leased(tmp_path: Path) -> None:
    root = write(tmp_path, [((cpu,), 0) for cpu in MINE])
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "50000 100000",
    }.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    report = pin(1, tmp_path / "cores", read(root)).report
    assert f"a CPU quota of 0.5 cores, on {len(MINE)} cores that others use" in report


def test_more_than_there_are(tmp_path: Path) -> None:
    place = pin(len(MINE) + 1, tmp_path / "cores")
    assert place.report.endswith(f"fewer than {len(MINE) + 1} of {len(MINE)} cores are free")
    assert sorted(os.sched_getaffinity(0)) == MINE


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = pin(1, tmp_path / "file")
    assert place.cores is None
    assert "leases cannot be kept in" in place.report


def test_cores_that_others_have_are_not_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.placement.pinning._set_affinity", lambda cpus: None)
    place = pin(len(MINE), tmp_path / "cores")
    assert place.cores == tuple(MINE)
    assert pin(1, tmp_path / "cores").cores is None
    release(place)
    again = pin(1, tmp_path / "cores")
    assert again.cores == (MINE[0],)
    release(again)


def test_cores_that_the_kernel_refuses_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, mask: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setaffinity", refuse)
        assert "the kernel does not allow it" in pin(1, tmp_path / "cores").report
    monkeypatch.setattr("serve_app.placement.pinning._set_affinity", lambda cpus: None)
    place = pin(1, tmp_path / "cores")
    assert place.cores == (MINE[0],)
    release(place)


PROGRAM = """
import os, sys, threading
from pathlib import Path
from serve_app.placement.machine import read
from serve_app.placement.pinning import pin

masks, mine = [], os.sched_getaffinity(0)
settled = threading.Event()
early = threading.Thread(target=lambda: (settled.wait(), masks.append(os.sched_getaffinity(0))))
early.start()
place = pin(1, Path(sys.argv[1]))
late = threading.Thread(target=lambda: masks.append(os.sched_getaffinity(0)))
late.start()
settled.set()
early.join(), late.join()
assert masks == [set(place.cores)] * 2, (masks, place)
print(place.report)

left = threading.Event()
early = threading.Thread(target=lambda: (left.wait(), masks.append(os.sched_getaffinity(0))))
early.start()
place.undo()
left.set()
early.join()
assert masks[2] == os.sched_getaffinity(0) == mine, (masks, mine)
again = pin(1, Path(sys.argv[1]))
assert again.cores == place.cores
"""


def test_all_threads_of_the_process_are_pinned_until_it_leaves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cores")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"pinned to cores {MINE[0]}")

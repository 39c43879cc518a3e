"""A replica's place on its node: leases of cores, pinning, threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.run.placement.machine import Topology, read
from serve_app.run.placement.pinning import CorePinning, choose, default_folder, pin, take
from tests.unit.run.placement.machines import FOUR_NODES, LAPTOP, TWO_SOCKETS, topology, write


def release(*places: CorePinning) -> None:
    for place in places:
        assert place.lease is not None
        place.lease.release()


ALL = set(range(64))
CORES = [((i,), None) for i in range(8)]


@pytest.mark.parametrize(
    ("free", "n", "expected"),
    [
        (ALL, 4, [0, 1, 32, 33]),
        (ALL, 3, [0, 1, 32]),
        (ALL - {0, 32}, 32, [*range(16, 32), *range(48, 64)]),
        (ALL - {5}, 2, [16, 48]),
        (ALL - set(range(31)), 5, [31, 48, 49, 50, 63]),
    ],
    ids=["cores", "and a half", "a whole node", "the emptier node", "then beside others"],
)
def test_whole_cores(free: Set[int], n: int, expected: list[int]) -> None:
    assert choose(topology(TWO_SOCKETS), free, n) == tuple(expected)


@pytest.mark.parametrize(
    ("machine", "free", "n", "expected"),
    [
        (TWO_SOCKETS, ALL, 4, range(4)),
        (TWO_SOCKETS, ALL, 16, range(16)),
        (TWO_SOCKETS, ALL - set(range(4)), 4, range(16, 20)),
        (TWO_SOCKETS, ALL, 18, [*range(16), 32, 33]),
        (TWO_SOCKETS, ALL, 33, [*range(32), 32]),
        (TWO_SOCKETS, ALL - set(range(32)), 2, [32, 33]),
        (TWO_SOCKETS, ALL - set(range(30)), 4, [30, 31, 62, 63]),
        (TWO_SOCKETS, ALL, 65, None),
        (FOUR_NODES, set(range(3, 16)), 4, range(4, 8)),
        (FOUR_NODES, {0, 1, 2, 4, 5, 8, 9, 10, 11}, 3, [8, 9, 10]),
        (FOUR_NODES, {0, 1, 4, 5, 6, 9}, 4, [0, 4, 5, 6]),
        (FOUR_NODES, set(), 1, None),
        (LAPTOP, {0, 2, 3}, 1, [2]),
        (LAPTOP, {0, 2, 3}, 2, [2, 3]),
        (LAPTOP, {0, 2, 3}, 3, [0, 2, 3]),
        (CORES, {1, 5}, 2, [1, 5]),
    ],
    ids=[
        "one hyper-thread each",
        "a whole node",
        "the node with more idle cores",
        "hyper-threads rather than another node",
        "two nodes, cores first",
        "others' hyper-threads",
        "own hyper-threads before others'",
        "more than there are",
        "a whole node rather than parts",
        "the emptiest node",
        "as few nodes as it takes",
        "nothing free",
        "an idle core before a half one",
        "its own second half next",
        "then what is left",
        "no nodes known",
    ],
)
def test_spread_choice(
    machine: list[tuple[tuple[int, ...], int | None]],
    free: Set[int],
    n: int,
    expected: list[int] | None,
) -> None:
    chosen = choose(topology(machine), free, n, spread=True)
    assert chosen == (None if expected is None else tuple(expected))


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Up to four nodes of up to six cores, their CPUs numbered in any order."""
    widths = draw(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), max_size=4))
    numbers = iter(draw(st.permutations(range(sum(map(sum, widths))))))
    known = draw(st.booleans())
    return topology(
        (tuple(sorted(next(numbers) for _ in range(width))), node if known else None)
        for node, of_node in enumerate(widths)
        for width in of_node
    )


@given(machines(), st.data())
def test_what_is_chosen(machine: Topology, data: st.DataObject) -> None:
    cpus = machine.cpus
    free = data.draw(st.sets(st.sampled_from(cpus))) if cpus else set()
    n = data.draw(st.integers(1, 26))
    spread = data.draw(st.booleans())
    chosen = choose(machine, free, n, spread=spread)
    if n > len(free):
        assert chosen is None
        return
    assert chosen is not None
    assert len(set(chosen)) == n
    assert set(chosen) <= free
    assert chosen == tuple(sorted(chosen))
    # Of one node, whenever one has as many.
    of_node = {
        node: {cpu for core in machine.cores if core.node == node for cpu in core.cpus}
        for node in machine.nodes
    }
    pool = free
    if any(len(cpus & free) >= n for cpus in of_node.values()):
        (pool,) = [cpus for cpus in of_node.values() if cpus.issuperset(chosen)]
    # Whole physical cores first.
    idle = [set(core.cpus) for core in machine.cores if set(core.cpus) <= free & pool]
    taken = [core for core in idle if not core.isdisjoint(chosen)]
    if spread:
        assert len(taken) == min(n, len(idle))
    else:
        assert sum(not core <= set(chosen) for core in taken) <= 1


@given(machines(), st.lists(st.integers(1, 6), max_size=12))
def test_leases_are_disjoint(machine: Topology, sizes: list[int]) -> None:
    free = set(machine.cpus)
    for n in sizes:
        chosen = choose(machine, free, n)
        if chosen is None:
            assert len(free) < n
        else:
            assert free.issuperset(chosen)
            free.difference_update(chosen)


def test_leases_of_one_process_are_disjoint_too(tmp_path: Path) -> None:
    machine = topology(CORES)
    first, second = take(machine, 3, tmp_path / "a/b"), take(machine, 3, tmp_path / "a/b")
    assert first is not None
    assert second is not None
    assert (first.cpus, second.cpus) == ((0, 1, 2), (3, 4, 5))
    assert take(machine, 3, tmp_path / "a/b") is None
    first.release()
    third = take(machine, 3, tmp_path / "a/b")
    assert third is not None
    assert third.cpus == (0, 1, 2)
    for lease in (second, third):
        lease.release()


def test_a_lease_knows_its_node(tmp_path: Path) -> None:
    inside, across = (
        take(topology(FOUR_NODES), 4, tmp_path),
        take(topology(FOUR_NODES), 5, tmp_path),
    )
    assert inside is not None
    assert across is not None
    assert (inside.numa_node, across.numa_node) == (0, None)
    for lease in (inside, across):
        lease.release()


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = take(topology(CORES), 1, tmp_path / "corral/cores")
    assert lease is not None
    lease.release()
    assert (tmp_path / "corral/cores").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        take(topology(CORES), 1, tmp_path / "corral/cores")


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_folder() == Path("/run/user/7/corral/cores")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_folder() == Path(f"/dev/shm/corral-{os.getuid()}/cores")


# -- processes ------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from serve_app.run.placement.pinning import take
from serve_app.run.placement.machine import PhysicalCore, Topology

machine = Topology(tuple(PhysicalCore((cpu,), None) for cpu in range(8)))
print("ready", flush=True)
sys.stdin.readline()
lease = take(machine, 2, Path(sys.argv[1]))
print(*([] if lease is None else lease.cpus), flush=True)
sys.stdin.read()
"""


@contextmanager
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Leases 2 of 8 CPUs when it is told a line, prints them, and keeps them until its input ends."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        try:
            yield started
        finally:
            started.kill()


def go(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def leased(started: subprocess.Popen[str]) -> list[int]:
    assert started.stdout is not None
    return [int(cpu) for cpu in started.stdout.readline().split()]


def test_processes_race_and_one_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "cores"
    with (
        process(folder) as a,
        process(folder) as b,
        process(folder) as c,
        process(folder) as d,
        process(folder) as e,
        process(folder) as late,
    ):
        racers = [a, b, c, d, e]
        for racer in racers:
            go(racer)
        by_racer = [leased(racer) for racer in racers]
        assert sorted(cpu for cpus in by_racer for cpu in cpus) == list(range(8))
        assert sorted(map(len, by_racer)) == [0, 2, 2, 2, 2]
        victim = next(i for i, cpus in enumerate(by_racer) if cpus)
        racers[victim].send_signal(signal.SIGKILL)
        racers[victim].wait(30)
        go(late)
        assert leased(late) == by_racer[victim]


MINE = sorted(os.sched_getaffinity(0))


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
    monkeypatch.setattr("serve_app.run.placement.pinning._set_affinity", lambda cpus: None)
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
    monkeypatch.setattr("serve_app.run.placement.pinning._set_affinity", lambda cpus: None)
    place = pin(1, tmp_path / "cores")
    assert place.cores == (MINE[0],)
    release(place)


PINNED_PROGRAM = """
import os, sys, threading
from pathlib import Path
from serve_app.run.placement.machine import read
from serve_app.run.placement.pinning import pin

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
    command = [sys.executable, "-c", PINNED_PROGRAM, str(tmp_path / "cores")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"pinned to cores {MINE[0]}")

"""How a replica finds its place and its threads, on made-up machines."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import ConfigError
from serve_app.base.sharing.locks import is_locked
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.run.placement.machine import Machine
from serve_app.run.placement.pinning import CorePinning, CpuPlacement, default_folder, place_on_cpus
from serve_app.run.resolving import resolve
from tests.unit.run.placement.machines import EPYC, FOUR_NODES, LAPTOP, SMALL, machine

FOUR = [((i,), 0) for i in range(4)]


@pytest.fixture(autouse=True)
def _nothing_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("serve_app.run.placement.pinning._set_affinity", lambda cpus: None)


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    """Four cores."""
    return machine(tmp_path / "root", FOUR)


def model(here: Machine, num_cpus: float | None = None, **engine: Any) -> ResolvedModel:
    entry = {
        "id": "m",
        "source": {"builtin": True},
        "engine": {"n_slots": 4, "n_ctx_slot": 256, **engine},
        "serve": {"ray_actor_options": {"num_cpus": num_cpus}},
    }
    (resolved,) = resolve(schema.parse({"models": [entry]}), here)
    return resolved


def cores(placement: CpuPlacement) -> tuple[int, ...]:
    assert placement.pinning.cores is not None
    return placement.pinning.cores


def release(*places: CorePinning) -> None:
    for place in places:
        assert place.lease is not None
        place.lease.release()


@pytest.mark.parametrize(
    ("reserved", "configured", "threads"),
    [(0, None, 4), (2, None, 2), (0.5, None, 1), (2.5, None, 2), (9, None, 4), (3, 2, 2)],
)
def test_threads_are_the_least_of_all(
    here: Machine, reserved: float, configured: int | None, threads: int
) -> None:
    assert place_on_cpus(model(here, threads=configured), reserved, here).threads == threads


@pytest.mark.parametrize(
    ("num_cpus", "engine", "expected"),
    [
        (None, {}, 4),
        (None, {"threads": 2}, 2),
        (None, {"threads": 2, "threads_batch": 3}, 3),
        (None, {"threads_batch": 2}, 4),
        (8, {"threads": 8}, 8),
    ],
)
def test_a_core_is_reserved_for_every_thread(
    here: Machine, num_cpus: float | None, engine: dict[str, Any], expected: float
) -> None:
    assert (num_cpus or model(here, num_cpus, **engine).num_cpus) == expected
    assert model(here, num_cpus, **engine).options.threads_batch == engine.get("threads_batch")


@pytest.mark.parametrize(
    ("num_cpus", "engine", "message"),
    [
        (None, {"threads": 5}, "5 threads on 4 cores, all that this machine may use"),
        (None, {"threads_batch": 5}, "5 threads on 4 cores"),
        (2, {"threads": 3}, "3 threads on 2 cores, which serve.ray_actor_options.num_cpus"),
        (0.5, {"threads": 2}, "2 threads on 1 core, which"),
    ],
)
def test_too_many_threads_stop_the_start(
    here: Machine, num_cpus: float | None, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"models \(m\): engine.threads: " + message):
        model(here, num_cpus, **engine)


def test_the_node_may_have_fewer_cores_than_ray_believes(here: Machine) -> None:
    with pytest.raises(ConfigError, match="8 threads on 4 cores, all that this replica may use"):
        place_on_cpus(model(here, 8, threads=8), 8, here)


def test_numa_without_nodes_has_no_effect(here: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "corral.replica"):
        placement = place_on_cpus(model(here, threads=1, numa="distribute"), 1, here)
    assert "engine.numa has no effect" in caplog.text
    assert cores(placement) == (0,)


@pytest.mark.parametrize(("numa", "pinned"), [("isolate", False), ("numactl", True)])
def test_threads_that_llama_cpp_places_are_not_pinned(
    tmp_path: Path, numa: str, pinned: bool
) -> None:
    here = machine(tmp_path / "root", FOUR_NODES)
    placement = place_on_cpus(model(here, threads=1, numa=numa), 1, here)
    assert (placement.pinning.cores is not None) is pinned


def test_two_cores_are_as_they_always_were(tmp_path: Path) -> None:
    here = machine(tmp_path / "root", SMALL)
    placement = place_on_cpus(model(here), model(here).num_cpus, here)
    assert (placement.threads, cores(placement)) == (2, (0, 1))
    assert placement.computing_cpus is None
    assert placement.pinning.report == "pinned to cores 0, 1, which no other replica uses"


def test_each_replica_has_a_node_and_one_that_drains_keeps_its_own(tmp_path: Path) -> None:
    here = machine(tmp_path / "root", EPYC)
    resolved = model(here)
    assert (resolved.n_replicas, resolved.num_cpus) == (2, 128)
    first, second, third = (place_on_cpus(resolved, 128, here) for _ in range(3))
    for node, placement in enumerate((first, second)):
        ours = range(64 * node, 64 * node + 64)
        assert placement.threads == 64
        assert placement.reason == "one for each physical core of its 128 CPUs"
        assert cores(placement) == (*ours, *(cpu + 128 for cpu in ours))
        assert placement.computing_cpus == tuple(ours)
        assert placement.pinning.numa_node == node
    assert "0-63, 128-191 of NUMA node 0" in first.pinning.report
    assert third.pinning.report == "not pinned to cores: fewer than 128 of 256 cores are free"
    assert third.threads == 64
    release(first.pinning)
    fourth = place_on_cpus(resolved, 128, here)
    assert cores(fourth) == cores(first)
    release(second.pinning, fourth.pinning)


def test_replicas_of_reserved_hyper_threads_share_no_core(tmp_path: Path) -> None:
    here = machine(tmp_path / "root", LAPTOP)
    first, second = (place_on_cpus(model(here, 4), 4, here) for _ in range(2))
    assert (cores(first), cores(second)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (first.threads, first.computing_cpus) == (2, (0, 2))
    release(first.pinning, second.pinning)


@pytest.mark.parametrize(
    ("threads", "num_cpus", "expected", "computing"),
    [(4, 4, (0, 2, 4, 6), None), (2, 4, (0, 1, 2, 3), (0, 2)), (8, 8, tuple(range(8)), None)],
    ids=["cores for all", "whole cores", "hyper-threads, if they are asked for"],
)
def test_configured_threads_win(
    tmp_path: Path,
    threads: int,
    num_cpus: float,
    expected: tuple[int, ...],
    computing: tuple[int, ...] | None,
) -> None:
    here = machine(tmp_path / "root", LAPTOP)
    placement = place_on_cpus(model(here, num_cpus, threads=threads), num_cpus, here)
    assert (placement.threads, placement.reason) == (threads, "as configured")
    assert cores(placement) == expected
    assert placement.computing_cpus == computing
    release(placement.pinning)


def two_models(here: Machine) -> list[ResolvedModel]:
    entries = [
        {"id": name, "source": {"builtin": True}, "engine": {"n_slots": 4, "n_ctx_slot": 256}}
        for name in ("a", "b")
    ]
    return resolve(schema.parse({"models": entries}), here)


def test_two_models_have_all_cores_in_turns(here: Machine) -> None:
    placements = [place_on_cpus(one, one.num_cpus, here) for one in two_models(here)]
    assert [one.num_cpus for one in two_models(here)] == [2, 2]
    for placement in placements:
        assert (placement.threads, cores(placement)) == (4, (0, 1, 2, 3))
        assert placement.pinning.report == "on cores 0-3 in turns with others"
    assert placements[0].turns is not None
    assert placements[0].turns == placements[1].turns
    assert placements[0].turns.name == "0-3"
    release(*(placement.pinning for placement in placements))


def test_a_seat_is_given_back_where_the_kernel_allows_no_affinity(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cpus: object) -> None:
        raise OSError("not allowed")

    first, second = two_models(here)
    with monkeypatch.context() as patched:
        patched.setattr("serve_app.run.placement.pinning._set_affinity", refuse)
        refused = place_on_cpus(first, first.num_cpus, here)
    assert (
        refused.pinning.report == "not pinned to cores: the kernel does not allow it (not allowed)"
    )
    assert refused.threads == 4
    assert not is_locked(default_folder() / "seat-0-0")
    placement = place_on_cpus(second, second.num_cpus, here)
    assert is_locked(default_folder() / "seat-0-0")
    release(placement.pinning)


def test_a_server_beside_another_one_takes_turns_with_it(here: Machine) -> None:
    """The first one has leased all cores."""
    first, second = (place_on_cpus(model(here), 4, here) for _ in range(2))
    assert second.pinning.cores is None
    assert first.turns == second.turns
    release(first.pinning)


def test_places_of_a_larger_node_are_filled_one_after_the_other(tmp_path: Path) -> None:
    """As on Ray, where nodes differ: a place is as large as where the configuration was read."""
    small, large = (
        machine(tmp_path / "small", [((i,), 0) for i in range(2)]),
        machine(tmp_path / "large", FOUR),
    )
    a, b = two_models(small)
    placements = [place_on_cpus(one, one.num_cpus, large) for one in (a, b, a, b)]
    assert list(map(cores, placements)) == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [one.turns and one.turns.name for one in placements] == ["0_1", "2_3", "0_1", "2_3"]
    release(*(placement.pinning for placement in placements))


def test_long_lists_of_cpus_that_begin_alike_share_no_turns(tmp_path: Path) -> None:
    names = set()
    for last in (100, 102):
        odd = machine(tmp_path / str(last), [((i,), 0) for i in (*range(0, 80, 2), last)])
        placement = place_on_cpus(model(odd), 41, odd)
        assert placement.turns is not None
        names.add(placement.turns.name)
        release(placement.pinning)
    assert len(names) == 2
    assert {len(name) for name in names} == {60}


def test_configured_threads_take_no_turns(here: Machine) -> None:
    placement = place_on_cpus(model(here, threads=2), 2, here)
    assert placement.turns is None
    release(placement.pinning)


def test_a_quota_is_for_threads_anywhere(tmp_path: Path) -> None:
    here = machine(tmp_path / "root", EPYC, files={"sys/fs/cgroup/pod/cpu.max": "650000 100000\n"})
    placement = place_on_cpus(model(here), model(here).num_cpus, here)
    assert placement.threads == 6
    assert placement.reason == "its part of a CPU quota of 6.5 cores, on 256 that others use too"
    assert placement.pinning.cores is None
    assert placement.computing_cpus is None


def test_a_replica_larger_than_a_node_says_so(tmp_path: Path) -> None:
    here = machine(tmp_path / "root", FOUR_NODES)
    placement = place_on_cpus(model(here, 6), 6, here)
    assert "of several NUMA nodes (no node has 6 free)" in placement.pinning.report
    release(placement.pinning)

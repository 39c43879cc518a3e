"""Replicas on one node have cores of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import START_TIMEOUT_S, Corral, model, wait_until

PROCESS = "ray::ServeReplica:corral:engine-m"


def pinned(server: Corral) -> dict[int, set[int]]:
    """The affinity of each replica's process: of all its threads, which must be the same."""
    masks = {}
    for pid in server.pids(PROCESS):
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        (masks[pid],) = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
    return {pid: set(mask) for pid, mask in masks.items()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.long
def test_two_replicas_have_cores_of_their_own_and_so_has_the_next(
    gguf: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    entry = model(gguf, "m", n_slots=2, n_ctx_slot=256)
    entry["serve"] = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}
    server = start([entry])
    server.wait_ready()

    def both_up() -> bool:
        return len(server.replicas()) == 2

    wait_until(both_up, START_TIMEOUT_S, lambda: f"two replicas:\n{server.log}")
    cores = [replica["cores"] for replica in server.replicas()]
    assert [len(of_one) for of_one in cores] == [1, 1], server.log
    assert cores[0] != cores[1]
    by_pid = pinned(server)
    assert sorted(map(sorted, by_pid.values())) == sorted(cores)
    assert "pinned to cores" in server.log

    victim, survivor = by_pid
    old = {replica["replica_id"] for replica in server.replicas()}
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        now = {replica["replica_id"] for replica in server.replicas()}
        return len(now) == 2 and now != old

    wait_until(replaced, START_TIMEOUT_S, lambda: f"a new replica:\n{server.log}")
    assert sorted(replica["cores"] for replica in server.replicas()) == sorted(cores)
    assert pinned(server)[survivor] == by_pid[survivor]


def test_replicas_with_parts_of_cores_are_not_pinned(corral: Corral) -> None:
    (replica,) = corral.replicas()
    assert replica["cores"] is None
    assert replica["numa_node"] is None

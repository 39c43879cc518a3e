"""Two models of one machine have all of its cores in turns."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loadtests.hostile.setups import in_turns
from tests.e2e.cluster.test_failover import Streams
from tests.e2e.conftest import Corral, short_folder, wait_until

NAMES = ("one", "two")
N_TOKENS = 120
LEAST_SHARE = 0.35
# Long beside a turn, and beside one answer.
MEASURED_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Corral]:
    with short_folder() as directory:
        corral = Corral(directory, list(map(in_turns, NAMES)), local=True)
        try:
            for name in NAMES:
                corral.wait_for_model(name)
            yield corral
        finally:
            corral.stop()


def replica(server: Corral, name: str) -> dict[str, Any]:
    stats = httpx.get(f"{server.url}/v1/stats", timeout=30, verify=False).json()
    (found,) = (model["replicas"][0] for model in stats["models"] if model["id"] == name)
    one: dict[str, Any] = found
    return one


def turn_s(server: Corral, name: str) -> float:
    seconds: float = replica(server, name)["engine"]["timing"]["turn_s"]
    return seconds


def test_both_have_all_cores_and_half_of_their_time(server: Corral) -> None:
    placements = {replica(server, name)["placement"].partition(";")[0] for name in NAMES}
    assert len(placements) == 1
    assert "in turns" in placements.pop()
    streams = [Streams(server, 2, N_TOKENS, name) for name in NAMES]
    is_enough = threading.Event()

    def read_on(each: Streams, number: int) -> None:
        while not is_enough.is_set():
            each.read(number)

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read_on, each, i) for each in streams for i in each.numbers]
        try:
            wait_until(lambda: all(each.n_begun == 2 for each in streams), 60, "no streams")
            before = [turn_s(server, name) for name in NAMES]

            def shares() -> list[float]:
                """The seconds of turns since then."""
                return [turn_s(server, name) - s for name, s in zip(NAMES, before, strict=True)]

            wait_until(lambda: sum(shares()) > MEASURED_S, 120, "hardly any turns")
            measured = shares()
        finally:
            is_enough.set()
        for one in reading:
            one.result()
    assert min(measured) > LEAST_SHARE * sum(measured)


def test_a_model_that_is_lost_does_not_keep_its_turn(server: Corral) -> None:
    """The other one's stream goes on, and the lost one is started again."""
    lost, kept = (Streams(server, 2, N_TOKENS, name) for name in NAMES)
    with ThreadPoolExecutor(4) as pool:
        losing = [pool.submit(lost.read, i) for i in lost.numbers]
        reading = [pool.submit(kept.read, i) for i in kept.numbers]
        wait_until(lambda: lost.n_begun == kept.n_begun == 2, 60, "no streams")
        os.kill(int(replica(server, "one")["replica_id"].rpartition("-")[2]), signal.SIGKILL)
        for one in reading:
            one.result()
        for one in losing:
            one.exception()
    server.wait_for_model("one")

"""`make cluster-up`: nodes come with work and go with it; no request fails, and no process stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from cluster.local.cluster import ClusterError, LocalCluster
from loadtests.common.processes import tagged
from loadtests.common.servers import free_port
from tests.e2e.conftest import all_the_time, short_folder, wait_until

SCALE_TIMEOUT_S = 120
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with short_folder() as directory:
        cluster = LocalCluster(directory / "c", free_port(), free_port(), free_port())
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


def busy_nodes(cluster: LocalCluster) -> set[str]:
    """Those with a replica that has generated something."""
    (model,) = httpx.get(f"{cluster.url}/v1/stats").json()["models"]
    return {r["node_id"] for r in model["replicas"] if r["engine"]["tokens"]["generated_tokens"]}


@contextmanager
def asking(cluster: LocalCluster, n_clients: int, max_tokens: int) -> Iterator[None]:
    """Meanwhile, clients ask all the time; every answer must be a whole one."""
    answers = list[tuple[int, int]]()

    def ask(client: int) -> None:
        body = {"prompt": f"{client}: hello", "max_tokens": max_tokens, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        answers.append((answer.status_code, answer.json()["usage"]["completion_tokens"]))

    with all_the_time(ask, n_clients):
        yield
    assert set(answers) == {(200, max_tokens)}


def test_a_burst_brings_nodes_and_rest_takes_them_away(cluster: LocalCluster) -> None:
    assert cluster.worker_nodes() == 1
    with pytest.raises(ClusterError, match="up already"):
        cluster.up()
    other = dataclasses.replace(cluster, folder=cluster.folder.with_name("other"))
    with pytest.raises(ClusterError, match=f"Port {cluster.ray_port} is in use"):
        other.up()
    with asking(cluster, 12, 200):
        wait_until(lambda: len(busy_nodes(cluster)) >= 2, SCALE_TIMEOUT_S, "two nodes answer")
    assert cluster.worker_nodes() >= 2
    with asking(cluster, 1, 1):
        wait_until(lambda: cluster.worker_nodes() == 1, SCALE_TIMEOUT_S, "one node is left")
    cluster.down()
    assert not tagged(cluster.folder)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{cluster.url}/health")

"""Nodes of a Ray cluster download a file once. Each is a raylet of this machine with its own folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from loadtests.common import processes, servers
from loadtests.common.servers import free_port
from serve_app.config.sources import DownloadsConfig, ModelSource
from serve_app.progress import Stage
from tests.e2e.conftest import SETTINGS, model, wait_until
from tests.integration.store import hub_server
from tests.integration.store.hub_server import Hub
from tests.integration.store.sharded import split
from tools.random_models.model import SHAPES, write_random_gguf

SHAPE = replace(SHAPES["tiny"], n_layer=8, n_embd=1024, n_ff=4096)
PIECE_BYTES = 2**20
N_PIECES = 64
SOURCE = ModelSource(repo="owner/name:Q8_0")
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
TIMEOUT_S = 180
MOST = 1.1
"""So many times a file's bytes may leave the hub."""
pytestmark = pytest.mark.long


def fetch(folder: Path, token: str | None = None, hub: str | None = None) -> tuple[str, Stage]:
    """What a replica does on its node: the file's SHA-256, and where it came from."""
    from serve_app.progress import nowhere
    from serve_app.store import download
    from serve_app.store.models import locate
    from serve_app.store.sharing import ClusterSharing

    download.PIECE_BYTES = PIECE_BYTES
    os.environ["HF_TOKEN"] = token or ""
    os.environ["HF_ENDPOINT"] = hub or os.environ["HF_ENDPOINT"]
    told: list[Stage] = []
    downloads = DownloadsConfig(folder=folder)
    path = locate(SOURCE, downloads, told.append, ClusterSharing())
    assert locate(SOURCE, downloads, nowhere, ClusterSharing()) == path
    return hashlib.sha256(path.read_bytes()).hexdigest(), told[-1]


@dataclass
class Nodes:
    """A cluster and a hub."""

    cluster: Cluster
    hub: Hub
    folder: Path
    nodes: list[Any] = field(default_factory=list)

    def add(self) -> int:
        """Its number."""
        folder = self.folder / f"node-{len(self.nodes)}"
        self.nodes.append(self.cluster.add_node(env_vars={"XDG_CACHE_HOME": str(folder)}, **NODE))
        self.cluster.wait_for_nodes()
        return len(self.nodes) - 1

    def fetch(self, node: int, **settings: str) -> Any:
        """A node begins to fetch the file."""
        where = NodeAffinitySchedulingStrategy(self.nodes[node].node_id, soft=False)
        made = ray.remote(fetch).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        return made.remote(self.folder / f"node-{node}", **settings)

    @property
    def content(self) -> bytes:
        """Of the file."""
        (content,) = self.hub.files.values()
        return content

    @property
    def sent(self) -> float:
        """How often the file has left the hub."""
        return sum(self.hub.n_bytes.values()) / len(self.content)

    def results(self, *references: Any) -> list[Stage]:
        """Where each had its file from; all of them have the right one."""
        found: list[tuple[str, Stage]] = ray.get([*references], timeout=TIMEOUT_S)
        expected = hashlib.sha256(self.content).hexdigest()
        assert [one for one, _ in found] == [expected] * len(found)
        return [stage for _, stage in found]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """One node, which is the head."""
    hub = Hub({"m-Q8_0.gguf": os.urandom(PIECE_BYTES * N_PIECES - 1000)})
    with hub_server.running(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "library-cache"))
        cluster = Cluster(
            initialize_head=True,
            head_node_args=NODE
            | {
                "include_dashboard": False,
                "dashboard_port": free_port(),
                "env_vars": {"XDG_CACHE_HOME": str(tmp_path / "node-0")},
            },
        )
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield Nodes(cluster, hub, tmp_path, [cluster.head_node])
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]


def test_two_nodes_download_once_and_a_third_has_it_from_them(nodes: Nodes) -> None:
    nodes.add()
    nodes.hub.bytes_per_s = 4e6  # of each connection: else one node is done before the other begins
    stages = nodes.results(nodes.fetch(0), nodes.fetch(1))
    assert nodes.sent <= MOST
    assert sorted(bool(stage.from_nodes_bytes) for stage in stages) == [False, True]
    assert {one.from_origin_bytes + one.from_nodes_bytes for one in stages} == {len(nodes.content)}
    before = sum(nodes.hub.n_bytes.values())
    (late,) = nodes.results(nodes.fetch(nodes.add()))
    assert (late.from_origin_bytes, late.from_nodes_bytes) == (0, len(nodes.content))
    assert sum(nodes.hub.n_bytes.values()) - before == 1  # whether it may have it


def test_nobody_gets_from_other_nodes_what_the_hub_refuses(nodes: Nodes) -> None:
    nodes.add()
    nodes.hub.token = "secret"
    nodes.results(nodes.fetch(0, token="secret"))
    nodes.hub.is_gated = True
    with pytest.raises(ray.exceptions.RayTaskError, match="HF_TOKEN"):
        nodes.results(nodes.fetch(1))
    (stage,) = nodes.results(nodes.fetch(1, token="secret"))
    assert stage.from_origin_bytes == 0


@pytest.mark.parametrize("dies", ["nobody", "a node", "the first process", "a process"])
def test_four_nodes_download_once_whoever_dies(nodes: Nodes, dies: str) -> None:
    for _ in range(3):
        nodes.add()
    nodes.hub.bytes_per_s = 1e6
    running = [nodes.fetch(node) for node in range(4)]
    wait_until(lambda: nodes.sent > 0.4, TIMEOUT_S, "the download does not begin")
    assert nodes.sent < 0.9, "this is not the middle"
    survivors = running
    match dies:
        case "a node":
            nodes.cluster.remove_node(nodes.nodes[2], allow_graceful=False)
            survivors = [*running[:2], running[3]]
        case "the first process" | "a process":
            began = 0 if dies == "the first process" else 1
            ray.cancel(running[began], force=True)
            with pytest.raises(ray.exceptions.RayError):
                ray.get(running[began], timeout=TIMEOUT_S)
            running[began] = nodes.fetch(began)
    nodes.results(*survivors)
    assert nodes.sent <= MOST


def test_a_node_without_a_way_to_the_hub_has_all_from_others(nodes: Nodes) -> None:
    nodes.add()
    nowhere = f"http://127.0.0.1:{free_port()}"
    nodes.hub.bytes_per_s = 4e6
    reaches = nodes.fetch(0)
    wait_until(lambda: nodes.sent > 0.1, TIMEOUT_S, "the download does not begin")
    _, cut_off = nodes.results(reaches, nodes.fetch(1, hub=nowhere))
    assert cut_off.from_origin_bytes == 0
    assert nodes.sent <= MOST


def test_a_node_that_died_later_has_nothing(nodes: Nodes) -> None:
    """What the cluster's head knows of it is old."""
    second = nodes.add()
    nodes.results(nodes.fetch(second))
    nodes.cluster.remove_node(nodes.nodes[second], allow_graceful=False)
    (stage,) = nodes.results(nodes.fetch(nodes.add()))
    assert stage.from_origin_bytes == len(nodes.content)


@pytest.mark.timeout(400)
def test_four_nodes_serve_after_one_download(nodes: Nodes, tmp_path: Path) -> None:
    """With replicas, an ingress that reads the vocabulary, and the application that is built."""
    for _ in range(3):
        nodes.add()
    write_random_gguf(tmp_path / "whole.gguf", SHAPE, "q8_0")
    paths = split(tmp_path / "whole.gguf", tmp_path / "m-Q8_0", 3)
    nodes.hub.files = {path.name: path.read_bytes() for path in paths}
    nodes.hub.bytes_per_s = 1e6
    port = free_port()
    served = model(None, "far", n_slots=2, n_ctx_slot=256) | {
        "source": {"repo": "owner/name:Q8_0"},
        "serve": {
            "num_replicas": 4,
            "max_replicas_per_node": 1,
            "ray_actor_options": {"num_cpus": 0.5},
        },
    }
    config = servers.write_config(tmp_path, [served], port)
    command = servers.serve_command("run", "--address", nodes.cluster.address, config)
    process = servers.start(command, tmp_path, SETTINGS)
    seen = dict[str, int]()
    try:
        wait_until(
            lambda: _n_replicas(port, seen) == 4, 300, (tmp_path / servers.LOG).read_text, 0.3
        )
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "far", "prompt": "Once", "max_tokens": 4, "ignore_eos": True},
        )
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        processes.stop(process, tmp_path, servers.STOP_TIMEOUT_S)
    assert len(seen) == 4
    assert sum(seen.values()) > 0
    assert sum(nodes.hub.n_bytes.values()) <= MOST * sum(map(len, nodes.hub.files.values()))


def _n_replicas(port: int, seen: dict[str, int]) -> int:
    """Those that answer. What others told that they have from nodes goes to `seen`."""
    try:
        stats = httpx.get(f"http://127.0.0.1:{port}/v1/stats")
        if not stats.is_success:  # Serve answers before the ingress does
            return 0
    except httpx.TransportError:
        return 0
    (told,) = stats.json()["models"]
    for one in told["fetching"]:
        seen[one["node_id"]] = max(seen.get(one["node_id"], 0), one["from_nodes_bytes"])
    return len(told["replicas"])

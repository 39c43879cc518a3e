"""Two hosts, and the network between them is cut in mid-stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster.hosts import hosts, needs_namespaces
from tests.e2e.cluster.test_failover import EXACT, Streams
from tests.e2e.conftest import model, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), needs_namespaces]


def test_streams_outlive_a_network_cut(gguf: Path) -> None:
    served = model(gguf, "m", n_slots=4, n_ctx_slot=2048, **EXACT)
    served["serve"] = {
        "num_replicas": 2,
        "max_replicas_per_node": 1,
        "ray_actor_options": {"num_cpus": 1},
    }
    with hosts(2, n_cpus=1) as cluster:
        log = cluster.serve([served])
        wait_until(lambda: len(cluster.replicas("m")) == 2, 90, log.read_text)
        assert len({replica["node_id"] for replica in cluster.replicas("m")}) == 2
        streams = Streams(cluster, 8, 1500)
        with ThreadPoolExecutor(8) as pool:
            alone = list(pool.map(streams.alone, streams.numbers))
            reading = [pool.submit(streams.read, number) for number in streams.numbers]
            wait_until(lambda: streams.n_begun == 8, 60, "eight streams")
            cluster.cut(1)
            for stream in reading:
                stream.result(180)
        assert streams.texts == alone
        assert "continues on another replica" in log.read_text()
